"""The vocabulary of sharding: what a dimension means, and what a call is part of.

A model names the dimensions of its arrays with these tokens;
`switchax.partition.PartitionAxis` says which axes of a device mesh each is split over.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, Literal, Self, TypeAlias, cast

import jax
import numpy as np

from .checks import brief, fail_type, fail_value
from .errors import near_miss

__all__ = [
    "BATCH",
    "BIAS_HEAD_SEQ",
    "BIAS_KV_SEQ",
    "DATA_PARALLEL",
    "DEFAULT_MASK_VALUE",
    "DP",
    "EMBED",
    "EMPTY",
    "EMPTY_VAL",
    "EP",
    "EXPERT",
    "EXPERT_GATE",
    "EXPERT_PARALLEL",
    "FSDP",
    "FULLY_SHARDED_DATA_PARALLEL",
    "GENERATION_MODES",
    "HEAD",
    "HEAD_DIM",
    "KV_HEAD",
    "KV_HEAD_DIM",
    "KV_LENGTH",
    "LENGTH",
    "MLP_INTERMEDIATE",
    "MODE_DECODE",
    "MODE_INSERT",
    "MODE_PREFILL",
    "MODE_TRAIN",
    "NOT_GIVEN",
    "QUERY_LENGTH",
    "RUNTIME_MODES",
    "RUNTIME_MODE_TYPES",
    "SEQUENCE_PARALLEL",
    "SP",
    "TENSOR_PARALLEL",
    "TP",
    "VOCAB",
    "Array",
    "AttnKVSharding",
    "AttnQSharding",
    "AxisIdxes",
    "AxisNames",
    "AxisType",
    "ColumnWise",
    "DType",
    "DynamicShardingAxes",
    "ExpertActivations",
    "ExpertActivationsAlt",
    "ExpertColumnWise",
    "ExpertColumnWiseAlt",
    "ExpertRowWise",
    "ExpertRowWiseAlt",
    "ExpertTensorParallel",
    "HiddenStateSharding",
    "LogicalAxes",
    "NotGiven",
    "PRNGKey",
    "Replicated",
    "RowWise",
    "SColumnWise",
    "SRowWise",
    "Shape",
    "UnifiedExpertColumnWise",
    "UnifiedExpertRowWise",
    "check_mode",
]

# Dimensions of arrays.
BATCH = "__BATCH__"
LENGTH = "__LENGTH__"
QUERY_LENGTH = "__QUERY_LENGTH__"
KV_LENGTH = "__KV_LENGTH__"
EMBED = "__EMBED__"
HEAD = "__HEAD__"
HEAD_DIM = "__HEAD_DIM__"
KV_HEAD = "__KV_HEAD__"
KV_HEAD_DIM = "__KV_HEAD_DIM__"
MLP_INTERMEDIATE = "__MLP_INTERMEDIATE__"
VOCAB = "__VOCAB__"
EXPERT = "__EXPERT__"
EXPERT_GATE = "__EXPERT_GATE__"
BIAS_HEAD_SEQ = "__BIAS_HEAD_SEQ__"
BIAS_KV_SEQ = "__BIAS_KV_SEQ__"
EMPTY = "_"  # a dimension that is never split

# Ways to be parallel, for parameters.
DATA_PARALLEL = DP = "__DATA_PARALLEL__"
FULLY_SHARDED_DATA_PARALLEL = FSDP = "__FULLY_SHARDED_DATA_PARALLEL__"
TENSOR_PARALLEL = TP = "__TENSOR_PARALLEL__"
SEQUENCE_PARALLEL = SP = "__SEQUENCE_PARALLEL__"
EXPERT_PARALLEL = EP = "__EXPERT_PARALLEL__"

# What a call is part of.
MODE_TRAIN: Final = "__train__"
MODE_PREFILL: Final = "__prefill__"
MODE_DECODE: Final = "__autoregressive__"
MODE_INSERT: Final = "__insert__"
_NAMES_OF_MODES = {
    "MODE_TRAIN": MODE_TRAIN,
    "MODE_PREFILL": MODE_PREFILL,
    "MODE_DECODE": MODE_DECODE,
    "MODE_INSERT": MODE_INSERT,
}
RUNTIME_MODES = tuple(_NAMES_OF_MODES.values())
RUNTIME_MODE_TYPES: TypeAlias = Literal[
    "__train__", "__prefill__", "__autoregressive__", "__insert__"
]
GENERATION_MODES = frozenset({MODE_DECODE, MODE_INSERT})

# Far below any logit, and twice it is still finite in float32 and bfloat16.
DEFAULT_MASK_VALUE = -0.7 * float(np.finfo(np.float32).max)

Array: TypeAlias = jax.Array
PRNGKey: TypeAlias = jax.Array
DType: TypeAlias = np.dtype[Any]
Shape: TypeAlias = Sequence[int]
AxisNames: TypeAlias = tuple[str, ...]
AxisIdxes: TypeAlias = tuple[int, ...]
AxisType: TypeAlias = str | int | tuple[str | int, ...] | None
"""Axes of a mesh that one dimension is split over; None or () is none."""
LogicalAxes: TypeAlias = Sequence[Any]
"""For each dimension a token, None, a mesh axis, or a sequence of those."""


class NotGiven:
    """The type of `NOT_GIVEN`, which says that an argument was left out.

    There is one instance: copies, pickles and a reloaded module give the same.

    Example:
        >>> copy.deepcopy(NOT_GIVEN) is NOT_GIVEN
        True
    """

    __slots__ = ()

    def __new__(cls) -> Self:
        """Returns the one instance."""
        # A reloaded module keeps its globals, so it finds the instance it had.
        known = globals().get("NOT_GIVEN")
        return object.__new__(cls) if known is None else cast(Self, known)

    def __repr__(self) -> str:
        return "NOT_GIVEN"

    def __reduce__(self) -> str:
        return "NOT_GIVEN"  # pickled as a name of this module


NOT_GIVEN: Final = NotGiven()
EMPTY_VAL = NOT_GIVEN


def check_mode(where: str, mode: Any) -> RUNTIME_MODE_TYPES:
    """Returns mode if it is one of the four.

    Args:
        where: Who was called.
        mode: What should be a runtime mode.

    Raises:
        ValueError: For anything else, None included.

    Example:
        >>> check_mode("f", MODE_DECODE)
        '__autoregressive__'
    """
    if isinstance(mode, str) and mode in RUNTIME_MODES:
        return cast(RUNTIME_MODE_TYPES, mode)
    got = f"mode={mode!r}{near_miss(str(mode), RUNTIME_MODES)}"
    names = (f"switchax.{name}={value!r}" for name, value in _NAMES_OF_MODES.items())
    todo = "pass one of " + ", ".join(names)
    raise fail_value(where, "a runtime mode", got, todo)


def freeze_axes(where: str, axes: Any) -> tuple[Any, ...]:
    """Returns logical axes with every list as a tuple.

    Raises:
        ValueError: For a bare string, which would be read letter by letter.
        TypeError: For what is no sequence.
    """
    if isinstance(axes, str):
        todo = f"pass [{axes!r}]"
        raise fail_value(where, "a sequence of axes", f"axes={axes!r}", todo)
    if isinstance(axes, dict | set | frozenset) or not hasattr(axes, "__iter__"):
        got = f"axes={brief(axes)}"
        raise fail_type(where, "a sequence of axes", got, "pass a list or a tuple")
    return tuple(_frozen(axis) for axis in axes)


def _frozen(axis: Any) -> Any:
    if isinstance(axis, list | tuple):
        return tuple(map(_frozen, axis))
    # Specs are kept, and a subclass of str would be shown for its equal.
    return str.__str__(axis) if isinstance(axis, str) else axis


@dataclasses.dataclass(frozen=True, init=False)
class DynamicShardingAxes:
    """Axes of an array together with the mode to resolve them in.

    A subclass with both as class attributes is a preset: the class itself, `Preset()`
    and `Preset(axes=..., mode=...)` with values of its own are all taken where axes
    are (`PartitionManager.resolve`, `shard`).

    Attributes:
        axes: For each dimension a token, None, a mesh axis, or a tuple of those.
        mode: A runtime mode; or the number of a dimension, and then the mode is decode
            where that dimension has length 1, else train.

    Args:
        axes: The same; a preset's own if left out.
        mode: The same; a preset's own if left out.

    Raises:
        TypeError: If the class is no preset and one is left out.
        ValueError: For an unknown mode, or a bare string as axes.

    Example:
        >>> DynamicShardingAxes(axes=(BATCH, EMBED), mode=MODE_TRAIN).axes
        ('__BATCH__', '__EMBED__')
        >>> HiddenStateSharding().axes == HiddenStateSharding.axes
        True
    """

    axes: tuple[Any, ...]
    mode: RUNTIME_MODE_TYPES | int

    def __init__(self, axes: Any = NOT_GIVEN, mode: Any = NOT_GIVEN) -> None:
        name = type(self).__name__
        own = (getattr(type(self), "axes", axes), getattr(type(self), "mode", mode))
        axes = own[0] if axes is NOT_GIVEN else axes
        mode = own[1] if mode is NOT_GIVEN else mode
        if axes is NOT_GIVEN or mode is NOT_GIVEN:
            missing = "axes" if axes is NOT_GIVEN else "mode"
            todo = "only a preset has axes and mode of its own"
            raise fail_type(name, "axes and mode", f"no {missing}", todo)
        object.__setattr__(self, "axes", freeze_axes(name, axes))
        if isinstance(mode, int | np.integer):
            mode = int(mode)
        else:
            mode = check_mode(name, mode)
        object.__setattr__(self, "mode", mode)


# A preset states its axes and mode as class attributes, so both can be read from the
# class. `1` as the mode: decoding is when the sequence dimension has length 1.


class HiddenStateSharding(DynamicShardingAxes):
    """Activations `[batch, q_len, embed]`."""

    axes = (BATCH, QUERY_LENGTH, EMBED)
    mode = 1


class AttnQSharding(DynamicShardingAxes):
    """Queries `[batch, q_len, heads, head_dim]`."""

    axes = (BATCH, QUERY_LENGTH, HEAD, HEAD_DIM)
    mode = 1


class AttnKVSharding(DynamicShardingAxes):
    """Keys and values `[batch, kv_len, kv_heads, head_dim]`."""

    axes = (BATCH, KV_LENGTH, KV_HEAD, KV_HEAD_DIM)
    mode = 1


class RowWise(DynamicShardingAxes):
    """A matrix whose inputs are split by tensor parallelism."""

    axes = (TP, (FSDP, SP))
    mode = MODE_TRAIN


class SRowWise(DynamicShardingAxes):
    """A vector of row-wise layers."""

    axes = (TP,)
    mode = MODE_TRAIN


class ColumnWise(DynamicShardingAxes):
    """A matrix whose outputs are split by tensor parallelism."""

    axes = ((FSDP, SP), TP)
    mode = MODE_TRAIN


class SColumnWise(DynamicShardingAxes):
    """A vector of column-wise layers."""

    axes = ((FSDP, SP),)
    mode = MODE_TRAIN


class Replicated(DynamicShardingAxes):
    """Every device has all of it."""

    axes = (EMPTY,)
    mode = MODE_TRAIN


class ExpertColumnWise(DynamicShardingAxes):
    """Column-wise matrices, one for each expert."""

    axes = (EP, FSDP, TP)
    mode = MODE_TRAIN


class ExpertRowWise(DynamicShardingAxes):
    """Row-wise matrices, one for each expert."""

    axes = (EP, TP, FSDP)
    mode = MODE_TRAIN


class ExpertColumnWiseAlt(DynamicShardingAxes):
    """Column-wise expert matrices, their inputs also split by the sequence axis."""

    axes = (EP, (FSDP, SP), TP)
    mode = MODE_TRAIN


class ExpertRowWiseAlt(DynamicShardingAxes):
    """Row-wise expert matrices, their outputs also split by the sequence axis."""

    axes = (EP, TP, (FSDP, SP))
    mode = MODE_TRAIN


class UnifiedExpertColumnWise(DynamicShardingAxes):
    """Column-wise expert matrices, experts split over all axes but the tensor's."""

    axes = ((FSDP, SP, EP), EMPTY, TP)
    mode = MODE_TRAIN


class UnifiedExpertRowWise(DynamicShardingAxes):
    """Row-wise expert matrices, experts split over all axes but the tensor's."""

    axes = ((FSDP, SP, EP), TP, EMPTY)
    mode = MODE_TRAIN


class ExpertActivations(DynamicShardingAxes):
    """Activations by expert, `[batch, length, expert, embed]`."""

    axes = (DP, SP, EP, TP)
    mode = MODE_TRAIN


class ExpertActivationsAlt(DynamicShardingAxes):
    """Activations of all experts, `[batch, length, embed]`."""

    axes = (DP, SP, (TP, FSDP))
    mode = MODE_TRAIN


class ExpertTensorParallel(DynamicShardingAxes):
    """Expert matrices, the experts split by tensor parallelism."""

    axes = (TP, EMPTY, EMPTY)
    mode = MODE_TRAIN
