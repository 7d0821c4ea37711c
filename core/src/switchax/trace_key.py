"""What is current in a `contextvars` context, as a part of the key of JAX's traces.

An asyncio task sees its own, and a new thread starts with nothing. JAX keeps one cache
of traces for all of them, so what a trace may depend on is also part of its key. That
key belongs to the thread, so where a context came to a thread as a copy, or tasks
interleave, the two differ: a trace then raises, since it would be found again under
another's key.
"""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import jax

from .compat import is_tracing
from .errors import house_message

__all__ = ["Current"]

T = TypeVar("T")


class Current(Generic[T]):
    """One such value.

    Args:
        where: Who speaks in messages.
        what: What it is, for messages.
        default: Its value where none was set; hashable, as all of them.
    """

    def __init__(self, where: str, what: str, default: T) -> None:
        self._where, self._what, self._default = where, what, default
        self._value = ContextVar(what, default=default)
        self._key: Any = jax.make_user_context(default)  # type: ignore[no-untyped-call]
        self._told = threading.local()

    def get(self) -> T:
        """Returns the value.

        Raises:
            RuntimeError: While tracing in a copied context, or beside another task.
        """
        value = self._value.get()
        told = getattr(self._told, "value", self._default)
        if told is value or told == value or not is_tracing():
            return value
        rule = f"the {self._what} of this thread in what is traced"
        got = "another of a copied context or an interleaved task"
        todo = "enter it with `with` in this thread, around the call, and do not await "
        raise RuntimeError(house_message(self._where, rule, got, todo + "there"))

    def peek(self) -> T:
        """Returns the value, on which then no trace may depend."""
        return self._value.get()

    def set(self, value: T) -> None:
        """Sets it here, and in the key of this thread's traces.

        Set, and not restored by `with`: tasks of one thread interleave, and the last
        to leave would then bring back what another had entered.
        """
        self._value.set(value)
        self._told.value = value
        self._key(value).__enter__()
