"""What `doctor` finds out: each question in a try of its own, as plain data."""

from __future__ import annotations

import os
import platform
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import numpy as np

from switchax import registrations
from switchax._version import __version__
from switchax.errors import SettingsError, described, first_line, near_miss
from switchax.loading import ensure_loaded, hooks, unmarked_hooks
from switchax.registry import find_entry
from switchax.settings import Settings, normalised, setting_sources
from switchax.target import Target, target_of_device

from .damage import damaged_files
from .errors import one_line
from .operations import claimants, contested, describe_plugin
from .shipped import DAMAGED, shipped_level
from .targets import present_target

__all__ = ["diagnose", "load"]


def load() -> None:
    """Loads plugins under what is right of the settings, as wrong ones stop others."""
    ensure_loaded(_right_settings())


def _right_settings() -> Settings:
    sources = setting_sources().items()
    right = {k: v for k, (v, _) in sources if not isinstance(v, SettingsError)}
    return Settings(**right)


def diagnose() -> dict[str, Any]:
    """Asks everything, after `load`.

    Returns:
        Data for JSON, in the order in which it is shown; "healthy" says whether no
        plugin failed or brought nothing, no name is contested, no setting is wrong,
        there is an operation, and JAX starts.
    """
    sources, settings = setting_sources(), _right_settings()
    plugins = [describe_plugin(record) for record in ensure_loaded(settings).values()]
    target, _ = present_target()
    names = _contested(target)
    wrong = _wrong_settings(sources, settings, target)
    failed = any(plugin["status"] == "failed" for plugin in plugins)
    empty = _empty_plugins()
    devices = _devices()
    usable = bool(registrations.entries()) and not devices["problem"]
    return {
        "healthy": usable and not (failed or names or wrong or empty),
        "operations": len(registrations.entries()),
        "empty_plugins": empty,
        "versions": _versions(),
        "plugins": plugins,
        "contested": names,
        "settings": [
            {"setting": name, "value": _plain(value), "source": source}
            for name, (value, source) in sources.items()
            if not isinstance(value, SettingsError)
        ],
        "wrong_settings": wrong,
        "notes": [
            *_unknown_plugins(plugins, settings),
            *_unknown_hooks(),
            *_unmarked_hooks(),
            *_damaged_reports(),
        ],
        "damaged_files": damaged_files(),
        "devices": devices,
    }


def _empty_plugins() -> list[str]:
    """Plugins that were loaded and brought nothing: a decorator was forgotten."""
    owners = {(e.plugin, e.distribution) for e in registrations.entries()}
    return [
        key
        for key, record in ensure_loaded(_right_settings()).items()
        if record.status == "loaded"
        and (record.plugin.name, record.plugin.distribution) not in owners
        and not hooks.get_hookcallers(hooks.get_plugin(key))
    ]


def _versions() -> dict[str, str]:
    return {
        "switchax": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _contested(target: Target | None) -> list[dict[str, Any]]:
    entries = registrations.entries()
    return [
        {
            "name": name,
            "qualified": claimants(name, entries, target),
            "problem": message,
        }
        for name, message in contested(entries, target).items()
    ]


def _wrong_settings(
    sources: dict[str, tuple[Any, str]], settings: Settings, target: Target | None
) -> list[dict[str, str]]:
    wrong = [
        {"setting": name, "problem": str(value)}
        for name, (value, _) in sources.items()
        if isinstance(value, SettingsError)
    ]
    for name in settings.operation:
        try:
            find_entry(name, target or Target("cpu"))
        except ValueError as error:  # unknown or contested; elsewhere it may fit
            problem = first_line(error)
            wrong.append({"setting": "operation", "problem": problem})
        except Exception:
            continue  # unsupported here, or a plugin's `unavailable()` raises
    if settings.lock is not None and not Path(settings.lock).is_file():
        problem = f"lock: expected a readable file, got lock={str(settings.lock)!r}"
        problem += "; write it with switchax.decisions.save"
        wrong.append({"setting": "lock", "problem": problem})
    return wrong


def _plain(value: Any) -> Any:
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


def _unknown_plugins(plugins: list[dict[str, Any]], settings: Settings) -> list[str]:
    """Names in the settings that no installed plugin has: legal, maybe misspelt."""
    fields = ("plugin", "distribution")
    known = {normalised(plugin[field]) for plugin in plugins for field in fields}
    return [
        f"{setting}: no installed plugin is called {name!r}{near_miss(name, known)}"
        for setting in ("plugins", "block")
        for name in sorted(getattr(settings, setting) or ())
        if name not in known
    ]


def _unknown_hooks() -> list[str]:
    """Hooks that core never calls: a misspelt name, or a newer core's."""
    calls = vars(hooks.hook)
    known = [name for name, call in calls.items() if call.has_spec()]
    return [
        f"plugin {implementation.plugin_name}: no hook is called "
        f"{name!r}{near_miss(name, known)}; it is never asked"
        for name, call in calls.items()
        for implementation in call.get_hookimpls()
        if not call.has_spec() and not implementation.optionalhook
    ]


def _unmarked_hooks() -> list[str]:
    """Hooks that a plugin wrote and forgot to mark, so that nobody asks them."""
    return [
        f"plugin {key}: {name} is no hook without @switchax.hookimpl; it is never asked"
        for key, record in ensure_loaded(_right_settings()).items()
        for name in unmarked_hooks(record.plugin)
    ]


def _damaged_reports() -> list[str]:
    """Conformance reports that are shipped and cannot be read."""
    return [
        f"operation {entry.qualified}: its conformance report is damaged; write it "
        f"anew with `switchax conform {entry.name} --report`"
        for entry in registrations.entries()
        if shipped_level(entry) == DAMAGED
    ]


def _devices() -> dict[str, Any]:
    try:
        found = jax.devices()
        counts = Counter((str(target_of_device(d)), d.device_kind) for d in found)
    except Exception as error:  # whatever a backend, or damaged metadata, raises
        asked = os.environ.get("JAX_PLATFORMS")
        problem = one_line(described(error)) + (
            f" (JAX_PLATFORMS={asked})" * bool(asked)
        )
        return {"found": [], "problem": problem}
    kinds = [
        {"target": target, "device_kind": kind, "count": count}
        for (target, kind), count in counts.items()
    ]
    return {"found": kinds, "problem": ""}
