"""Finds installed plugins: entry points of the group `switchax.plugins`.

Distributions are read one by one, so that one damaged file costs one distribution.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata

from .settings import normalised

__all__ = ["GROUP", "FoundPlugin", "find_plugins"]

GROUP = "switchax.plugins"


@dataclasses.dataclass(frozen=True)
class FoundPlugin:
    """One entry point, or one damaged file of them.

    Attributes:
        name: Entry-point name, "?" if the file cannot be read.
        distribution: Name of the distribution.
        version: Its version.
        value: The object reference, "module" or "module:attribute".
        problem: Why it cannot be read, or "".
    """

    name: str
    distribution: str
    version: str
    value: str
    problem: str = ""

    @property
    def key(self) -> str:
        """`distribution:entry_point`, unique among plugins."""
        return f"{self.distribution}:{self.name}"

    @property
    def module(self) -> str:
        """The module part of the object reference."""
        return self.value.partition(":")[0].strip()

    def is_called(self, names: frozenset[str]) -> bool:
        """Whether its entry-point or distribution name is among normalised names."""
        return bool({normalised(self.name), normalised(self.distribution)} & names)


def find_plugins() -> list[FoundPlugin]:
    """Returns every plugin installed, sorted by key; nothing is imported.

    A distribution whose metadata is on the path twice counts once, the first.
    """
    found: dict[str, FoundPlugin] = {}
    seen: set[str] = set()
    for distribution in importlib.metadata.distributions():
        try:
            text = distribution.read_text("entry_points.txt")
        except (OSError, UnicodeDecodeError) as error:
            text, problem = None, f"cannot read entry_points.txt: {error}"
            if not _is_ours(distribution):
                continue
        else:
            problem = ""
        if not problem and (text is None or GROUP not in text):
            continue
        name = _name_of(distribution)
        if normalised(name) in seen:
            continue
        seen.add(normalised(name))
        for plugin in _plugins_of(distribution, name, problem):
            found.setdefault(plugin.key, plugin)
    return [found[key] for key in sorted(found)]


def _is_ours(distribution: importlib.metadata.Distribution) -> bool:
    return normalised(_name_of(distribution)).startswith("switchax")


def _name_of(distribution: importlib.metadata.Distribution) -> str:
    try:
        name = distribution.metadata["Name"]
    except Exception:
        name = None
    if name:
        return str(name)
    folder = getattr(distribution, "_path", None)
    return str(getattr(folder, "name", "unknown")).partition("-")[0]


def _plugins_of(
    distribution: importlib.metadata.Distribution, name: str, problem: str
) -> list[FoundPlugin]:
    try:
        version = str(distribution.version or "unknown")
    except Exception:
        version = "unknown"
    if problem:
        return [FoundPlugin("?", name, version, "", problem)]
    try:
        points = [point for point in distribution.entry_points if point.group == GROUP]
    except Exception as error:
        problem = f"malformed entry_points.txt: {type(error).__name__}: {error}"
        return [FoundPlugin("?", name, version, "", problem)]
    return [FoundPlugin(point.name, name, version, point.value) for point in points]
