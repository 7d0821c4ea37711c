"""What is current: the manager entered, the one last made, the axes in scope."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from switchax.trace_key import Current, Entry

if TYPE_CHECKING:
    from .manager import PartitionManager
    from .rules import Rules

__all__ = ["enter", "entered", "last_made", "leave", "scope"]

entered: Current[tuple[PartitionManager, ...]] = Current(
    "partition", "current manager", ()
)
last_made: Current[PartitionManager | None] = Current(
    "partition", "manager made last", None
)
scope: Current[Rules | None] = Current("partition", "axis rules", None)

# The blocks of the managers in `entered`, one for each.
_blocks: ContextVar[tuple[Entry[Any], ...]] = ContextVar("blocks", default=())


def enter(manager: PartitionManager) -> None:
    """Makes the manager the current one."""
    block = entered.enter((*entered.peek(), manager))
    _blocks.set((*_blocks.get(), block))


def leave(manager: PartitionManager) -> None:
    """Undoes the last `enter` of this manager in this context, if there is one."""
    stack, blocks = entered.peek(), _blocks.get()
    for at in reversed(range(len(stack))):
        if stack[at] is manager:
            _blocks.set(blocks[:at] + blocks[at + 1 :])
            entered.leave(blocks[at], stack[:at] + stack[at + 1 :])
            return
