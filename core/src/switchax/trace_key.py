"""What is current in a `contextvars` context, as a part of the key of JAX's traces.

An asyncio task sees its own, and a new thread starts with nothing. JAX keeps one cache
of traces for all of them, so what a trace may depend on is also part of its key. That
key belongs to the thread, so where a context came to a thread as a copy, or tasks
interleave, the two may differ. A trace then raises, since it would be found again under
another's key; and whatever asks outside of a trace tells JAX what holds here. A program
that is compiled already is found by JAX before anybody is asked: by what the thread was
told last.
"""

from __future__ import annotations

import dataclasses
import threading
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import jax

from .compat import is_tracing
from .errors import house_message

__all__ = ["Current", "Entry"]

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class Entry(Generic[T]):
    """One block of `with`, until it is left.

    Attributes:
        value: What it made current.
        under: The block of this thread that was entered before, or None.
        is_guest: Whether the thread had been told of another context's value, as when
            a copied context is run within a block.
        thread: Where it was entered.
        is_left: Whether it is over.
    """

    value: T
    under: Entry[T] | None
    is_guest: bool
    thread: int
    is_left: bool = False


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
        self._thread = threading.local()

    def get(self) -> T:
        """Returns the value.

        Raises:
            RuntimeError: While tracing in a copied context, or beside another task.
        """
        value = self._value.get()
        if self._is_told(value):
            return value
        if not is_tracing():
            self._tell(value)
            return value
        rule = f"the {self._what} of this thread in what is traced"
        got = "another of a copied context or an interleaved task"
        todo = "enter it with `with` in this thread, around the call, and do not await "
        raise RuntimeError(house_message(self._where, rule, got, todo + "there"))

    def peek(self) -> T:
        """Returns the value, on which then no trace may depend."""
        return self._value.get()

    def set(self, value: T) -> None:
        """Sets it here, and in the key of this thread's traces."""
        self._value.set(value)
        self._tell(value)

    def enter(self, value: T) -> Entry[T]:
        """Sets it for a block of `with`; returns what `leave` needs."""
        under = getattr(self._thread, "entry", None)
        is_guest = not self._is_told(self._value.get())
        entry = Entry(value, under, is_guest, threading.get_ident())
        self._thread.entry = entry
        self.set(value)
        return entry

    def leave(self, entry: Entry[T], value: T) -> None:
        """Sets what is current after a block.

        The thread is told that again, but after a guest what holds in the block around
        it. If that is over (tasks of one thread interleave), nothing comes back that
        another had entered.
        """
        entry.is_left = True
        self.set(value)
        if entry.thread != threading.get_ident():
            return
        under = entry.under
        while under is not None and under.is_left:
            under = under.under
        self._thread.entry = under
        if entry.is_guest and under is not None and under is entry.under:
            self._tell(under.value)

    def _is_told(self, value: T) -> bool:
        told = getattr(self._thread, "told", self._default)
        return told is value or bool(told == value)

    def _tell(self, value: T) -> None:
        self._thread.told = value
        self._key(value).__enter__()  # for good, and not for a block: see `leave`
