"""What the dimensions of a model's arrays mean on a mesh of devices.

`PartitionAxis` translates semantic axes into axes of the mesh, `PartitionManager`
lays arrays out by it.
"""

from .axis import PartitionAxis
from .document import get_safe_hash_int
from .manager import (
    PartitionManager,
    apply_logical_sharding,
    get_current_partition_manager,
    get_partition_manager,
    known_mesh_axes,
)
from .rules import axis_rules

__all__ = [
    "PartitionAxis",
    "PartitionManager",
    "apply_logical_sharding",
    "axis_rules",
    "get_current_partition_manager",
    "get_partition_manager",
    "get_safe_hash_int",
    "known_mesh_axes",
]
