"""Damaged metadata on the path: it stops JAX's own start, whoever's it is."""

from __future__ import annotations

import importlib.metadata

from .errors import one_line

__all__ = ["damaged_files"]


def damaged_files() -> list[dict[str, str]]:
    """Returns each entry_points.txt that cannot be read: path, problem, fix."""
    found: dict[str, dict[str, str]] = {}
    for distribution in importlib.metadata.distributions():
        problem = _problem(distribution)
        if problem:
            folder = str(getattr(distribution, "_path", "an unnamed distribution"))
            path = f"{folder}/entry_points.txt"
            fix = "reinstall that distribution, or delete its folder"
            found.setdefault(path, {"path": path, "problem": problem, "fix": fix})
    return [found[path] for path in sorted(found)]


def _problem(distribution: importlib.metadata.Distribution) -> str:
    try:
        list(distribution.entry_points)
    except Exception as error:  # configparser's, Unicode's, the file system's
        return one_line(f"{type(error).__name__}: {error}")
    return ""
