"""What is registered, and who owns it: the state behind the registry.

Ownership follows the package that defines a class, not who imported it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence

from .declaration import check_kind_name, check_operation
from .discovery import FoundPlugin
from .errors import RegistrationError
from .kind import OperationKind
from .modules import common_parts, defining_module, holds
from .operation import BaseOperation

__all__ = ["Entry", "add_kind", "add_operation", "entries", "generation", "kinds"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """One registered operation.

    Attributes:
        operation: The class.
        names: Canonical name, then shared names.
        plugin: Entry-point name of its owner, or the package that defines it.
        distribution: Distribution of its owner, or "".
        version: Version of the distribution, or "".
    """

    operation: type[BaseOperation]
    names: tuple[str, ...]
    plugin: str
    distribution: str = ""
    version: str = ""

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.names[0]

    @property
    def qualified(self) -> str:
        """`plugin:operation`, which always means this one."""
        return f"{self.plugin}:{self.name}"


_lock = threading.RLock()


@dataclasses.dataclass(frozen=True)
class _Registered:
    """What was found of an operation when it was registered."""

    names: tuple[str, ...]  # asked again, a plugin's code could raise
    module: str
    loader: FoundPlugin | None


_operations: dict[type[BaseOperation], _Registered] = {}
_kinds: dict[str, OperationKind] = {}
_kind_owners: dict[str, FoundPlugin | None] = {}
_plugins: list[FoundPlugin] = []
_barred: set[str] = set()
_generation = [0]
_loading: contextvars.ContextVar[FoundPlugin | None] = contextvars.ContextVar(
    "switchax_loading", default=None
)


def generation() -> int:
    """A number that grows with every change; caches of choices depend on it."""
    return _generation[0]


@contextlib.contextmanager
def loading(plugin: FoundPlugin) -> Iterator[None]:
    """Marks a plugin as the one being loaded."""
    token = _loading.set(plugin)
    try:
        yield
    finally:
        _loading.reset(token)


def note_plugins(found: Sequence[FoundPlugin]) -> None:
    """Tells which plugins are installed, so that classes find their owners."""
    with _lock:
        _plugins[:] = found
        _generation[0] += 1


def plugins() -> list[FoundPlugin]:
    """Every plugin that is installed, loaded or not."""
    with _lock:
        return list(_plugins)


def bar(keys: Iterable[str]) -> None:
    """Hides what these plugins define: blocked, or failed."""
    with _lock:
        _barred.clear()
        _barred.update(keys)
        _generation[0] += 1


def add_operation(cls: type[BaseOperation]) -> None:
    """Registers an operation class after checking its declaration.

    Raises:
        RegistrationError: If the class contradicts itself or its kind.
    """
    new = _Registered(check_operation(cls), defining_module(cls), _loading.get())
    with _lock:
        _check_kind(cls)
        for known, old in list(_operations.items()):
            if known is cls or old.names[0] != new.names[0]:
                continue
            origins = (old.module, known.__qualname__), (new.module, cls.__qualname__)
            if origins[0] == origins[1]:  # a module reloaded, a cell run again
                del _operations[known]
            elif _same_plugin(old, new):
                raise RegistrationError(
                    f"{cls.__qualname__}: expected a canonical name of its own, got "
                    f"{new.names[0]!r}, which {known.__module__}."
                    f"{known.__qualname__} of the same plugin has; choose another"
                )
        before = _operations.get(cls)
        if before is not None and before.loader is not None:
            new = dataclasses.replace(new, loader=before.loader)
        _operations[cls] = new
        _generation[0] += 1


def _check_kind(cls: type[BaseOperation]) -> None:
    known = _kinds.get(cls.kind.name)
    if known is not None and known is not cls.kind:
        raise RegistrationError(
            f"{cls.__qualname__}: expected the kind {cls.kind.name!r} of "
            f"{type(known).__module__}, got another of {type(cls.kind).__module__}; "
            "import that one, or give the new kind a name of its own"
        )


def _same_plugin(old: _Registered, new: _Registered) -> bool:
    owner = _owner(old)
    return old.module == new.module if owner is None else owner == _owner(new)


def add_kind(kind: OperationKind) -> None:
    """Registers an operation kind.

    Raises:
        RegistrationError: If it is no kind, or another kind has its name.
    """
    if not isinstance(kind, OperationKind):
        raise RegistrationError(
            f"register kind: expected an OperationKind, got {kind!r}; pass an instance"
        )
    check_kind_name(kind)
    with _lock:
        known = _kinds.setdefault(kind.name, kind)
        if known is not kind:
            raise RegistrationError(
                f"register kind: expected a new name, got {kind.name!r} of "
                f"{type(kind).__module__}, which {type(known).__module__} has; "
                "rename it"
            )
        _kind_owners.setdefault(kind.name, _loading.get())


def remove_operation(cls: type[BaseOperation]) -> None:
    """Takes an operation out again, for tests and notebooks.

    Raises:
        RegistrationError: If a plugin that is being loaded takes out another's.
    """
    with _lock:
        registered, loader = _operations.get(cls), _loading.get()
        if registered is not None and loader not in (None, _owner(registered)):
            raise RegistrationError(
                f"unregister: expected an operation of {loader}, which is being "
                f"loaded, got {cls.__qualname__} of {registered.module}; which plugin "
                "is used is the user's to set"
            )
        _operations.pop(cls, None)
        _generation[0] += 1


def roll_back(plugin: FoundPlugin) -> None:
    """Removes everything that a plugin defined."""
    with _lock:
        for cls, registered in list(_operations.items()):
            if _owner(registered) == plugin:
                del _operations[cls]
        for name, loader in list(_kind_owners.items()):
            if loader == plugin:
                del _kinds[name], _kind_owners[name]
        _generation[0] += 1


def _owner(registered: _Registered) -> FoundPlugin | None:
    """The plugin that an operation belongs to, or None.

    It is the one whose package defines it; where several share that package, the one
    that loaded it, else the one whose files hold the module. A module of no plugin's
    package belongs to the one whose files hold it, else to the one that loaded it.
    """
    module, loader = registered.module, registered.loader
    scores = {plugin: common_parts(module, plugin.module) for plugin in _plugins}
    best = max(scores.values(), default=0)
    if not best:
        return _holder(module) or loader
    nearest = [plugin for plugin, score in scores.items() if score == best]
    if len(nearest) == 1 or loader in nearest:
        return loader if loader in nearest else nearest[0]
    holder = _holder(module)
    return holder if holder in nearest else nearest[0]


def _holder(module: str) -> FoundPlugin | None:
    """The plugin of a shared namespace whose distribution installed a module."""
    top = module.partition(".")[0]
    for plugin in _plugins:
        if plugin.module.partition(".")[0] == top and holds(plugin, module):
            return plugin
    return None


def entries() -> list[Entry]:
    """Returns every operation that may be used, sorted by name and owner."""
    with _lock:
        found = []
        for cls, registered in _operations.items():
            owner = _owner(registered)
            if owner is None:
                package = registered.module.partition(".")[0]
                found.append(Entry(cls, registered.names, package))
            elif owner.key not in _barred:
                found.append(
                    Entry(
                        cls,
                        registered.names,
                        owner.name,
                        owner.distribution,
                        owner.version,
                    )
                )
    return sorted(
        found, key=lambda entry: (entry.name, entry.distribution, entry.plugin)
    )


def kinds() -> dict[str, OperationKind]:
    """Returns the kinds by name."""
    with _lock:
        return dict(_kinds)
