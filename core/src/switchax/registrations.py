"""What is registered, and who owns it: the state behind the registry.

Ownership follows the package that defines a class, not who imported it.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import threading
from collections.abc import Iterable, Iterator, Sequence

from .declaration import check_operation
from .discovery import FoundPlugin
from .errors import RegistrationError
from .kind import OperationKind
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
_operations: dict[type[BaseOperation], FoundPlugin | None] = {}
# As they were when it was registered: asked again, a plugin's code could raise.
_names: dict[type[BaseOperation], tuple[str, ...]] = {}
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
    names = check_operation(cls)
    with _lock:
        for known, loader in list(_operations.items()):
            if known is cls or _names[known][0] != names[0]:
                continue
            if _origin(known) == _origin(cls):  # a module reloaded, a cell run again
                _forget(known)
            elif _same_plugin(known, loader, cls):
                raise RegistrationError(
                    f"{cls.__qualname__}: expected a canonical name of its own, got "
                    f"{names[0]!r}, which {known.__module__}."
                    f"{known.__qualname__} of the same plugin has; choose another"
                )
        _operations.setdefault(cls, _loading.get())
        _names[cls] = names
        _generation[0] += 1


def _forget(cls: type[BaseOperation]) -> None:
    _operations.pop(cls, None)
    _names.pop(cls, None)


def _origin(cls: type[BaseOperation]) -> tuple[str, str]:
    return cls.__module__, cls.__qualname__


def _same_plugin(
    known: type[BaseOperation], loader: FoundPlugin | None, cls: type[BaseOperation]
) -> bool:
    owner = _owner(known.__module__, loader)
    if owner is None:
        return known.__module__ == cls.__module__
    return owner == _owner(cls.__module__, _loading.get())


def add_kind(kind: OperationKind) -> None:
    """Registers an operation kind.

    Raises:
        RegistrationError: If it is no kind, or another kind has its name.
    """
    if not isinstance(kind, OperationKind):
        raise RegistrationError(
            f"register kind: expected an OperationKind, got {kind!r}; pass an instance"
        )
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
    """Takes an operation out again, for tests and notebooks."""
    with _lock:
        _forget(cls)
        _generation[0] += 1


def roll_back(plugin: FoundPlugin) -> None:
    """Removes everything that a plugin defined."""
    with _lock:
        for cls, loader in list(_operations.items()):
            if _owner(cls.__module__, loader) == plugin:
                _forget(cls)
        for name, loader in list(_kind_owners.items()):
            if loader == plugin:
                del _kinds[name], _kind_owners[name]
        _generation[0] += 1


def _owner(module: str, loader: FoundPlugin | None) -> FoundPlugin | None:
    """The plugin whose package defines a module; among equals the one loading it.

    A module of no plugin's package belongs to the plugin that loaded it.
    """
    best, best_score = None, 0
    for plugin in _plugins:
        score = _common_parts(module, plugin.module)
        if score > best_score or (score == best_score and score and plugin == loader):
            best, best_score = plugin, score
    return best if best is not None else loader


def _common_parts(left: str, right: str) -> int:
    count = 0
    for a, b in zip(left.split("."), right.split("."), strict=False):
        if a != b:
            break
        count += 1
    return count


def entries() -> list[Entry]:
    """Returns every operation that may be used, sorted by name and owner."""
    with _lock:
        found = []
        for cls, loader in _operations.items():
            owner = _owner(cls.__module__, loader)
            if owner is None:
                package = cls.__module__.partition(".")[0]
                found.append(Entry(cls, _names[cls], package))
            elif owner.key not in _barred:
                found.append(
                    Entry(
                        cls,
                        _names[cls],
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
