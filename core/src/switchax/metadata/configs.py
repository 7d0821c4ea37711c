"""Explicit configurations: whose each one is, through the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from switchax.checks import brief, fail_type, fail_value
from switchax.errors import (
    ContestedNameError,
    UnknownOperationError,
    UnsupportedError,
)

if TYPE_CHECKING:
    from switchax.operation import BaseOperation

    from .record import OperationMetadata

__all__ = ["check_configs", "config_of", "named_config", "owners_of"]

Operations: TypeAlias = "list[type[BaseOperation]]"


def owners_of(where: str, name: str) -> Operations:
    """Returns the operations that a config's name means.

    Args:
        where: Who was called.
        name: Canonical, qualified, or shared; only a shared one may mean several.

    Raises:
        UnknownOperationError: If nobody has the name.
        ContestedNameError: If it is no shared name, and several claim it.
    """
    from switchax.registry import claimants

    try:
        return [entry.operation for entry in claimants(name)]
    except (UnknownOperationError, ContestedNameError) as error:
        text = str(error).removeprefix("operation: ")
        raise type(error)(f"{where}: {text}") from None


def check_configs(
    where: str, metadata: OperationMetadata, cls: type[BaseOperation] | None = None
) -> None:
    """Checks that every config is of an operation that takes such a one.

    Args:
        where: Who was called.
        metadata: Its `operation_configs` are checked.
        cls: The operation that is created, which need not be registered.

    Raises:
        TypeError: For a config of another class.
        UnknownOperationError: For a name that no operation has.
        ContestedNameError: For a name that several claim.
        ValueError: For an operation that takes no config.
    """
    for name, config in metadata.operation_configs.items():
        field = f"operation_configs[{name!r}]"
        owners = _owners(f"{where}: {field}", name, cls)
        accepted = [c for c in (o.config_class for o in owners) if c is not None]
        if not accepted:
            who = ", ".join(sorted({owner.names()[0] for owner in owners}))
            got = f"{field}, though {who} takes none"
            todo = "leave it out"
            raise fail_value(where, "configs of operations that take one", got, todo)
        if type(config) not in accepted:
            known = " or ".join(sorted({c.__name__ for c in accepted}))
            got, todo = f"{field}={brief(config)}", f"pass {known}(...)"
            raise fail_type(where, f"a {known}", got, todo)


def _owners(where: str, name: str, cls: type[BaseOperation] | None) -> Operations:
    if cls is None or name not in cls.names():
        return owners_of(where, name)
    try:
        return [cls, *owners_of(where, name)]
    except UnknownOperationError:  # cls is not registered
        return [cls]


def config_of(cls: type[BaseOperation], metadata: OperationMetadata) -> Any:
    """Returns the config of an operation, by any of its names, or None."""
    configs = metadata.operation_configs
    if not configs or cls.config_class is None:
        return None
    qualified = [name for name in configs if ":" in name]
    mine = [name for name in qualified if cls in owners_of("operation_configs", name)]
    for name in (*mine, *cls.names()):
        if type(configs.get(name)) is cls.config_class:
            return configs[name]
    return None


def named_config(metadata: OperationMetadata, name: Any) -> Any:
    """Returns the config of a named operation; see `get_operation_config`."""
    from switchax.registry import find_entry
    from switchax.target import current_target

    where = "get_operation_config"
    if not isinstance(name, str):
        got = f"impl_name={brief(name)}"
        raise fail_type(where, "the name of an operation", got, "for example 'sdpa'")
    owners = owners_of(where, name)
    check_configs(where, metadata)
    if len(owners) == 1:
        return config_of(owners[0], metadata)
    try:
        owner = find_entry(name, current_target(backend=metadata.backend))
    except UnsupportedError:  # nobody's here; a program for elsewhere may ask
        return metadata.operation_configs.get(name)
    return config_of(owner.operation, metadata)
