"""Runs parts of one task in fresh processes, side by side."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

from switchax.errors import described

__all__ = ["Died", "in_processes"]

Tell = Callable[[int], object]


class Died(RuntimeError):
    """A process ended before it had returned anything.

    Attributes:
        why: How it ended, such as "by SIGSEGV".
        at: What it told last; -1 if nothing.
    """

    def __init__(self, why: str, at: int) -> None:
        super().__init__(f"a process of the run ended {why}")
        self.why, self.at = why, at


def in_processes(
    function: Callable[..., Any], arguments: tuple[Any, ...], jobs: int, tell: Tell
) -> list[Any]:
    """Calls a function once in each of several processes.

    Args:
        function: Called with the number of the process, from 0, with a function to
            tell how far it is, and with the arguments. It and what it returns are
            pickled.
        arguments: Further arguments.
        jobs: How many processes.
        tell: Called with whatever any of them tells.

    Returns:
        What they returned, by number.

    Raises:
        Died: If one ended otherwise, by a signal or by an error that names it. The
            others are ended then, as they are if this is interrupted.
    """
    context = multiprocessing.get_context("spawn")  # JAX has threads, so no fork
    running: dict[Any, tuple[int, Any]] = {}
    last: dict[int, int] = {}
    returned: dict[int, Any] = {}
    with contextlib.ExitStack() as stack:
        for number in range(jobs):
            ours, theirs = context.Pipe(duplex=False)
            given = (function, number, theirs, *arguments)
            process = context.Process(target=_run, args=given, daemon=True)
            with _without_the_folder():
                process.start()
            theirs.close()  # so that its end is seen
            stack.callback(process.join)
            stack.callback(process.kill)
            running[ours] = number, process
        while running:
            for pipe in connection.wait(list(running)):
                number, process = running[pipe]
                what, value = _received(pipe, process)
                if what == "told":
                    last[number] = value
                    tell(value)
                elif what == "returned":
                    returned[number] = value
                    del running[pipe]
                else:
                    raise Died(value, last.get(number, -1))
    return [returned[number] for number in range(jobs)]


@contextlib.contextmanager
def _without_the_folder() -> Iterator[None]:
    """Lets a new Python not look for the library's modules where it is started."""
    name = "PYTHONSAFEPATH"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _run(function: Any, number: int, pipe: Any, *arguments: Any) -> None:
    """What a process does; an interrupt is for the one that waits for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        value = function(number, lambda told: pipe.send(("told", told)), *arguments)
    except BrokenPipeError:  # nobody waits
        return
    except BaseException as error:
        pipe.send(("raised", f"with {described(error)}"))
        return
    pipe.send(("returned", value))


def _received(pipe: Any, process: Any) -> tuple[str, Any]:
    try:
        return pipe.recv()  # type: ignore[no-any-return]
    except EOFError:
        process.join()
        return "ended", _end(process.exitcode)


def _end(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return f"by {signal.Signals(-code).name}"
    return f"with exit code {code}"
