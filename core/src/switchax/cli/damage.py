"""Damaged metadata on the path: it stops JAX's own start, whoever's it is."""

from __future__ import annotations

from switchax import discovery

__all__ = ["damaged_files"]


def damaged_files() -> list[dict[str, str]]:
    """Returns each entry_points.txt that cannot be read: path, problem, fix."""
    fix = "reinstall that distribution, or delete its folder"
    return [
        {"path": path, "problem": problem, "fix": fix}
        for path, problem in discovery.damaged_files()
    ]
