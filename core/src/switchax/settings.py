"""Settings: environment, then `configure`, then `use`, each over the one before.

`use` is part of the key of JAX's traces: a jitted function is traced again when it
changes.
Environment and `configure` are read when a function is traced, not when it runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import SettingsError, near_miss
from .trace_key import Current

__all__ = ["Settings", "configure", "current_settings", "setting_sources", "use"]

PREFIX = "SWITCHAX_"
_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is in force.

    Attributes:
        operation: Names tried in order where a call says "auto"; () ranks.
        strict: Taking a worse cost class raises instead of warning.
        force_native: Every operation runs its `forward_native`.
        cache_dir: Where tuned configurations will live; None is the user's cache
            folder. Nothing is tuned yet, so nothing reads it.
        lock: A file of decisions that the calls of this run must match, or None. An
            operation instance that is called decides nothing.
        plugins: Only these plugins are loaded; None is all. Before discovery only.
        block: These plugins are not loaded. Before discovery only.
        autoload: Whether installed plugins are loaded. Before discovery only.
    """

    operation: tuple[str, ...] = ()
    strict: bool = False
    force_native: bool = False
    cache_dir: Path | None = None
    lock: Path | None = None
    plugins: frozenset[str] | None = None
    block: frozenset[str] = frozenset()
    autoload: bool = True


NAMES = tuple(field.name for field in dataclasses.fields(Settings))
DISCOVERY = frozenset({"plugins", "block", "autoload"})
Overlay = tuple[tuple[str, Any], ...]


def _merged(layers: Sequence[Mapping[str, Any]]) -> Overlay:
    merged = {name: value for layer in layers for name, value in layer.items()}
    return tuple(sorted(merged.items()))


_used: Current[Overlay] = Current("use", "settings", (), merge=_merged)
_configured: dict[str, Any] = {}
_discovered = False


def _parse(name: str, value: Any, source: str) -> Any:
    """Returns the value of a setting as its field's type, or raises."""
    if name not in NAMES:
        known = [n for n in NAMES if source != "use" or n not in DISCOVERY]
        raise SettingsError(
            f"{source}: expected a setting of {', '.join(known)}, got {name!r}"
            f"{near_miss(name, NAMES)}; correct or remove it"
        )
    if name in ("strict", "force_native", "autoload"):
        return _parse_bool(name, value, source)
    if name in ("cache_dir", "lock"):
        text = os.fspath(value) if isinstance(value, str | os.PathLike) else None
        if isinstance(text, str) and text and "\0" not in text:
            return Path(text)
        raise _bad(
            source, f"{name} to be a path", name, value, "give a file system path"
        )
    names = _parse_names(name, value, source)
    if name == "operation":
        if "auto" in names and len(names) > 1:
            raise _bad(source, "'auto' alone, or names", name, value, "leave it out")
        return () if names == ("auto",) else names
    return frozenset(map(normalised, names))


def _parse_bool(name: str, value: Any, source: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in _TRUE | _FALSE:
        return value.strip().lower() in _TRUE
    raise _bad(
        source,
        f"{name} to be a bool",
        name,
        value,
        "write True or False, or 1 or 0 in the environment",
    )


def _parse_names(name: str, value: Any, source: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = value.split(",")
    elif not isinstance(value, list | tuple | set | frozenset):
        raise _bad(source, f"{name} to be names", name, value, "give a list of names")
    if name == "operation" and isinstance(value, set | frozenset):
        todo = "give a list: they are tried in its order"
        raise _bad(source, "operation in an order", name, value, todo)
    for item in value:
        if not isinstance(item, str):
            raise _bad(source, f"{name} to be names", name, value, "names are str")
    names = tuple(dict.fromkeys(item.strip() for item in value if item.strip()))
    if name == "operation" and not names:
        raise _bad(source, "at least one name", name, value, "'auto' ranks them all")
    return names


def _bad(source: str, rule: str, name: str, value: Any, todo: str) -> SettingsError:
    return SettingsError(f"{source}: expected {rule}, got {name}={value!r}; {todo}")


def normalised(name: str) -> str:
    """Returns a plugin or distribution name in the spelling used to compare."""
    return re.sub(r"[-_.]+", "-", name.strip().lower())


def _environment() -> tuple[tuple[str, str], ...]:
    # Asked one by one: another thread may unset any of them meanwhile.
    names = [name for name in list(os.environ) if name.startswith(PREFIX)]
    found = ((name, os.environ.get(name)) for name in sorted(names))
    return tuple((name, text) for name, text in found if text is not None)


@functools.lru_cache(maxsize=16)
def _from_environment(pairs: tuple[tuple[str, str], ...]) -> Mapping[str, Any]:
    values = {}
    for variable, text in pairs:
        name = variable.removeprefix(PREFIX).lower()
        if name not in NAMES:
            known = [PREFIX + field.upper() for field in NAMES]
            raise SettingsError(
                f"environment: expected a variable of {', '.join(known)}, got "
                f"{variable}{near_miss(variable, known, PREFIX)}; correct or unset it"
            )
        if text.strip():
            values[name] = _parse(name, text, f"environment {variable}")
    return values


def configured() -> dict[str, Any]:
    """Returns what `configure` has set, to be restored."""
    return dict(_configured)


def restore(values: Mapping[str, Any]) -> None:
    """Makes these the values that `configure` has set."""
    _configured.clear()
    _configured.update(values)


def current_settings() -> Settings:
    """Returns the settings in force here and now.

    Raises:
        SettingsError: For an unknown `SWITCHAX_*` variable or a value it cannot be.
    """
    return _merge(_environment(), tuple(_configured.items()), _used.get())


@functools.lru_cache(maxsize=256)
def _merge(
    environment: tuple[tuple[str, str], ...], configured: Overlay, used: Overlay
) -> Settings:
    return Settings(
        **{**_from_environment(environment), **dict(configured), **dict(used)}
    )


def setting_sources() -> dict[str, tuple[Any, str]]:
    """Returns, for each setting, its value and where it came from.

    Unlike `current_settings` this never raises: a bad variable is reported as
    `("error: ...", "environment")` under its own name.
    """
    result: dict[str, tuple[Any, str]] = {
        field.name: (field.default, "default") for field in dataclasses.fields(Settings)
    }
    for pair in _environment():
        try:
            for name, value in _from_environment((pair,)).items():
                result[name] = (value, f"environment {pair[0]}")
        except SettingsError as error:
            result[pair[0]] = (error, "environment")
    for source, overlay in (
        ("configure", _configured),
        ("use", dict(_used.peek())),
    ):
        for name, value in overlay.items():
            result[name] = (value, source)
    return result


def configure(**values: Any) -> None:
    """Sets settings for the whole process; a value of None unsets it again.

    Functions that are already traced keep what they chose; use `use` for those.

    Args:
        **values: Fields of `Settings`.

    Raises:
        SettingsError: For an unknown name, a bad value, or a discovery setting after
            discovery.

    Example:
        >>> switchax.configure(operation="vanilla", strict=True)
        >>> switchax.configure(operation=None, strict=None)
    """
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        if name in DISCOVERY and _discovered:
            raise SettingsError(
                f"configure: expected {name} before discovery, got {name}={value!r} "
                f"after it; set it at the program's start or as {PREFIX}{name.upper()}"
            )
        if value is None and name in NAMES:
            parsed[name] = None
        else:
            parsed[name] = _parse(name, value, "configure")
    for name, value in parsed.items():
        if value is None:
            _configured.pop(name, None)
        else:
            _configured[name] = value


@contextlib.contextmanager
def use(operation: Any = None, /, **values: Any) -> Iterator[Settings]:
    """Sets settings within a `with` block, in this `contextvars` context.

    Each thread and each asyncio task has its own. Jitted functions are traced again
    under other settings, also on leaving. In a copied context (`asyncio.to_thread`)
    tracing raises, and a function that is compiled already keeps what it chose, unless
    the block was entered in that thread itself; between `with` and a call of a jitted
    function nothing may be awaited.

    Args:
        operation: Short for `operation=`.
        **values: Fields of `Settings`, discovery settings aside.

    Yields:
        The settings in force.

    Raises:
        SettingsError: For an unknown name or a bad value.

    Example:
        >>> with switchax.use(operation="vanilla"):
        ...     y = switchax.attention(q, k, v)
    """
    if operation is not None:
        if "operation" in values:
            raise SettingsError(
                f"use: expected operation once, got {operation!r} and operation="
                f"{values['operation']!r}; pass one"
            )
        values["operation"] = operation
    for name in values:
        if name in DISCOVERY:
            raise SettingsError(
                f"use: expected settings of a call, got {name}={values[name]!r}; "
                "plugins are discovered once: use configure before that"
            )
    parsed = {name: _parse(name, value, "use") for name, value in values.items()}
    block = _used.enter(parsed)
    try:
        yield current_settings()
    finally:
        _used.leave(block)


def note_discovery(done: bool) -> None:
    """Tells that plugins were discovered, so discovery settings are fixed."""
    global _discovered
    _discovered = done
