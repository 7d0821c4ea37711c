"""What is current: the manager entered, the one last made, the axes in scope.

All of it belongs to a `contextvars` context: an asyncio task sees its own, and a new
thread starts with nothing. JAX keeps one cache of traces for all of them, so what a
trace may depend on is also part of its key. That key belongs to the thread: do not
await inside `with manager` around calls of jitted functions.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from .manager import PartitionManager
    from .rules import Rules

entered: ContextVar[tuple[PartitionManager, ...]] = ContextVar("entered", default=())
last_made: ContextVar[PartitionManager | None] = ContextVar("last_made", default=None)
scope: ContextVar[Rules | None] = ContextVar("scope", default=None)

_jit_key: Any = jax.make_user_context(((), None))  # type: ignore[no-untyped-call]


def tell_jax() -> None:
    """Makes what is current here part of the key of this thread's traces.

    Set, and not restored by `with`: tasks of one thread interleave, and the last to
    leave would then bring back what another had entered.
    """
    _jit_key((entered.get(), scope.get())).__enter__()


def enter(manager: PartitionManager) -> None:
    """Makes the manager the current one."""
    entered.set((*entered.get(), manager))
    tell_jax()


def leave(manager: PartitionManager) -> None:
    """Undoes the last `enter` of this manager in this context, if there is one."""
    stack = entered.get()
    for at in reversed(range(len(stack))):
        if stack[at] is manager:
            entered.set(stack[:at] + stack[at + 1 :])
            break
    tell_jax()
