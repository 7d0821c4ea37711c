"""What is current: the manager entered, the one last made, the axes in scope."""

from __future__ import annotations

from typing import TYPE_CHECKING

from switchax.trace_key import Current

if TYPE_CHECKING:
    from .manager import PartitionManager
    from .rules import Rules

__all__ = ["enter", "entered", "last_made", "leave", "scope"]

entered: Current[tuple[PartitionManager, ...]] = Current(
    "partition", "current manager", (), merge=tuple
)
last_made: Current[PartitionManager | None] = Current(
    "partition", "manager made last", None
)
scope: Current[Rules | None] = Current("partition", "axis rules", None)


def enter(manager: PartitionManager) -> None:
    """Makes the manager the current one."""
    entered.enter(manager)


def leave(manager: PartitionManager) -> None:
    """Undoes the last `enter` of this manager in this context, if there is one."""
    for block, brought in reversed(entered.blocks()):
        if brought is manager:
            entered.leave(block)
            return
