"""Finds installed plugins: entry points of the group `switchax.plugins`.

Distributions are read one by one, so that one damaged file costs one distribution.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from importlib.metadata import Distribution
from pathlib import PurePath

from .errors import described
from .settings import normalised

__all__ = ["GROUP", "FoundPlugin", "damaged_files", "find_plugins"]

GROUP = "switchax.plugins"
_SECTION = re.compile(rf"^\s*\[\s*{re.escape(GROUP)}\b", re.MULTILINE)


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
        return re.split(r"[:\[]", self.value)[0].strip()

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
        folder = normalised(_folder_name(distribution))
        if folder in seen:
            continue
        if folder:
            seen.add(folder)
        for plugin in _plugins_of(distribution):
            found.setdefault(plugin.key, plugin)
    return [found[key] for key in sorted(found)]


def _plugins_of(distribution: Distribution) -> list[FoundPlugin]:
    try:
        text = distribution.read_text("entry_points.txt")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot read entry_points.txt: {described(error)}"
        return [_damaged(distribution, problem)] if _is_ours(distribution) else []
    if text is None or GROUP not in text:
        return []
    try:
        points = [point for point in distribution.entry_points if point.group == GROUP]
    except Exception as error:  # the parser has many
        problem = f"malformed entry_points.txt: {described(error)}"
        return [_damaged(distribution, problem)]
    if not points and _SECTION.search(text):
        problem = f"malformed entry_points.txt: nothing can be read of [{GROUP}]"
        return [_damaged(distribution, problem)]
    name, version = _name_of(distribution), _version_of(distribution)
    return [FoundPlugin(point.name, name, version, point.value) for point in points]


def damaged_files() -> list[tuple[str, str]]:
    """Returns each entry_points.txt that cannot be read, with the problem.

    Whoever's it is, it stops JAX's own start.
    """
    found: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        try:
            list(distribution.entry_points)
        except Exception as error:  # configparser's, Unicode's, the file system's
            folder = str(getattr(distribution, "_path", "an unnamed distribution"))
            found.setdefault(f"{folder}/entry_points.txt", described(error))
    return sorted(found.items())


def _damaged(distribution: Distribution, problem: str) -> FoundPlugin:
    name, version = _name_of(distribution), _version_of(distribution)
    return FoundPlugin("?", name, version, "", problem)


def _is_ours(distribution: Distribution) -> bool:
    """Whether it is named after us or requires us."""
    texts = [_name_of(distribution), *_metadata(distribution, "Requires-Dist")]
    return any(normalised(text).startswith("switchax") for text in texts)


def _name_of(distribution: Distribution) -> str:
    names = _metadata(distribution, "Name")
    return names[0] if names else _folder_name(distribution) or "unknown"


def _version_of(distribution: Distribution) -> str:
    versions = _metadata(distribution, "Version")
    return versions[0] if versions else "unknown"


def _metadata(distribution: Distribution, field: str) -> list[str]:
    try:
        return list(map(str, distribution.metadata.get_all(field) or ()))
    except Exception:  # any damage of METADATA
        return []


def _folder_name(distribution: Distribution) -> str:
    """The name as `NAME-VERSION.dist-info` spells it, which costs no reading."""
    folder = getattr(distribution, "_path", "")  # no public way to it
    return PurePath(str(folder)).stem.partition("-")[0]
