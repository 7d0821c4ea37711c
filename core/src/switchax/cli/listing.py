"""`switchax list`: the operations that are installed, and what becomes of them here."""

from __future__ import annotations

import click

from switchax import registrations
from switchax.loading import PluginRecord, ensure_loaded
from switchax.registry import HOW_TO_INSTALL
from switchax.target import Target

from .errors import one_line
from .operations import Row, describe_plugin, describe_row, platform_text, rows_of
from .output import show_json, show_line, show_table, stdout_kept
from .shipped import shipped_level
from .targets import present_target, target_option

__all__ = ["list_operations"]

NOTHING = f"no operation is installed; {HOW_TO_INSTALL}"
COLUMNS = (
    "operation",
    "other names",
    "kind",
    "plugin",
    "distribution",
    "platforms",
    "cost",
    "conformance",
)


@click.command("list")
@target_option
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.pass_context
def list_operations(ctx: click.Context, target: Target | None, as_json: bool) -> None:
    """List the installed operations.

    Exits 1 if no operation can be used on the target.
    """
    with stdout_kept():
        records = list(ensure_loaded().values())
        problem = ""
        if target is None:
            target, problem = present_target()
        rows = rows_of(registrations.entries(), target)
    if problem:
        click.echo(problem, err=True)
    missing = [record for record in records if record.status != "loaded"]
    if as_json:
        show_json(
            {
                "target": str(target) if target is not None else None,
                "operations": [describe_row(row) for row in rows],
                "not_loaded": [describe_plugin(record) for record in missing],
            }
        )
    else:
        _show(rows, missing, target)
    ctx.exit(0 if any(row.usable for row in rows) else 1)


def _show(rows: list[Row], missing: list[PluginRecord], target: Target | None) -> None:
    if rows:
        heading = f"on {target}" if target is not None else "here"
        show_table((*COLUMNS, heading), [_cells(row) for row in rows])
    else:
        show_line("no operation is loaded" if missing else NOTHING)
    _show_not_loaded(missing)


def _cells(row: Row) -> tuple[str, ...]:
    entry, capabilities = row.entry, row.entry.operation.capabilities
    return (
        entry.name,
        ", ".join(
            f"{name} (contested)" if name in row.disputed else name
            for name in entry.names[1:]
        ),
        entry.operation.kind.name,
        entry.plugin,
        f"{entry.distribution} {entry.version}".strip(),
        platform_text(capabilities.platforms),
        str(capabilities.cost),
        shipped_level(entry),
        f"{row.status}: {row.note}" if row.note else row.status,
    )


def _show_not_loaded(missing: list[PluginRecord]) -> None:
    """Writes the plugins that were not loaded, if any."""
    if not missing:
        return
    show_line()
    show_line("plugins that are not loaded:", "bold")
    for record in missing:
        show_line(f"  {one_line(record)}")
