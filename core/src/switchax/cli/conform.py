"""`switchax conform`: holds an operation against the rules of its kind."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from switchax.errors import UnknownOperationError, house_message
from switchax.target import Target

from .errors import Failure, WrongCall
from .output import show_json, show_line, show_table, stdout_kept
from .targets import target_option

if TYPE_CHECKING:
    from switchax.testing.conformance import Progress
    from switchax.testing.report import Report

__all__ = ["conform"]

_EIGHT = "--xla_force_host_platform_device_count=8"
_NOT_INSTALLED = "; only what is installed has a name here; of a class of your own ask "
_NOT_INSTALLED += "in Python: switchax.testing.conform(MyOperation)"
_SECONDS = 30  # between lines that say how far a run is


@click.command()
@click.argument("name")
@click.option(
    "--quick/--full", default=True, help="Minutes (the default), or half an hour."
)
@target_option
@click.option(
    "--seed",
    type=click.IntRange(0, 2**30),
    default=0,
    show_default=True,
    help="Of all values.",
)
@click.option(
    "--max-failures",
    type=click.IntRange(1),
    metavar="N",
    help="Stop when as many rules have failed.",
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    help="Processes to divide the cases among; 2 by default on a CPU of two cores or "
    "more, else 1, and 1 with --max-failures.",
)
@click.option(
    "--report",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the outcome as JSON, to ship with the plugin.",
)
@click.option("--json", "as_json", is_flag=True, help="Write the outcome as JSON here.")
@click.pass_context
def conform(
    ctx: click.Context,
    name: str,
    quick: bool,
    target: Target | None,
    seed: int,
    max_failures: int | None,
    jobs: int | None,
    path: Path | None,
    as_json: bool,
) -> None:
    """Hold an operation against the rules of its kind.

    What it declares must agree with the float64 oracle, what it does not declare must
    be refused. For a target that is not here, calls are compiled only. Exits 1 if it
    does not conform.

    Example: switchax conform my_flash --quick --report my_flash.json
    """
    if path is not None:
        path = _checked_path(path, ctx)
    with stdout_kept(), _devices():
        conform_operation, died = _kit()
        if jobs is None:
            jobs = 1 if max_failures else _jobs()
        level = "quick" if quick else "full"
        try:
            with _progress(name) as progress:
                report = conform_operation(
                    name,
                    level=level,
                    target=target,
                    seed=seed,
                    max_failures=max_failures,
                    progress=progress,
                    jobs=jobs,
                )
        except UnknownOperationError as error:
            raise WrongCall(f"{error}{_NOT_INSTALLED}", ctx) from error
        except (ValueError, TypeError) as error:
            raise WrongCall(str(error), ctx) from error
        except died as error:
            got, todo = str(error), "pass --jobs 1 to see more"
            text = house_message("switchax conform", "a run to its end", got, todo)
            raise Failure(text) from error
    try:
        if as_json:
            show_json(report.to_dict())
        else:
            _show(report)
    finally:  # whoever read what is shown may have gone
        if path is not None:
            _write(path, report)
    ctx.exit(0 if report.passed else 1)


def _checked_path(path: Path, ctx: click.Context) -> Path:
    """Returns the whole path; raises before the run if no report can be written."""
    todo, got = "make the folder first", f"--report={str(path)!r}"
    path = path.absolute()  # an operation may go to another folder
    if not path.name or path.is_dir():
        todo, got = "name a file", "--report of a folder, or of no name"
    elif path.parent.is_dir():
        is_new = not path.exists()
        try:
            with path.open("ab"):
                pass
            if is_new:
                path.unlink()
        except OSError as error:
            todo, got = "name another", f"{got}: {error.strerror}"
        else:
            return path
    raise WrongCall(house_message("switchax conform", "a file", got, todo), ctx)


def _write(path: Path, report: Report) -> None:
    try:
        path.write_text(report.to_json(), "utf-8")
    except OSError as error:
        got = f"--report={str(path)!r}: {error.strerror}"
        text = house_message("switchax conform", "a file to write", got, "name another")
        raise Failure(text) from error


def _kit() -> tuple[Callable[..., Report], type[Exception]]:
    try:
        from switchax.testing import conform as function
        from switchax.testing.jobs import Died
    except ImportError as error:
        todo = "pip install 'switchax[testing]'"
        text = house_message(
            "switchax conform", "the kit's libraries", str(error), todo
        )
        raise Failure(text) from error
    return function, Died


def _jobs() -> int:
    """How many processes run the cases; one device has room for one."""
    import jax

    cores = os.cpu_count() or 1
    return 2 if jax.default_backend() == "cpu" and cores > 1 else 1


@contextlib.contextmanager
def _devices() -> Iterator[None]:
    """Lets a CPU stand for eight, so that meshes are tested, if JAX has not started."""
    before = os.environ.get("XLA_FLAGS")
    if "device_count" not in (before or ""):
        os.environ["XLA_FLAGS"] = f"{before or ''} {_EIGHT}".strip()
    try:
        yield
    finally:
        if before is None:
            del os.environ["XLA_FLAGS"]
        else:
            os.environ["XLA_FLAGS"] = before


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Progress]:
    """A bar on stderr, for those who look; elsewhere a line now and then."""
    from rich import progress as parts
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _told(name)
        return
    columns = (
        parts.TextColumn(name),
        parts.BarColumn(),
        parts.MofNCompleteColumn(),
        parts.TimeElapsedColumn(),
        parts.TextColumn("{task.description}", markup=False),
    )
    with parts.Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def progress(number: int, total: int, case: object) -> None:
            rule = getattr(case, "rule", "")
            title = getattr(case, "title", "")
            text = f"{rule} {title}"[: max(console.width - 50, 10)]
            bar.update(task, completed=number, total=total, description=text)

        yield progress


def _told(name: str) -> Progress:
    last = time.monotonic()

    def progress(number: int, total: int, case: object) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS:
            last = time.monotonic()
            click.echo(f"{name}: {number} of {total} cases", err=True)

    return progress


def _show(report: Report) -> None:
    rows = [
        (
            result.rule,
            report.rules.get(result.rule, ""),
            result.dtype,
            str(result.passed),
            str(result.failed) if result.failed else "",
            str(result.refused) if result.refused else "",
            f"{result.error:.2g}" if result.error else "",
            result.quantity if result.error else "",
        )
        for result in report.results
    ]
    columns = ("rule", "", "dtype", "passed", "failed", "refused", "error", "of")
    show_table(columns, rows)
    show_line("error: the largest, in units of what rounding explains")
    for failure in report.failures:
        show_line()
        rule = f"{failure.rule} {report.rules.get(failure.rule, '')}".rstrip()
        show_line(f"{rule}: {failure.title}", "bold red")
        show_line(f"smallest: {failure.smallest}")
        show_line(failure.text)
        show_line(failure.snippet)
    if report.not_tested:
        show_line()
        for what, why in report.not_tested.items():
            show_line(f"not tested: {what}: {why}", "yellow")
    show_line()
    show_line(str(report).splitlines()[0], "bold")
