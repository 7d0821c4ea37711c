"""Remembers decisions, and holds a run to the decisions of an earlier one.

`save(path)` writes what was chosen so far; with the setting `lock=path` a later run
must choose the same, or raises.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import secrets
import stat
import threading
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DecisionLockError, house_message

if TYPE_CHECKING:
    from .dispatch import Decision

__all__ = ["check", "clear", "recorded", "save"]

_LIMIT = 4096
_FORMAT = 1
_FIELDS = ("request", "target", "operation", "distribution", "version")
_lock = threading.Lock()
_decisions: OrderedDict[tuple[Any, ...], Decision] = OrderedDict()


def record(decision: Decision, lock_file: Path | None) -> bool:
    """Remembers a decision once; with a lock file, checks it against the file.

    Returns:
        Whether the decision is new to this process.

    Raises:
        DecisionLockError: If the file lacks the request or holds another choice.
    """
    if lock_file is not None:
        check(decision, lock_file)
    key = (decision.request, decision.where, decision.chosen.entry)
    with _lock:
        is_new = key not in _decisions
        if is_new:
            _decisions[key] = decision
            while len(_decisions) > _LIMIT:
                _decisions.popitem(last=False)
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
        "target": decision.where,
        "operation": entry.qualified,
        "distribution": entry.distribution,
        "version": entry.version,
    }


def save(path: str | os.PathLike[str]) -> None:
    """Writes the decisions of this process to a lock file, atomically.

    A file that is there keeps its mode, a link stays one.

    Args:
        path: Where; a run with `use(lock=path)` must then choose the same.

    Raises:
        TypeError: If path is no path.
        DecisionLockError: If no file can be written there.
    """
    plain = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(plain, str):
        rule, got = "path to be a file system path", f"path={path!r}"
        todo = "give a str or a pathlib.Path"
        raise TypeError(house_message("decisions.save", rule, got, todo))
    rows = sorted((_row(d) for d in recorded()), key=lambda row: sorted(row.items()))
    text = (
        json.dumps({"switchax_decisions": _FORMAT, "decisions": rows}, indent=1) + "\n"
    )
    try:
        _write(Path(plain), text)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise DecisionLockError(
            f"decisions.save: expected a file that can be written, got path={plain!r} "
            f"({why}); give a path in a folder that is there"
        ) from error


def _write(target: Path, text: str) -> None:
    target = Path(os.path.realpath(target))  # a link stays one
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not target.is_file():  # a device or a pipe would be replaced
        raise ValueError("it is no regular file")
    beside = target.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with beside.open("x", encoding="utf-8") as file:
            file.write(text)
        if target.exists():
            beside.chmod(stat.S_IMODE(target.stat().st_mode))
        beside.replace(target)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


_Rows = dict[tuple[str, str], list[dict[str, str]]]


@functools.lru_cache(maxsize=8)
def _read(path: Path, stamp: tuple[int, int]) -> _Rows:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        number = document["switchax_decisions"]
        if type(number) is not int or number != _FORMAT:
            raise ValueError(f"switchax_decisions is not {_FORMAT}")
        rows: _Rows = {}
        if not isinstance(document["decisions"], list):
            raise ValueError("decisions is no list")
        for row in document["decisions"]:
            complete = {field: str(row[field]) for field in _FIELDS}
            rows.setdefault((complete["request"], complete["target"]), []).append(
                complete
            )
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DecisionLockError(
            f"lock: expected a file written by switchax.decisions.save, got {path} "
            f"({type(error).__name__}: {error}); write it again"
        ) from error
    return rows


def check(decision: Decision, path: Path) -> None:
    """Holds a decision against a lock file.

    Raises:
        DecisionLockError: If the file lacks the request or holds another choice.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise DecisionLockError(
            f"lock: expected a readable file, got {path} ({error.strerror}); "
            "write it with switchax.decisions.save"
        ) from error
    if not (
        stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)
    ):  # reading a pipe would wait for ever
        raise DecisionLockError(
            f"lock: expected a file, got {path}, which is none; "
            "write it with switchax.decisions.save"
        )
    row = _row(decision)
    rows = _read(path, (status.st_mtime_ns, status.st_size))
    wanted = rows.get((row["request"], row["target"]), [])
    if row in wanted:
        return
    expected = " or ".join(map(_choice, wanted)) or "a request that the file knows"
    raise DecisionLockError(
        f"lock: expected {expected} by {path}, got {_choice(row)} for "
        f"{decision.request.describe()} on {decision.where}; "
        "install what was locked, or write the file again"
    )


def _choice(row: dict[str, str]) -> str:
    return f"{row['operation']} {row['version']}".strip()
