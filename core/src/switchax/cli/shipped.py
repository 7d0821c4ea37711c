"""Conformance reports that plugins ship: `conformance/NAME.json` in their package."""

from __future__ import annotations

import importlib.resources

from switchax._version import __version__
from switchax.registrations import Entry

__all__ = ["DAMAGED", "shipped_level"]

DAMAGED = "damaged report"


def shipped_level(entry: Entry) -> str:
    """Returns what an operation's own report says, such as "full on tpu:v5e x 8".

    Returns:
        "" without one. A report that failed, was not finished, or is of another
        operation, or of another version of the plugin or of Switchax, says so.
    """
    from switchax.testing.report import Report

    package = entry.operation.__module__.partition(".")[0]
    try:
        folder = importlib.resources.files(package) / "conformance"
        text = (folder / f"{entry.name}.json").read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return DAMAGED
    except (OSError, TypeError, ModuleNotFoundError):
        return ""
    try:
        report = Report.from_json(text)
    except ValueError:
        return DAMAGED
    level = f"{report.level} on {report.device}"
    if not report.computed:
        level += ", compiled only"
    kind = entry.operation.kind.name
    if (report.operation, report.kind) != (entry.name, kind) or not report.passed:
        return f"failed {level}"
    for distribution, here in (
        (entry.distribution, entry.version),
        ("switchax", __version__),
    ):
        version = report.versions.get(distribution, "no version")
        if version != here:
            whose = f" of {distribution}" if distribution == "switchax" else ""
            level += f", of {version}{whose}"
    return level
