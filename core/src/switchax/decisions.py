"""Remembers decisions, and holds a run to the decisions of an earlier one."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DecisionLockError

if TYPE_CHECKING:
    from .dispatch import Decision

__all__ = ["clear", "record", "recorded", "save"]

_LIMIT = 4096
_lock = threading.Lock()
_decisions: OrderedDict[tuple[Any, ...], Decision] = OrderedDict()


def record(decision: Decision, lock_file: Path | None) -> bool:
    """Remembers a decision once; with a lock file, checks it against the file.

    Returns:
        Whether the decision is new to this process.

    Raises:
        DecisionLockError: If the file lacks the request or holds another choice.
    """
    key = (decision.request, decision.target, decision.chosen.entry.qualified)
    is_new = key not in _decisions
    if is_new:
        with _lock:
            _decisions[key] = decision
            while len(_decisions) > _LIMIT:
                _decisions.popitem(last=False)
    if lock_file is not None:
        _check(decision, lock_file)
    return is_new


def recorded() -> tuple[Decision, ...]:
    """Returns the decisions of this process, oldest first, each once."""
    with _lock:
        return tuple(_decisions.values())


def clear() -> None:
    """Forgets the decisions of this process."""
    with _lock:
        _decisions.clear()


def _row(decision: Decision) -> dict[str, str]:
    entry = decision.chosen.entry
    return {
        "request": decision.request.key,
        "target": str(decision.target),
        "operation": entry.qualified,
        "distribution": entry.distribution,
        "version": entry.version,
    }


def save(path: str | os.PathLike[str]) -> None:
    """Writes the decisions of this process to a lock file, atomically.

    Args:
        path: Where; a run with `use(lock=path)` must then choose the same.
    """
    rows = sorted((_row(d) for d in recorded()), key=lambda row: sorted(row.items()))
    target = Path(path)
    text = json.dumps({"switchax_decisions": 1, "decisions": rows}, indent=1) + "\n"
    handle, name = tempfile.mkstemp(
        dir=target.parent, prefix=target.name, suffix=".tmp"
    )
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@functools.lru_cache(maxsize=8)
def _read(path: Path, stamp: tuple[int, int]) -> dict[tuple[str, str], dict[str, str]]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        rows = document["decisions"]
        return {(row["request"], row["target"]): dict(row) for row in rows}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DecisionLockError(
            f"lock: expected a file written by switchax.decisions.save, got {path} "
            f"({type(error).__name__}: {error}); write it again"
        ) from error


def _check(decision: Decision, path: Path) -> None:
    try:
        status = path.stat()
    except OSError as error:
        raise DecisionLockError(
            f"lock: expected a readable file, got {path} ({error.strerror}); "
            "write it with switchax.decisions.save"
        ) from error
    row = _row(decision)
    wanted = _read(path, (status.st_mtime_ns, status.st_size)).get(
        (row["request"], row["target"])
    )
    if wanted == row:
        return
    choice = f"{row['operation']} {row['version']}"
    expected = (
        "a request that the file knows"
        if wanted is None
        else f"{wanted.get('operation')} {wanted.get('version')}"
    )
    raise DecisionLockError(
        f"lock: expected {expected} by {path}, got {choice} for "
        f"{decision.request.describe()} on {decision.target}; "
        "install what was locked, or write the file again"
    )
