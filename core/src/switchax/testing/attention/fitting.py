"""Brings calls to sizes that an operation takes, where it does not take any."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np

from switchax.matching import refusals_of
from switchax.operation import BaseOperation, forward_method
from switchax.target import Target, current_target
from switchax.testing.running import wide_types

from .calls import AttentionCall, draw

__all__ = ["Fitting"]

_Change = tuple[tuple[str, Any], ...]


class Fitting:
    """Looks for the nearest call that an operation does not refuse.

    Args:
        operation: The class.
        platform: Where it runs.
    """

    def __init__(self, operation: type[BaseOperation], platform: str) -> None:
        self._operation = operation
        here = current_target()
        self._target = here if here.platform == platform else Target(platform)
        self._metadata = operation().metadata
        self._fitted: list[_Change] = []
        self._known: dict[AttentionCall, bool] = {}

    def fitted(self, call: AttentionCall) -> AttentionCall:
        """Returns the call, or one of other sizes, or the call if all are refused."""
        if self._is_taken(call):
            return call
        if not self._can_fit(AttentionCall(dtype=call.dtype)):
            return call
        if not self._can_fit(_alike(call)):
            return call
        return self._first(call) or call

    def _can_fit(self, call: AttentionCall) -> bool:
        """Whether any form of a call is taken; asked once of each."""
        if call not in self._known:
            self._known[call] = self._first(call) is not None
        return self._known[call]

    def _first(self, call: AttentionCall) -> AttentionCall | None:
        """The first form of a call that is taken; what fitted before comes first."""
        rounded = self._rounded(call)
        if self._is_taken(rounded):
            return rounded
        for change in dict.fromkeys([*self._fitted, *_CHANGES]):
            changed = self._rounded(dataclasses.replace(rounded, **dict(change)))
            if self._is_taken(changed):
                self._fitted.append(change)
                return changed
        return None

    def _is_taken(self, call: AttentionCall) -> bool:
        cls, platform = self._operation, self._target.platform
        drawn = draw(call, dirty=False, rng=_Zeros())
        shapes = {
            name: array
            if name == "dropout_key"
            else jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]
            for name, array in drawn.arrays.items()
        }
        with wide_types(call.dtype):
            given = {**shapes, **drawn.options}
            request = cls.kind.request(self._metadata, **given)
            plan = cls.kind.plan(request, cls.capabilities)
            method = forward_method(cls, platform)
            refusals = refusals_of(cls, plan, self._target, method)
            return all(refusal.code == "fault" for refusal in refusals)

    def _rounded(self, call: AttentionCall) -> AttentionCall:
        """Sizes up to a multiple, down to a limit, in a layout that is declared."""
        declared = self._operation.capabilities
        sizes: dict[str, Any] = {}
        for name in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"):
            sizes[name] = self._size(name, getattr(call, name))
        if call.v_head_dim is not None:
            sizes["v_head_dim"] = self._size("v_head_dim", call.v_head_dim)
        sizes["kv_heads"] = math.gcd(sizes["heads"], sizes["kv_heads"])
        if declared.layouts == ("thd",):
            sizes |= {"layout": "thd", "lengths": ""}
        return dataclasses.replace(call, **sizes)

    def _size(self, name: str, size: int) -> int:
        declared = self._operation.capabilities
        step = declared.multiples.get(name, 1)
        size = -(-size // step) * step
        most = declared.limits.get(name, size)
        return min(size, most - most % step or most)


def _alike(call: AttentionCall) -> AttentionCall:
    """A call that uses the same, in the sizes and with the values of the default."""
    default = AttentionCall()
    sizes = ("batch", "q_len", "kv_len", "head_dim", "factor", "alike", "seed")
    return dataclasses.replace(call, **{n: getattr(default, n) for n in sizes})


class _Zeros(np.random.Generator):
    """Draws zeros: a call's shapes are wanted, not its values."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def normal(self, *args: Any, size: Any = None, **rest: Any) -> Any:
        """Returns zeros."""
        return np.zeros(size)

    def random(self, size: Any = None, *args: Any, **rest: Any) -> Any:
        """Returns zeros."""
        return np.zeros(size)


_HEAD_DIMS: tuple[_Change, ...] = (
    (),
    (("head_dim", 64),),
    (("head_dim", 128),),
    *((("head_dim", size),) for size in (32, 80, 96, 256)),
    (("head_dim", 192), ("v_head_dim", 128)),
    (("head_dim", 192),),
)
_LENGTHS: tuple[_Change, ...] = (
    (),
    *((("q_len", size), ("kv_len", size)) for size in (128, 256, 512)),
    (("q_len", 1),),
    *((("q_len", 1), ("kv_len", size)) for size in (128, 512)),
)
_GROUPS: tuple[_Change, ...] = (
    (),
    (("heads", 8), ("kv_heads", 8)),
    (("heads", 8), ("kv_heads", 1)),
    (("heads", 1), ("kv_heads", 1)),
    (("heads", 32), ("kv_heads", 4)),
)
_OTHERS: tuple[_Change, ...] = (
    (),
    (("causal", True),),
    (("batch", 1),),
    (("layout", "thd"), ("lengths", "")),
)
# Forms that kernels are made for: first those that change one thing.
_CHANGES: tuple[_Change, ...] = tuple(
    sum(parts, ())
    for parts in sorted(
        itertools.product(_HEAD_DIMS, _LENGTHS, _GROUPS, _OTHERS),
        key=lambda parts: sum(map(bool, parts)),
    )
)
