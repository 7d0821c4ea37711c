"""`OperationMetadata` as JSON data, and back from data of any origin."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from switchax.checks import brief, fail_type, fail_value

from .fields import CONFIG_NAMES, checked

if TYPE_CHECKING:
    from .record import OperationMetadata

__all__ = ["from_data", "to_data", "to_text"]

_PLAIN = (
    "runtime_dtype",
    "runtime_softmax_dtype",
    "sequence_axis_name",
    "platform",
    "backend",
)
_DEEPEST = 16
_TODO = "pass what to_dict returned"


def to_data(metadata: OperationMetadata, own: Mapping[str, Any]) -> dict[str, Any]:
    """Describes metadata; see `OperationMetadata.to_dict`.

    Args:
        metadata: What to describe.
        own: Attributes beside the fields, which JSON has no place for.
    """
    where = f"{type(metadata).__name__}.to_dict"
    if own:
        got = f"the attribute {min(own)!r}"
        raise fail_type(where, "fields only", got, "describe it in your own JSON")
    kept = vars(metadata)
    data: dict[str, Any] = {}
    for name in _PLAIN:
        value = kept[f"_{name}"] if f"_{name}" in kept else kept[name]
        if isinstance(value, np.dtype):
            value = value.name
        elif isinstance(value, tuple):
            value = list(value)
        if value is not None:
            data[name] = value
    if kept["_partition_manager"] is not None:
        data["partition_manager"] = kept["_partition_manager"].to_dict()
    elif kept["_partition_axis"] is not None:
        axis = metadata.partition_manager.to_dict()  # refuses one of a subclass
        data["partition_axis"] = axis["paxis"]
    configs = metadata.operation_configs
    if configs:
        data["operation_configs"] = {
            name: _config_data(f"{where}: operation_configs[{name!r}]", name, config)
            for name, config in configs.items()
        }
    return data


def to_text(data: Mapping[str, Any], indent: int | None) -> str:
    """Returns JSON text of `to_data`'s data."""
    return json.dumps(data, indent=indent, allow_nan=False)


def _config_data(where: str, name: str, config: Any) -> dict[str, Any]:
    from switchax.registrations import entries

    from .configs import owners_of

    owners = [o for o in owners_of(where, name) if o.config_class is type(config)]
    if not owners:
        got, todo = brief(config), "pass an instance of its config_class"
        raise fail_value(where, "a config of the operation", got, todo)
    entry = next(entry for entry in entries() if entry.operation is owners[0])
    values = {
        field.name: _json(where, field.name, getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.init
    }
    return {"operation": entry.qualified, "values": values}


def _json(where: str, name: str, value: Any, depth: int = 0) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, tuple) and depth < _DEEPEST:
        return [_json(where, name, member, depth + 1) for member in value]
    if _is_scalar(value):
        return value
    got, todo = f"{name}={brief(value)}", "use finite numbers, str, bool, None, tuples"
    raise fail_type(where, "JSON data", got, todo)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**63
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str)


def from_data(where: str, data: Any, cls: type[OperationMetadata]) -> dict[str, Any]:
    """Reads and checks data of any origin.

    Args:
        where: Who was called.
        data: What should be `to_data`'s.
        cls: What the data is to become.

    Returns:
        Arguments that make it, all of them legal.

    Raises:
        TypeError: If data is no mapping.
        ValueError: For anything else that `to_data` would not return.
    """
    from switchax.partition.document import check_members

    known = [name for name in CONFIG_NAMES if name != "mesh"]
    check_members(where, data, dict.fromkeys(known))
    both = ("partition_axis", "partition_manager")
    if all(data.get(name) is not None for name in both):
        rule = "a partition_axis or a partition_manager, which brings one"
        raise fail_value(where, rule, "both", _TODO)
    arguments = {}
    for name, value in data.items():
        if name in _PLAIN:
            value = _plain(where, name, value)
        elif name == "operation_configs":
            value = _configs(where, value)
        elif value is not None and not isinstance(value, Mapping):
            got = f"{name}={brief(value)}"
            raise fail_value(where, f"{name} to be a mapping", got, _TODO)
        arguments[name] = value
    try:
        for name, value in arguments.items():
            arguments[name] = checked(where, name, name, value)
    except TypeError as error:
        raise ValueError(str(error)) from None
    return arguments


def _plain(where: str, name: str, value: Any) -> Any:
    """A name, or None; or a list of names for the sequence axis."""
    is_list = name == "sequence_axis_name" and isinstance(value, list | tuple)
    for member in value if is_list else (value,):
        if not isinstance(member, str) and (is_list or member is not None):
            got = f"{name}={brief(value)}"
            raise fail_value(where, f"{name} to be a name", got, _TODO)
    return value


def _configs(where: str, data: Any) -> dict[str, Any]:
    if data is None:
        return {}
    if not isinstance(data, Mapping):
        got = f"operation_configs={brief(data)}"
        raise fail_value(where, "operation_configs to be a mapping", got, _TODO)
    configs = {}
    for name, described in data.items():
        if not isinstance(name, str):
            got = f"operation_configs with the key {brief(name)}"
            raise fail_value(where, "names of operations", got, _TODO)
        at = f"{where}: operation_configs[{name[:40]!r}]"
        configs[name] = _config(at, name, described)
    return configs


def _config(where: str, name: str, data: Any) -> Any:
    """Makes a config by the class that an installed operation declares."""
    from .configs import owners_of

    members = data if isinstance(data, Mapping) else {}
    operation, values = members.get("operation"), members.get("values")
    is_described = isinstance(operation, str) and isinstance(values, Mapping)
    if not is_described or values is None or len(members) != 2:
        got = f"{brief(data)}"
        raise fail_value(where, "{'operation': name, 'values': {...}}", got, _TODO)
    owners = owners_of(where, name)
    meant = [o for o in owners_of(where, str(operation)) if o in owners]
    config_class = meant[0].config_class if len(meant) == 1 else None
    if config_class is None:
        got = f"operation={str(operation)[:40]!r}"
        todo = f"pass the qualified name of an operation that {name!r} means"
        raise fail_value(where, "an operation with a config_class", got, todo)
    from switchax.partition.document import check_members

    arguments = dataclasses.fields(config_class)
    known = {field.name: None for field in arguments if field.init}
    check_members(where, values, known)
    frozen = {key: _frozen(where, key, values[key]) for key in known if key in values}
    try:
        config = config_class(**frozen)
        hash(config)
    except (TypeError, ValueError, OverflowError) as error:
        got = f"{str(error)[:200]!r} ({type(error).__name__})"
        rule = f"values of {config_class.__name__}"
        raise fail_value(where, rule, got, _TODO) from None
    return config


def _frozen(where: str, name: str, value: Any, depth: int = 0) -> Any:
    if isinstance(value, list | tuple) and depth < _DEEPEST:
        return tuple(_frozen(where, name, member, depth + 1) for member in value)
    if _is_scalar(value):
        return value
    raise fail_value(where, "JSON data", f"{name}={brief(value)}", _TODO)
