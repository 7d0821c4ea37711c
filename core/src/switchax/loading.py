"""Loads plugins, each in a try of its own, with rollback of what it defined.

pluggy's own entry-point loader is not used: it stops at the first failure and drops
a second plugin of one name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import logging
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import jax
import pluggy

from . import hookspecs, registrations, settings
from .caller import warn_caller
from .discovery import FoundPlugin, find_plugins
from .errors import ContractError, RegistrationError, near_miss
from .modules import holds
from .partition import rules

__all__ = [
    "CONTRACT",
    "PluginRecord",
    "call_hooks",
    "ensure_loaded",
    "first_result",
    "is_loading",
    "unmarked_hooks",
]

CONTRACT = 1
_LOG = logging.getLogger("switchax")
_LONG = 20  # seconds
_UNSTATED_CONTRACT = 1


@dataclasses.dataclass
class PluginRecord:
    """What became of one plugin.

    Attributes:
        plugin: The entry point.
        status: "loaded", "failed", "blocked", "not allowed", or "not loaded" where
            autoload is off.
        reason: One line, if it was not loaded.
        fix: What to do about it.
        details: The traceback of a failure.
        hook_problems: Hooks that raised when called, one line each.
        changes: Settings of JAX that its import changed, for all, one line each.
    """

    plugin: FoundPlugin
    status: str
    reason: str = ""
    fix: str = ""
    details: str = ""
    hook_problems: list[str] = dataclasses.field(default_factory=list)
    changes: tuple[str, ...] = ()

    def __str__(self) -> str:
        text = f"{self.plugin.key} {self.plugin.version}: {self.status}"
        text += f", {self.reason}" if self.reason else ""
        return f"{text}; {self.fix}" if self.fix else text


@dataclasses.dataclass(frozen=True)
class _Provider:
    """What an entry point names, and its hooks as pluggy has them.

    pluggy compares what it is given by ==, which is theirs to define, and to get wrong;
    modules are equal to themselves alone.
    """

    named: Any
    hooks: ModuleType


_lock = threading.RLock()
_state: dict[str, Any] = {"done": False, "busy": False}
_records: dict[str, PluginRecord] = {}
_providers: dict[str, _Provider] = {}
hooks = pluggy.PluginManager(hookspecs.PROJECT)
hooks.add_hookspecs(hookspecs)


def ensure_loaded(
    wanted: settings.Settings | None = None,
) -> dict[str, PluginRecord]:
    """Discovers and loads plugins once; returns their records by key.

    Args:
        wanted: The settings that say what is loaded, those in force by default.

    Raises:
        SettingsError: If settings are wrong; the next question tries again.
    """
    if _state["done"]:
        return _records
    with _lock:
        if _state["done"] or _state["busy"]:  # busy: a plugin asks while it is loaded
            return _records
        wanted = wanted if wanted is not None else settings.current_settings()
        _state["busy"] = True
        try:
            _load_all(find_plugins(), wanted)
            _state["done"] = True
            settings.note_discovery(True)
        finally:
            _state["busy"] = False
    return _records


def is_loading() -> bool:
    """Whether plugins are being loaded: a plugin asks while it is imported."""
    return bool(_state["busy"])


def _load_all(found: list[FoundPlugin], wanted: settings.Settings) -> None:
    registrations.note_plugins(found)
    forbidden = {plugin.key: _forbidden(plugin, wanted) for plugin in found}
    barred = {key for key, record in forbidden.items() if record is not None}
    registrations.bar(barred)
    for plugin in _owners_first(found):
        record = forbidden[plugin.key] or _load(plugin, wanted)
        _records[plugin.key] = record
        if record.status == "failed":
            barred.add(plugin.key)
    registrations.bar(barred)


def _owners_first(found: list[FoundPlugin]) -> list[FoundPlugin]:
    """Of plugins that name one module, the one that ships it before the others."""
    shared = Counter(plugin.module for plugin in found)
    return sorted(
        found,
        key=lambda p: shared[p.module] > 1 and not holds(p, p.module),
    )


def _forbidden(plugin: FoundPlugin, wanted: settings.Settings) -> PluginRecord | None:
    if plugin.is_called(wanted.block):
        fix = f"remove {_own_name(plugin)} from SWITCHAX_BLOCK or configure(block=...)"
        return PluginRecord(plugin, "blocked", "blocked by the setting 'block'", fix)
    if wanted.plugins is not None and not plugin.is_called(wanted.plugins):
        fix = f"add {_own_name(plugin)} to SWITCHAX_PLUGINS or configure(plugins=...)"
        return PluginRecord(plugin, "not allowed", "not in the setting 'plugins'", fix)
    return None


def _load(plugin: FoundPlugin, wanted: settings.Settings) -> PluginRecord:
    if not wanted.autoload:  # what somebody imports counts all the same
        fix = "unset SWITCHAX_AUTOLOAD or configure(autoload=True)"
        return PluginRecord(plugin, "not loaded", "autoload is off", fix)
    if plugin.problem:
        fix = f"reinstall {plugin.distribution}"
        return PluginRecord(plugin, "failed", plugin.problem, fix)
    if hooks.has_plugin(plugin.key):  # from a discovery that was interrupted
        return PluginRecord(plugin, "loaded")
    settings_before, axes_before = settings.configured(), rules.registered()
    jax_before = dict(jax.config.values)
    try:
        with registrations.loading(plugin), _named_if_long(plugin):
            provider = _resolve(plugin)
            _check_contract(plugin, provider)
            _register_hooks(plugin, provider)
            for kind in _own_results("switchax_kinds", plugin):
                registrations.add_kind(kind)
            for operation in _own_results("switchax_operations", plugin):
                registrations.add_operation(operation)
    except KeyboardInterrupt:
        # The next question loads it again. Modules that are imported by now will not
        # run again, so their operations stay.
        _unregister_hooks(plugin)
        raise
    except BaseException as error:  # sys.exit at import is one
        _unregister_hooks(plugin)
        registrations.roll_back(plugin)
        settings.restore(settings_before)
        rules.restore(axes_before)
        details = "".join(traceback.format_exception(error))
        fix = _fix(plugin, error)
        record = PluginRecord(plugin, "failed", _one_line(error), fix, details)
        return dataclasses.replace(record, changes=_changes(jax_before))
    return PluginRecord(plugin, "loaded", changes=_changes(jax_before))


def _changes(before: dict[str, Any]) -> tuple[str, ...]:
    """Says which of JAX's settings are no longer as they were."""
    now = jax.config.values  # what is new was defined by an import
    changed = [name for name, x in before.items() if now.get(name, x) != x]
    return tuple(f"{name} from {before[name]!r} to {now[name]!r}" for name in changed)


def _resolve(plugin: FoundPlugin) -> Any:
    provider: Any = importlib.import_module(plugin.module)
    for attribute in plugin.value.partition(":")[2].partition("[")[0].split("."):
        if attribute.strip():
            provider = getattr(provider, attribute.strip())
    return provider


def _check_contract(plugin: FoundPlugin, provider: Any) -> None:
    spoken = getattr(provider, "SWITCHAX_CONTRACT", None)
    if spoken is None and not isinstance(provider, ModuleType):
        module = importlib.import_module(plugin.module)
        spoken = getattr(module, "SWITCHAX_CONTRACT", None)
    spoken = _UNSTATED_CONTRACT if spoken is None else spoken
    if type(spoken) is int and spoken == CONTRACT:
        return
    todo = f"install a {plugin.distribution} for contract {CONTRACT}"
    if type(spoken) is int:
        todo += f", or a switchax for contract {spoken}"
    raise ContractError(
        f"{plugin.key}: expected contract {CONTRACT}, which this switchax speaks, got "
        f"SWITCHAX_CONTRACT={spoken!r}; {todo}"
    )


def _register_hooks(plugin: FoundPlugin, provider: Any) -> None:
    for other, taken in _providers.items():
        if taken.named is provider:
            raise RegistrationError(
                f"{plugin.key}: expected a provider of its own, got {plugin.value}, "
                f"which {other} provides already; uninstall one of them"
            )
    found = ModuleType(plugin.key)
    for name in dir(provider):
        if hooks.parse_hookimpl_opts(provider, name) is not None:
            setattr(found, name, getattr(provider, name))
    _providers[plugin.key] = _Provider(provider, found)
    hooks.register(found, name=plugin.key)
    known = [name for name in vars(hookspecs) if name.startswith("switchax_")]
    for caller in hooks.get_hookcallers(found) or ():
        if not caller.has_spec():
            raise RegistrationError(
                f"{plugin.key}: expected a hook of {', '.join(known)}, got "
                f"{caller.name!r}{near_miss(caller.name, known, 'switchax_')}; "
                "rename it"
            )


def unmarked_hooks(plugin: FoundPlugin) -> list[str]:
    """Returns hooks that a loaded plugin defines without `hookimpl`, so in vain."""
    provider = _providers.get(plugin.key)
    names = [name for name in vars(hookspecs) if name.startswith("switchax_")]
    return [
        name
        for name in names
        if provider is not None
        and callable(getattr(provider.named, name, None))
        and not hasattr(provider.hooks, name)
    ]


@contextlib.contextmanager
def _named_if_long(plugin: FoundPlugin) -> Iterator[None]:
    """Logs which plugin it is that takes long to import: it may never end."""
    text = "plugin %s: %s s of importing %s, and not done"
    arguments = text, plugin.key, _LONG, plugin.module
    timer = threading.Timer(_LONG, _LOG.warning, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _own_results(hook: str, plugin: FoundPlugin) -> Iterator[Any]:
    for implementation in getattr(hooks.hook, hook).get_hookimpls():
        if implementation.plugin is _providers[plugin.key].hooks:
            yield from implementation.function() or ()


def _unregister_hooks(plugin: FoundPlugin) -> None:
    _providers.pop(plugin.key, None)
    if hooks.has_plugin(plugin.key):
        hooks.unregister(name=plugin.key)


def _one_line(error: BaseException) -> str:
    return " ".join("".join(traceback.format_exception_only(error)).split())


def _fix(plugin: FoundPlugin, error: BaseException) -> str:
    without = f"or leave it out with SWITCHAX_BLOCK={_own_name(plugin)}"
    missing = str(error.name or "") if isinstance(error, ImportError) else ""
    if isinstance(error, ContractError) or missing.partition(".")[0] == "switchax":
        return f"install matching versions of it and switchax, {without}"
    if isinstance(error, ModuleNotFoundError):
        if missing.partition(".")[0] == plugin.module.partition(".")[0]:
            entry = f"the entry point {plugin.name} = {plugin.value!r}"
            return f"correct {entry} or reinstall {plugin.distribution}, {without}"
        return f"install what provides {missing or 'a module'!r}, {without}"
    return f"upgrade or uninstall {plugin.distribution}, {without}"


def _own_name(plugin: FoundPlugin) -> str:
    """A name by which the settings mean this plugin and no other."""
    name = frozenset({settings.normalised(plugin.name)})
    named = [other for other in registrations.plugins() if other.is_called(name)]
    return plugin.name if named == [plugin] else plugin.distribution


def call_hooks(hook: str, **arguments: Any) -> list[Any]:
    """Calls a hook of every plugin; one that raises is reported, not obeyed.

    Args:
        hook: The hook's name.
        **arguments: Its arguments, all of them.

    Returns:
        The results that are not None, last loaded first.
    """
    ensure_loaded()
    return list(_results(hook, arguments))


def first_result(hook: str, **arguments: Any) -> Any:
    """Calls a hook until a plugin answers; returns that answer or None."""
    ensure_loaded()
    return next(_results(hook, arguments), None)


def _results(hook: str, arguments: dict[str, Any]) -> Iterator[Any]:
    for implementation in reversed(getattr(hooks.hook, hook).get_hookimpls()):
        given = {name: arguments[name] for name in implementation.argnames}
        try:
            result = implementation.function(**given)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            _note_hook_problem(implementation.plugin_name, hook, error)
            continue
        if result is not None:
            yield result


def _note_hook_problem(key: str, hook: str, error: BaseException) -> None:
    record = _records.get(key)
    problems = record.hook_problems if record is not None else []
    if not any(problem.startswith(f"{hook} raised ") for problem in problems):
        problems.append(f"{hook} raised {_one_line(error)}")
        warn_caller(f"plugin {key}: {problems[-1]}; it is passed over")
