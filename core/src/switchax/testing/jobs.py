"""Runs parts of one task in fresh processes, side by side."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

from switchax.errors import described

__all__ = ["Died", "in_processes"]

Tell = Callable[[Any], object]


class Died(RuntimeError):
    """A process ended before it had returned anything.

    Attributes:
        number: Its number.
        last: What each of the processes told last, by number, if it told anything, or
            what it returned.
    """

    def __init__(self, why: str, number: int, last: dict[int, Any]) -> None:
        super().__init__(f"a process of the run ended {why}")
        self.number, self.last = number, last


def in_processes(
    function: Callable[..., Any], arguments: tuple[Any, ...], jobs: int, tell: Tell
) -> list[Any]:
    """Calls a function once in each of several processes.

    Args:
        function: Called with the number of the process, from 0, with a function to
            tell how far it is, and with the arguments. It, what it tells and what it
            returns are pickled.
        arguments: Further arguments.
        jobs: How many processes.
        tell: Called with whatever any of them tells.

    Returns:
        What they returned, by number.

    Raises:
        Died: If one ended otherwise, by a signal or by an error that names it. The
            others are ended then, as they are if this is interrupted or killed.
    """
    context = multiprocessing.get_context("spawn")  # JAX has threads, so no fork
    running: dict[Any, tuple[int, Any]] = {}
    last: dict[int, Any] = {}
    with contextlib.ExitStack() as stack:
        for number in range(jobs):
            ours, theirs = context.Pipe()
            given = (function, number, theirs, *arguments)
            process = context.Process(target=_run, args=given)
            with _for_a_start():
                process.start()
            theirs.close()  # so that its end is seen
            stack.callback(process.join)
            stack.callback(process.kill)
            running[ours] = number, process
        while running:
            for pipe in connection.wait(list(running)):
                number, process = running[pipe]
                what, value = _received(pipe, process)
                if what == "died":
                    raise Died(value, number, last)
                last[number] = value
                if what == "told":
                    tell(value)
                else:
                    del running[pipe]
    return [last[number] for number in range(jobs)]


@contextlib.contextmanager
def _for_a_start() -> Iterator[None]:
    """What a process is started under, which it keeps.

    It does not look for the library's modules in the folder, and leaves an interrupt
    to the one that waits for it.
    """
    name = "PYTHONSAFEPATH"
    before, os.environ[name] = os.environ.get(name), "1"
    handler = None
    if threading.current_thread() is threading.main_thread():
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _run(function: Any, number: int, pipe: Any, *arguments: Any) -> None:
    """What a process does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_other, args=(pipe,), daemon=True).start()
    try:
        value = function(number, lambda told: pipe.send(("told", told)), *arguments)
    except BaseException as error:
        pipe.send(("died", f"with {described(error)}"))
        return
    pipe.send(("returned", value))


def _end_with_the_other(pipe: Any) -> None:
    """Ends this process when the one that waits for it has ended, whatever it does."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()  # nothing is ever sent
    os._exit(1)


def _received(pipe: Any, process: Any) -> tuple[str, Any]:
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except (EOFError, OSError):
        process.kill()  # it may have closed the pipe, and run on
        process.join()
        return "died", _end(process.exitcode)


def _end(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"
