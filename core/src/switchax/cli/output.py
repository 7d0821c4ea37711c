"""Writes to stdout: tables for readers, aligned text for pipes, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import click

from .errors import one_line

__all__ = ["is_terminal", "show_json", "show_line", "show_table"]

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
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        styles = [_STYLES.get(cell.partition(":")[0], "") for cell in row]
        texts = map(Text, row, styles)
        table.add_row(*texts)
    _console().print(table)


def _show_plain(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    lines = [list(columns), *([cell or "-" for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        padded = [cell.ljust(width) for cell, width in zip(line, widths, strict=True)]
        click.echo("  ".join(padded).rstrip())
