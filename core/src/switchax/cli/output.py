"""Writes to stdout: tables for readers, aligned text for pipes, JSON for programs."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import IO, Any

import click

from .errors import one_line

__all__ = ["is_terminal", "show_json", "show_line", "show_table", "stdout_kept"]

_STYLES = {
    "available": "green",
    "chosen": "green",
    "loaded": "green",
    "refuses": "red",
    "failed": "red",
    "contested": "red",
    "wrong": "red",
    "blocked": "yellow",
}


def _console() -> Any:
    from rich.console import Console  # a tenth of a second that JSON does not need

    return Console(highlight=False, markup=False, emoji=False)


@contextlib.contextmanager
def stdout_kept() -> Iterator[None]:
    """Sends what plugins print, when loaded or asked, to stderr.

    Native libraries write to the descriptor, and may buffer what they write.
    """
    if sys.stdout is not None:  # it is None where it was closed
        sys.stdout.flush()
    stderr: Any = None if sys.stderr is None else _Unclosed(sys.stderr)
    with (
        contextlib.redirect_stdout(stderr),
        contextlib.redirect_stderr(stderr),
        _descriptor_kept(),
    ):
        yield


class _Unclosed:
    """A stream that a plugin cannot close."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def close(self) -> None:
        """Closes nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _descriptor_kept() -> Iterator[None]:
    """Sends what is written to descriptor 1 to 2, or nowhere if that is closed."""
    if not _is_open(1):
        yield
        return
    # The lowest number that is free, which may be 2 itself: first of all.
    nowhere = None if _is_open(2) else os.open(os.devnull, os.O_WRONLY)
    kept = os.dup(1)
    os.dup2(2 if nowhere is None else nowhere, 1)
    try:
        yield
    finally:
        with contextlib.suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        if nowhere is not None:
            os.close(nowhere)


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def is_terminal() -> bool:
    """Whether somebody reads stdout, or colours were asked for (FORCE_COLOR)."""
    return bool(_console().is_terminal)


def show_json(data: Any) -> None:
    """Writes data as JSON, ASCII only."""
    click.echo(json.dumps(data, indent=2))


def show_line(text: str = "", style: str = "") -> None:
    """Writes a paragraph, wrapped in a terminal only.

    Args:
        text: Plain text; line breaks are kept.
        style: How a terminal shows it, such as "bold".
    """
    if not is_terminal():
        click.echo(text)
        return
    from rich.text import Text

    _console().print(Text(text, style=style))


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes a table; nothing is cut off, neither in a terminal nor in a pipe.

    Args:
        columns: Headings.
        rows: Cells; empty ones become "-" in a pipe, so that columns can be split
            at two blanks or more.
    """
    cells = [[one_line(cell) for cell in row] for row in rows]
    if is_terminal():
        _show_rich(columns, cells)
    else:
        _show_plain(columns, cells)


def _show_rich(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table

    console = _console()
    used = [i for i in range(len(columns)) if any(row[i] for row in rows)]
    columns = [columns[i] for i in used]
    rows = [[row[i] for i in used] for row in rows]
    widths = [_longest_word(column) for column in zip(columns, *rows, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) > console.width:
        _show_records(columns, rows)
        return
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for column, width in zip(columns, widths, strict=True):
        table.add_column(column, min_width=width)
    for row in rows:
        table.add_row(*map(_styled, row))
    console.print(table)


def _longest_word(cells: Sequence[str]) -> int:
    return max(len(word) for cell in cells for word in cell.split() or [""])


def _styled(cell: str) -> Any:
    from rich.text import Text

    return Text(cell, style=_STYLES.get(cell.partition(":")[0], ""))


def _show_records(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Writes a field a line, where a table would have to break words."""
    for row in rows:
        for i, (column, cell) in enumerate(zip(columns, row, strict=True)):
            if cell:
                show_line(f"{'  ' if i else ''}{column}: {cell}", "" if i else "bold")


def _show_plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [list(columns), *([cell or "-" for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        click.echo("  ".join(padded).rstrip())
