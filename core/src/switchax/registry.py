"""`OperationRegistry`: names and what they mean here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from . import registrations
from .checks import as_metadata, brief, fail_type, fail_value
from .errors import (
    ContestedNameError,
    RegistrationError,
    UnknownOperationError,
    UnsupportedError,
    described,
    house_message,
    near_miss,
)
from .kind import OperationKind
from .loading import PluginRecord, ensure_loaded, is_loading
from .matching import availability
from .metadata import OperationMetadata
from .operation import BaseOperation
from .registrations import Entry
from .settings import normalised
from .target import Target, current_target

__all__ = [
    "HOW_TO_INSTALL",
    "OperationRegistry",
    "check_keeps_metadata",
    "claimants",
    "contested_names",
    "create_from",
    "find_entry",
    "find_kind",
]

HOW_TO_INSTALL = (
    "pip install switchax-vanilla switchax-sdpa switchax-chunked, or of a clone "
    "./plugins/vanilla ./plugins/sdpa ./plugins/chunked"
)

# Where operations of this repository come from, for the advice in errors alone.
_OURS = {
    "vanilla": "switchax-vanilla",
    "sdpa": "switchax-sdpa",
    "cudnn": "switchax-sdpa",
    "chunked": "switchax-chunked",
}

Operation = TypeVar("Operation", bound=BaseOperation)


class OperationRegistry:
    """The operations of every installed plugin, by name.

    Canonical and shared names live in one namespace. A name that several operations
    claim means none of them; `plugin:operation` means one, `distribution:operation`
    where two plugins are called alike. Nothing is
    discovered before the first question.
    """

    @staticmethod
    def register(cls: type[Operation]) -> type[Operation]:
        """Registers an operation class; used as a decorator.

        Args:
            cls: A subclass of `BaseOperation`.

        Returns:
            The class itself.

        Raises:
            RegistrationError: If its declaration contradicts itself or its kind.
        """
        registrations.add_operation(cls)
        return cls

    @staticmethod
    def unregister(cls: type[BaseOperation]) -> None:
        """Takes an operation class out again, for tests and notebooks.

        Args:
            cls: The class; one that is not registered is passed over.

        Raises:
            TypeError: If it is no operation class.
        """
        if not (isinstance(cls, type) and issubclass(cls, BaseOperation)):
            rule, todo = "a subclass of BaseOperation", "pass the class, not its name"
            raise fail_type("unregister", rule, repr(cls), todo)
        registrations.remove_operation(cls)

    @staticmethod
    def get(name: str) -> type[BaseOperation]:
        """Returns the class that a name means on the current target.

        Args:
            name: Canonical or shared name, or `plugin:operation`.

        Raises:
            UnknownOperationError: If no operation has the name.
            ContestedNameError: If several claim it.
            UnsupportedError: If it is shared and none of its owners supports the
                target.
        """
        return find_entry(name, current_target()).operation

    @staticmethod
    def create(name: str, metadata: OperationMetadata | None = None) -> BaseOperation:
        """Returns an instance of the operation that a name means.

        Args:
            name: As in `get`.
            metadata: Handed to the operation; its backend counts as the target.

        Raises:
            TypeError: If metadata is none.
            RegistrationError: If the operation cannot be created, by its own fault.
        """
        metadata = as_metadata("create", metadata)
        target = current_target(backend=metadata.backend)
        return create_from(find_entry(name, target), metadata)

    @staticmethod
    def list_implementations(kind: str | OperationKind | None = None) -> list[str]:
        """Returns the names that can be used now, canonical and shared, sorted.

        Args:
            kind: Only operations of this kind, by name or itself; None for all.

        Raises:
            TypeError: If kind is neither.
            ValueError: If no plugin brings a kind of the name.
        """
        ensure_loaded()
        wanted = None if kind is None else find_kind("list_implementations", kind)
        target = current_target()
        usable = []
        entries = registrations.entries()  # once: others may come and go meanwhile
        for name in {name for entry in entries for name in entry.names}:
            try:
                entry = find_entry(name, target, entries=entries)
            except (ContestedNameError, UnsupportedError):
                continue
            if availability(entry.operation, target):
                continue
            if wanted is None or entry.operation.kind is wanted:
                usable.append(name)
        return sorted(usable)

    @staticmethod
    def explain(*args: Any, **kwargs: Any) -> Any:
        """Explains a choice; see `switchax.explain`."""
        from .explanation import explain

        return explain(*args, **kwargs)


def find_kind(where: str, kind: Any) -> OperationKind:
    """Returns the kind of a name, or the kind itself.

    Args:
        where: Who was called, for messages.
        kind: A name or an instance.

    Raises:
        TypeError: If it is neither.
        ValueError: If no plugin brings a kind of the name.
    """
    if isinstance(kind, OperationKind):
        return kind
    if not isinstance(kind, str):
        got = f"kind={brief(kind)}"
        raise fail_type(where, "kind to be a name", got, "for example 'attention'")
    ensure_loaded()
    known = registrations.kinds()
    if kind not in known:
        rule = f"a kind of {', '.join(sorted(known))}"
        got = f"kind={kind!r}{near_miss(kind, known)}"
        raise fail_value(where, rule, got, "install the plugin that brings it")
    return known[kind]


def find_entry(
    name: str,
    target: Target,
    kind: str | None = None,
    entries: Sequence[Entry] | None = None,
) -> Entry:
    """Returns the one operation that a name means on a target.

    Args:
        name: Canonical or shared name, or `plugin:operation`.
        target: The device, which decides who answers to a shared name.
        kind: The kind that is called; an operation of another is an error.
        entries: What is registered; None is what is now.

    Raises:
        TypeError: If the name is no str.
        UnknownOperationError: If nobody has it, or it is of another kind.
        ContestedNameError: If several claim it.
        UnsupportedError: If it is shared and no owner supports the target.
    """
    if not isinstance(name, str):
        raise TypeError(
            f"operation: expected a name or a sequence of names, got {name!r}; "
            "pass a str such as 'auto' or 'sdpa'"
        )
    records = ensure_loaded()
    entries = registrations.entries() if entries is None else entries
    entry = _find(name.strip(), target, records, entries)
    if kind is not None and entry.operation.kind.name != kind:
        raise UnknownOperationError(
            f"operation: expected an operation of kind {kind!r}, got {name!r} of kind "
            f"{entry.operation.kind.name!r}; see `switchax list`"
        )
    return entry


def create_from(entry: Entry, metadata: OperationMetadata | None) -> BaseOperation:
    """Returns an instance of an operation; says whose fault it is if there is none.

    Raises:
        RegistrationError: If its `__init__` raises something but an error of its own
            in the house form, or keeps no metadata.
    """
    try:
        operation = entry.operation(metadata)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        got = described(error)
        is_its_own = got.partition(": ")[2].startswith(f"{entry.name}: ")
        if isinstance(error, Exception) and is_its_own:
            raise
        got = f"{got} from __init__"
        todo = "upgrade or block its plugin"
        rule = "an operation that can be created"
        text = house_message(entry.qualified, rule, got, todo)
        raise RegistrationError(text) from error
    check_keeps_metadata(entry.qualified, operation)
    return operation


def check_keeps_metadata(where: str, operation: BaseOperation) -> None:
    """Raises a RegistrationError if an instance's `__init__` left its base's out."""
    if not isinstance(getattr(operation, "metadata", None), OperationMetadata):
        rule, got = "an operation that keeps its metadata", "one that does not"
        todo = "its __init__ must call super().__init__(metadata)"
        raise RegistrationError(house_message(where, rule, got, todo))


def claimants(name: str) -> list[Entry]:
    """Returns every operation that a name may mean, whatever the target.

    Args:
        name: Canonical or shared name, or `plugin:operation`.

    Raises:
        UnknownOperationError: If no operation has the name.
        ContestedNameError: If it is no shared name, and several claim it.
    """
    records = ensure_loaded()
    entries, name = registrations.entries(), name.strip()
    if ":" in name:
        found = _qualified(name, entries)
    else:
        found = [entry for entry in entries if name in entry.names]
    if not found:
        raise UnknownOperationError(_unknown(name, entries, records))
    owned = ":" in name or any(entry.name == name for entry in found)
    if len(found) > 1 and owned:
        raise ContestedNameError(_contested(name, found, ""))
    return found


def _find(
    name: str,
    target: Target,
    records: dict[str, PluginRecord],
    entries: Sequence[Entry],
) -> Entry:
    if ":" in name:
        claimants = _qualified(name, entries)
        if len(claimants) == 1:
            return claimants[0]
    else:
        claimants = [entry for entry in entries if name in entry.names]
    if not claimants:
        raise UnknownOperationError(_unknown(name, entries, records))
    owners = [entry for entry in claimants if entry.name == name]
    if len(claimants) == 1 and owners:
        return claimants[0]
    if owners or ":" in name:
        raise ContestedNameError(_contested(name, claimants, ""))
    fitting = [e for e in claimants if not availability(e.operation, target)]
    if not fitting:
        refusals = {
            entry.qualified: availability(entry.operation, target)
            for entry in claimants
        }
        reasons = "; ".join(f"{who}: {why[0]}" for who, why in refusals.items())
        raise UnsupportedError(
            f"operation: expected an owner of the shared name {name!r} on {target}, "
            f"got none; {reasons}",
            refusals,
        )
    if len(fitting) > 1:
        raise ContestedNameError(_contested(name, fitting, f" on {target}"))
    return fitting[0]


def _qualified(name: str, entries: Sequence[Entry]) -> list[Entry]:
    plugin, _, operation = name.partition(":")
    wanted = normalised(plugin)
    matches = [
        entry
        for entry in entries
        if operation in entry.names
        and wanted in (normalised(entry.plugin), normalised(entry.distribution))
    ]
    canonical = [entry for entry in matches if entry.name == operation]
    return canonical or matches


def _spellings(entries: Sequence[Entry]) -> str:
    """Qualified names that tell the entries apart."""
    spellings = []
    for entry in entries:
        alone = _qualified(entry.qualified, entries) == [entry]
        who = entry.plugin if alone or not entry.distribution else entry.distribution
        origin = (
            f" of {entry.distribution} {entry.version}" if entry.distribution else ""
        )
        spellings.append(f"'{who}:{entry.name}'{origin}")
    return " and ".join(spellings)


def _contested(name: str, claimants: list[Entry], where: str) -> str:
    return (
        f"operation: expected one owner of {name!r}{where}, got {len(claimants)}: "
        f"{_spellings(claimants)}; use a qualified name, or block one plugin"
    )


def _unknown(
    name: str, entries: Sequence[Entry], records: dict[str, PluginRecord]
) -> str:
    known = sorted({known for entry in entries for known in entry.names})
    if ":" in name:
        known = sorted({entry.qualified for entry in entries})
    got = f"{name!r}{near_miss(name, known)}"
    if not known:
        there = "loaded" if records else "installed"
        text = f"operation: expected an operation, got {got} and none {there}"
        text += f"; {HOW_TO_INSTALL}" if not records else ""
    else:
        text = f"operation: expected one of {', '.join(known)}, got {got}"
        ours = _OURS.get(name)
        if any(record.plugin.distribution == ours for record in records.values()):
            ours = None  # it is there; what keeps it out is said below
        text += f"; install {ours}" if ours else "; see `switchax list`"
    return text + unloaded_note(records)


def unloaded_note(records: dict[str, PluginRecord]) -> str:
    """Says which plugins were not loaded and why, or ""."""
    missing = [str(record) for record in records.values() if record.status != "loaded"]
    if is_loading():
        missing.append(
            "plugins after the one that asks while it is imported; ask later"
        )
    return "".join(f"\n  not loaded: {text}" for text in missing)


def contested_names() -> dict[str, str]:
    """Returns each contested canonical name with the message its use would give."""
    ensure_loaded()
    entries = registrations.entries()
    contested = {}
    for name in sorted({entry.name for entry in entries}):
        claimants = [entry for entry in entries if name in entry.names]
        if len(claimants) > 1:
            contested[name] = _contested(name, claimants, "")
    return contested
