"""PartitionManager: resolves the axes of arrays and lays the arrays out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import PartitionSpec

from switchax.axes import MODE_DECODE, MODE_TRAIN, NOT_GIVEN, DynamicShardingAxes
from switchax.checks import brief, check_keywords, fail_type, fail_value
from switchax.errors import house_message
from switchax.sharding import constrain, is_shape, shape_of

from . import context
from .axis import PartitionAxis
from .document import check_members, read_object
from .rules import current_rules

__all__ = [
    "PartitionManager",
    "apply_logical_sharding",
    "get_current_partition_manager",
    "get_partition_manager",
    "known_mesh_axes",
]


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class PartitionManager:
    """Resolves axes by one `PartitionAxis`, and is current within `with manager:`.

    Current is what was entered in this `contextvars` context: each thread and each
    asyncio task has its own. A manager may be entered again, nested or not. Jitted
    functions are traced again under another manager, current or made last. In a copied
    context (`asyncio.to_thread`) tracing raises, and a function that is compiled
    already keeps its layout, unless it is entered in that thread itself; between `with`
    and a call of a jitted function nothing may be awaited. The same holds of the one
    made last, where tasks or copied contexts make others. Frozen, hashable, comparable,
    a static argument of jit, and a pytree without leaves.

    Attributes:
        paxis: What the axes mean.

    Raises:
        TypeError: If paxis is no `PartitionAxis`.

    Example:
        >>> from switchax.axes import BATCH, EMBED, MODE_TRAIN
        >>> manager = PartitionManager(PartitionAxis())
        >>> with jax.set_mesh(mesh), manager:
        ...     x = apply_logical_sharding(x, axes=[BATCH, EMBED], mode=MODE_TRAIN)
    """

    paxis: PartitionAxis

    def __post_init__(self) -> None:
        if not isinstance(self.paxis, PartitionAxis):
            got = f"paxis={self.paxis!r} ({type(self.paxis).__name__})"
            todo = "pass PartitionAxis()"
            raise fail_type("PartitionManager", "a PartitionAxis", got, todo)
        context.last_made.set(self)

    # Copies, and what JAX does to a tree, do not make a manager: no __post_init__.
    def __copy__(self) -> PartitionManager:
        return self

    def __deepcopy__(self, memo: Any) -> PartitionManager:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), vars(self))

    def __enter__(self) -> Self:
        context.enter(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        context.leave(self)

    def replace(self, **updates: Any) -> Self:
        """Returns a copy with another `paxis`.

        Args:
            **updates: `paxis`, and what a subclass adds.

        Raises:
            TypeError: For another name or type.

        Example:
            >>> manager.replace(paxis=manager.paxis.replace(head_axis=None))
        """
        known = [field.name for field in dataclasses.fields(self)]
        check_keywords("PartitionManager.replace", updates, known)
        return type(self)(**{**{n: getattr(self, n) for n in known}, **updates})

    def resolve(
        self,
        axes: Any = NOT_GIVEN,
        mode: Any = NOT_GIVEN,
        dynamic_axes: Any = NOT_GIVEN,
        shape: Any = NOT_GIVEN,
    ) -> PartitionSpec:
        """Translates the axes of an array into a spec.

        Args:
            axes: See `PartitionAxis.resolve_axis`; or a preset (`DynamicShardingAxes`,
                class or instance), whose mode then holds.
            mode: A runtime mode; or the number of a dimension, and then the mode is
                decode where it has length 1, else train.
            dynamic_axes: A preset, which holds if axes or mode is left out.
            shape: The array's; needed if the mode is a dimension's number.

        Returns:
            The spec, one entry for each axis, not corrected for any shape or mesh.

        Raises:
            IndexError: If shape has no such dimension.
            TypeError: For arguments of other types.
            ValueError: If something is missing, and as `PartitionAxis.resolve_spec`.

        Example:
            >>> manager.resolve(HiddenStateSharding, shape=(2, 1, 64))
            PartitionSpec(('fsdp', 'dp'), 'sp', 'tp')
        """
        axes, mode = _axes_and_mode(axes, mode, dynamic_axes)
        return self.paxis.resolve_spec(axes, _runtime_mode(mode, shape))

    def shard(
        self,
        x: Any,
        axes: Any = NOT_GIVEN,
        mode: Any = NOT_GIVEN,
        dynamic_axes: Any = NOT_GIVEN,
        auto_correct: bool = True,
    ) -> Any:
        """Lays an array out on the mesh in force, by what its dimensions mean.

        Args:
            x: An array of any shape, traced or not.
            axes: See `resolve`.
            mode: See `resolve`.
            dynamic_axes: See `resolve`.
            auto_correct: Without effect: a spec is always corrected to the shape and
                the mesh (`switchax.sharding.correct_spec`).

        Returns:
            x, laid out; without a mesh x itself. See `switchax.sharding.constrain`.

        Raises:
            TypeError: If x is no array, and as `resolve`.
            ValueError: As `resolve`.

        Example:
            >>> with jax.set_mesh(mesh):
            ...     query = manager.shard(query, AttnQSharding)
        """
        spec = self.resolve(axes, mode, dynamic_axes, shape_of("shard", x))
        return constrain(x, spec, partition_axis=self.paxis)

    def to_dict(self) -> dict[str, Any]:
        """Returns this manager as JSON data; registered axes are not part of it.

        Raises:
            TypeError: If it, or its `paxis`, is of a subclass.

        Example:
            >>> manager.to_dict()["paxis"]["tensor_parallel_axis"]
            'tp'
        """
        for value, known in ((self, PartitionManager), (self.paxis, PartitionAxis)):
            if type(value) is not known:  # from_dict would make another of it
                got = f"one of {type(value).__name__}"
                todo = "write what is your own beside it"
                where = f"{type(self).__name__}.to_dict"
                raise fail_type(where, f"a {known.__name__} itself", got, todo)
        return {"paxis": self.paxis.to_dict()}

    @classmethod
    def from_dict(
        cls, data: Mapping[str, Any], *, is_last_made: bool = True
    ) -> PartitionManager:
        """Returns the manager that `to_dict` described.

        Args:
            data: `{"paxis": {...}}`.
            is_last_made: Whether `get_partition_manager` finds it from here on.

        Raises:
            TypeError: If data is no mapping.
            ValueError: For everything else that `to_dict` would not return.

        Example:
            >>> PartitionManager.from_dict(manager.to_dict()) == manager
            True
        """
        where = "PartitionManager.from_dict"
        check_members(where, data, {"paxis": None})
        paxis = data.get("paxis")
        if not isinstance(paxis, Mapping):
            got = f"a paxis of type {type(paxis).__name__}"
            raise fail_value(where, "a mapping", got, "pass what to_dict returned")
        make = cls if is_last_made else unrecorded_manager
        return make(PartitionAxis.from_dict(paxis))

    def to_json(self, *, indent: int | None = None) -> str:
        """Returns `to_dict` as JSON text.

        Example:
            >>> PartitionManager.from_json(manager.to_json()) == manager
            True
        """
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> PartitionManager:
        """Returns the manager that `to_json` described; executes nothing.

        Args:
            text: JSON text from anywhere.

        Raises:
            TypeError: If text is no str.
            ValueError: For everything else that `to_json` would not write.
        """
        return cls.from_dict(read_object("PartitionManager.from_json", text))


def unrecorded_manager(paxis: PartitionAxis) -> PartitionManager:
    """Makes a manager that does not count as the one last made."""
    manager = object.__new__(PartitionManager)
    object.__setattr__(manager, "paxis", paxis)
    return manager


def _restored(cls: type[Any], state: dict[str, Any]) -> Any:
    manager = object.__new__(cls)
    vars(manager).update(state)
    return manager


def _is_preset(value: Any) -> bool:
    is_class = isinstance(value, type) and issubclass(value, DynamicShardingAxes)
    return is_class or isinstance(value, DynamicShardingAxes)


def _is_absent(value: Any) -> bool:
    return value is None or value is NOT_GIVEN


def _axes_and_mode(axes: Any, mode: Any, dynamic_axes: Any) -> tuple[Any, Any]:
    preset = axes if _is_preset(axes) else dynamic_axes
    if not _is_preset(axes) and not _is_absent(axes) and not _is_absent(mode):
        return axes, mode
    if _is_absent(preset):
        got = f"axes={axes!r}, mode={mode!r}"
        todo = "or pass a preset, as axes or dynamic_axes"
        raise fail_value("resolve", "axes and mode", got, todo)
    if not _is_preset(preset):
        got = f"dynamic_axes={brief(preset)}"
        todo = "pass a preset of switchax.axes, its class or an instance"
        raise fail_type("resolve", "a DynamicShardingAxes", got, todo)
    if isinstance(preset, type) and not (
        hasattr(preset, "axes") and hasattr(preset, "mode")
    ):
        preset = preset()  # no preset, as the base class, which says what is missing
    return preset.axes, preset.mode


def _runtime_mode(mode: Any, shape: Any) -> Any:
    if not isinstance(mode, int | np.integer):
        return mode
    todo = "pass shape=x.shape, or a runtime mode"
    if _is_absent(shape):
        raise fail_value("resolve", "a shape", f"mode={mode!r} without", todo)
    if not is_shape(shape):
        raise fail_type("resolve", "a shape", f"shape={brief(shape)}", todo)
    lengths: Sequence[Any] = tuple(shape)
    mode = int(mode)
    if not -len(lengths) <= mode < len(lengths):
        got = f"mode={mode!r} for shape={lengths}"
        todo = "pass the number of the sequence dimension, or a runtime mode"
        text = house_message("resolve", "a dimension of the array", got, todo)
        raise IndexError(text)
    return MODE_DECODE if lengths[mode] == 1 else MODE_TRAIN


def get_current_partition_manager() -> PartitionManager | None:
    """Returns the manager entered last in this context and not left, or None.

    Example:
        >>> with manager:
        ...     assert get_current_partition_manager() is manager
    """
    stack = context.entered.get()
    return stack[-1] if stack else None


def get_partition_manager() -> PartitionManager | None:
    """Returns the current manager, else the one last made in this context, or None.

    Example:
        >>> manager = PartitionManager(PartitionAxis())
        >>> assert get_partition_manager() is manager
    """
    current = get_current_partition_manager()
    if current is None:
        return context.last_made.get()
    return current


def apply_logical_sharding(
    x: Any,
    partition_manager: PartitionManager | None = None,
    axes: Any = NOT_GIVEN,
    mode: Any = NOT_GIVEN,
    dynamic_axes: Any = NOT_GIVEN,
    auto_correct: bool = True,
) -> Any:
    """Lays an array out by a manager: the one given, else `get_partition_manager()`.

    Args:
        x: An array of any shape, traced or not.
        partition_manager: The manager, or None.
        axes: See `PartitionManager.resolve`.
        mode: See `PartitionManager.resolve`.
        dynamic_axes: See `PartitionManager.resolve`.
        auto_correct: Without effect; see `PartitionManager.shard`.

    Returns:
        x, laid out; without a mesh x itself.

    Raises:
        TypeError: As `PartitionManager.shard`, or if this is no manager.
        ValueError: If there is no manager, and as `PartitionManager.shard`.

    Example:
        >>> y = apply_logical_sharding(x, manager, axes=[BATCH, None], mode=MODE_TRAIN)
    """
    where = "apply_logical_sharding"
    manager: Any = partition_manager
    if _is_absent(manager):
        manager = get_partition_manager()
    if manager is None:
        todo = "pass partition_manager=, or call within `with manager:`"
        raise fail_value(where, "a partition manager", "none in this context", todo)
    if not isinstance(manager, PartitionManager):
        got = f"partition_manager={brief(manager)}"
        todo = "pass PartitionManager(PartitionAxis())"
        raise fail_type(where, "a PartitionManager", got, todo)
    return manager.shard(x, axes, mode, dynamic_axes, auto_correct)


def known_mesh_axes(paxis: PartitionAxis | None = None) -> frozenset[Any]:
    """Returns the names that a mesh may lack without anything being wrong.

    Args:
        paxis: Whose fields; None is the current manager's, else the default's. One
            that was only made is nobody's choice for calls that do not name it.

    Returns:
        Those of its fields, and those in the rules of registered axes.
    """
    if paxis is None:
        manager = get_current_partition_manager()
        paxis = PartitionAxis() if manager is None else manager.paxis
    return paxis.mesh_axes | current_rules().names
