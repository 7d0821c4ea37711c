"""What is registered, as rows: the data of `list`, and what `doctor` says of names."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from switchax.errors import ContestedNameError, Refusal
from switchax.loading import PluginRecord
from switchax.matching import availability
from switchax.registrations import Entry
from switchax.registry import contested_names, find_entry
from switchax.target import PLATFORMS, Target

from .shipped import shipped_level

__all__ = [
    "Row",
    "claimants",
    "contested",
    "describe_plugin",
    "describe_row",
    "platform_text",
    "rows_of",
    "spelling",
]


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation on one target.

    Attributes:
        entry: The operation.
        qualified: A spelling that means it and nothing else.
        status: "available", "contested", "platform", "unavailable", or "unknown"
            where there is no target to ask about.
        note: The rest of the reason, or "".
        reasons: The refusals behind the status.
        disputed: Those of its names that are contested.
    """

    entry: Entry
    qualified: str
    status: str
    note: str = ""
    reasons: tuple[Refusal, ...] = ()
    disputed: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Whether a call can use it: a contested one by its qualified name."""
        return not self.reasons and self.status in ("available", "contested")


def rows_of(entries: Sequence[Entry], target: Target | None) -> list[Row]:
    """Returns a row for each entry, in order."""
    disputed = contested(entries, target)
    rows = []
    for entry in entries:
        qualified = spelling(entry)
        names = tuple(name for name in entry.names if name in disputed)
        row = Row(entry, qualified, "available", disputed=names)
        rows.append(dataclasses.replace(row, **_status(row, target)))
    return rows


def _status(row: Row, target: Target | None) -> dict[str, Any]:
    if target is None:
        return {"status": "unknown", "note": "no device to ask about"}
    reasons = availability(row.entry.operation, target)
    if reasons:
        note = "; ".join(map(_note, reasons))
        return {"status": reasons[0].code, "note": note, "reasons": reasons}
    if row.entry.name in row.disputed:
        return {"status": "contested", "note": f"call it {row.qualified}"}
    if row.entry.operation.capabilities.is_experimental(target.platform):
        return {"note": "experimental, when named only"}
    return {}


def _note(reason: Refusal) -> str:
    if reason.code == "platform":
        return f"needs {reason.allowed}, not {reason.actual}"
    return reason.hint or str(reason)


def contested(entries: Sequence[Entry], target: Target | None) -> dict[str, str]:
    """Returns each name that means nothing because several claim it, and why.

    Args:
        entries: All operations.
        target: The device that decides whether a shared name is contested; with
            None only canonical names are looked at.
    """
    found = contested_names()
    for name in sorted({name for entry in entries for name in entry.names}):
        if target is None or name in found:
            continue
        try:
            find_entry(name, target)
        except ContestedNameError as error:
            found[name] = str(error)
        except Exception:
            continue  # nobody answers here, or an `unavailable()` raises: see its row
    return found


def claimants(name: str, entries: Sequence[Entry], target: Target | None) -> list[str]:
    """Returns the qualified spellings of those who claim a contested name."""
    claiming = [entry for entry in entries if name in entry.names]
    if target is not None and all(entry.name != name for entry in claiming):
        claiming = [
            entry for entry in claiming if not availability(entry.operation, target)
        ]
    return [spelling(entry) for entry in claiming]


def spelling(entry: Entry) -> str:
    """Returns a name that means this operation and no other, on any target."""
    try:
        alone = find_entry(entry.qualified, Target("cpu")) == entry
    except ContestedNameError:
        alone = False
    who = entry.plugin if alone or not entry.distribution else entry.distribution
    return f"{who}:{entry.name}"


def platform_text(platforms: Iterable[str]) -> str:
    """Returns platforms as a declaration would write them."""
    names = set(platforms)
    if names >= PLATFORMS:
        return "any"
    if names >= {"cuda", "rocm"}:
        names = names - {"cuda", "rocm"} | {"gpu"}
    return ", ".join(sorted(names))


def describe_row(row: Row) -> dict[str, Any]:
    """Returns a row as data for JSON."""
    entry, capabilities = row.entry, row.entry.operation.capabilities
    return {
        "operation": entry.name,
        "qualified": row.qualified,
        "other_names": list(entry.names[1:]),
        "kind": entry.operation.kind.name,
        "plugin": entry.plugin,
        "distribution": entry.distribution,
        "version": entry.version,
        "platforms": sorted(capabilities.platforms),
        "cost": str(capabilities.cost),
        "experimental": [
            platform
            for platform in sorted(capabilities.platforms)
            if capabilities.is_experimental(platform)
        ],
        "contested_names": list(row.disputed),
        "conformance": shipped_level(entry),
        "status": row.status,
        "usable": row.usable,
        "note": row.note,
        "reasons": [dataclasses.asdict(reason) for reason in row.reasons],
    }


def describe_plugin(record: PluginRecord) -> dict[str, Any]:
    """Returns what became of a plugin as data for JSON."""
    return {
        "plugin": record.plugin.name,
        "distribution": record.plugin.distribution,
        "version": record.plugin.version,
        "entry_point": record.plugin.value,
        "status": record.status,
        "reason": record.reason,
        "fix": record.fix,
        "hook_problems": list(record.hook_problems),
        "changes": list(record.changes),
        "traceback": record.details,
    }
