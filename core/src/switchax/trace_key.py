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
from collections.abc import Callable, Sequence
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
        value: What was current when it was entered.
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
        merge: Makes a value of what the blocks around bring, outermost first; by
            default the innermost's.
    """

    def __init__(
        self,
        where: str,
        what: str,
        default: T,
        merge: Callable[[Sequence[Any]], T] = lambda layers: layers[-1],
    ) -> None:
        self._where, self._what, self._default = where, what, default
        self._merge = merge
        self._value = ContextVar(what, default=default)
        # What each block that is open here brings.
        self._open: ContextVar[tuple[tuple[Entry[T], Any], ...]] = ContextVar(
            f"blocks of {what}", default=()
        )
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

    def blocks(self) -> tuple[tuple[Entry[T], Any], ...]:
        """Returns the blocks that are open here, each with what it brings."""
        return self._open.get()

    def enter(self, layer: Any) -> Entry[T]:
        """Opens a block of `with`, and returns it for `leave`.

        Args:
            layer: What it brings.
        """
        value = self._merge([*(layer for _, layer in self._open.get()), layer])
        under = getattr(self._thread, "entry", None)
        is_guest = not self._is_told(self._value.get())
        entry = Entry(value, under, is_guest, threading.get_ident())
        self._open.set((*self._open.get(), (entry, layer)))
        self._thread.entry = entry
        self.set(value)
        return entry

    def change(self, layer: Any) -> None:
        """Changes what the innermost block brings, in this context."""
        *others, (entry, _) = self._open.get()
        self._open.set((*others, (entry, layer)))
        self.set(self._merge([layer for _, layer in self._open.get()]))

    def leave(self, entry: Entry[T]) -> None:
        """Closes a block; those that were opened after it may still be open.

        The thread is told what is left, but after a guest what holds in the block
        around it. If that is over (tasks of one thread interleave), nothing comes back
        that another had entered.
        """
        entry.is_left = True
        left = tuple(block for block in self._open.get() if block[0] is not entry)
        self._open.set(left)
        self.set(self._merge([layer for _, layer in left]) if left else self._default)
        if entry.thread != threading.get_ident():
            return
        around: Entry[T] | None = getattr(self._thread, "entry", None)
        while around is not None and around.is_left:
            around = around.under
        self._thread.entry = around
        if entry.is_guest and entry.under is not None and entry.under is around:
            self._tell(entry.under.value)

    def _is_told(self, value: T) -> bool:
        told = getattr(self._thread, "told", self._default)
        return told is value or bool(told == value)

    def _tell(self, value: T) -> None:
        self._thread.told = value
        self._key(value).__enter__()  # for good, and not for a block: see `leave`
