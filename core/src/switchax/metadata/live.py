"""Fields of `OperationMetadata` that are looked up when nothing was given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from switchax.axes import NOT_GIVEN, AxisType
from switchax.checks import brief, fail_value
from switchax.sharding import AnyMesh, current_mesh, flat_names

if TYPE_CHECKING:
    from switchax.partition import PartitionAxis, PartitionManager

    from .record import OperationMetadata

__all__ = ["MESH", "PARTITION_AXIS", "PARTITION_MANAGER", "SEQUENCE_AXIS"]


class Live:
    """A field that, where nothing was given, is looked up each time it is read.

    As the default of a dataclass's field it is `NOT_GIVEN`.
    """

    def __init__(self, fallback: Callable[[Any], Any]) -> None:
        self._fallback = fallback

    def __set_name__(self, owner: type, name: str) -> None:
        self._slot = f"_{name}"

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return NOT_GIVEN
        given = vars(instance)[self._slot]
        return self._fallback(instance) if given is None else given

    def __set__(self, instance: Any, value: Any) -> None:
        vars(instance)[self._slot] = value


def _sequence_axis(metadata: OperationMetadata) -> AxisType:
    axis = metadata.partition_axis.sequence_parallel_axis
    names = list(flat_names(axis))
    if len(set(names)) < len(names):
        where, got = type(metadata).__name__, f"sequence_parallel_axis={brief(axis)}"
        raise fail_value(where, "different mesh axes", got, "name each axis once")
    return axis


def _partition_axis(metadata: OperationMetadata) -> PartitionAxis:
    return metadata.partition_manager.paxis


def _partition_manager(metadata: OperationMetadata) -> PartitionManager:
    from switchax.partition import get_current_partition_manager
    from switchax.partition.manager import unrecorded_manager

    given: PartitionAxis | None = vars(metadata)["_partition_axis"]
    if given is not None:
        return unrecorded_manager(given)
    return get_current_partition_manager() or _default_manager()


@functools.cache
def _default_manager() -> PartitionManager:
    from switchax.partition import PartitionAxis
    from switchax.partition.manager import unrecorded_manager

    return unrecorded_manager(PartitionAxis())


def _mesh(metadata: OperationMetadata) -> AnyMesh | None:
    return current_mesh()


# Any, since a dataclass takes them for the defaults of fields of other types.
SEQUENCE_AXIS: Any = Live(_sequence_axis)
PARTITION_AXIS: Any = Live(_partition_axis)
PARTITION_MANAGER: Any = Live(_partition_manager)
MESH: Any = Live(_mesh)
