"""What is current: the manager entered, the one last made, the axes in scope.

All of it belongs to a `contextvars` context: an asyncio task sees its own, and a new
thread starts with nothing. JAX keeps one cache of traces for all of them, so what a
trace may depend on is also part of its key. That key belongs to the thread, so where a
context came to a thread as a copy, or tasks interleave, the two differ: a trace then
raises, since it would be found again under another's key.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax

from switchax.compat import is_tracing
from switchax.errors import house_message

if TYPE_CHECKING:
    from .manager import PartitionManager
    from .rules import Rules

entered: ContextVar[tuple[PartitionManager, ...]] = ContextVar("entered", default=())
last_made: ContextVar[PartitionManager | None] = ContextVar("last_made", default=None)
scope: ContextVar[Rules | None] = ContextVar("scope", default=None)

_NOTHING: tuple[Any, ...] = ((), None, None)
_jit_key: Any = jax.make_user_context(_NOTHING)  # type: ignore[no-untyped-call]
_told = threading.local()


def tell_jax() -> None:
    """Makes what is current here part of the key of this thread's traces.

    Set, and not restored by `with`: tasks of one thread interleave, and the last to
    leave would then bring back what another had entered.
    """
    _told.key = (entered.get(), scope.get(), last_made.get())
    _jit_key(_told.key).__enter__()


def check_told(what: ContextVar[Any]) -> None:
    """Raises where a trace would depend on what is not part of its key.

    Args:
        what: `entered`, `scope` or `last_made`, which the trace is about to read.

    Raises:
        RuntimeError: While tracing in a copied context, or beside another task.
    """
    position = (entered, scope, last_made).index(what)
    told = getattr(_told, "key", _NOTHING)[position]
    if not is_tracing() or told == what.get():
        return
    rule = f"the {_NAMES[position]} of this thread's jitted functions"
    got = "another of a copied context or an interleaved task"
    todo = (
        "enter it with `with` in this thread, around the call, and do not await there"
    )
    raise RuntimeError(house_message("partition", rule, got, todo))


_NAMES = ("current manager", "axis rules", "manager made last")


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
