"""The fields of `OperationMetadata`: what each may be, and what it is kept as."""

from __future__ import annotations

import contextlib
import enum
import types
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from switchax.axes import NOT_GIVEN, AxisType
from switchax.checks import brief, fail_type, fail_value
from switchax.errors import near_miss
from switchax.target import PLATFORMS, gpu_vendor

if TYPE_CHECKING:
    from switchax.partition import PartitionAxis, PartitionManager
    from switchax.sharding import AnyMesh

__all__ = ["CHECKS", "CONFIG_NAMES", "DEVICES", "checked", "from_config"]

CONFIG_NAMES: Mapping[str, str] = types.MappingProxyType(
    {
        "runtime_dtype": "attn_dtype",
        "runtime_softmax_dtype": "attn_softmax_dtype",
        "sequence_axis_name": "sequence_axis_name",
        "platform": "platform",
        "backend": "backend",
        "partition_axis": "partition_axis",
        "partition_manager": "partition_manager",
        "mesh": "mesh",
        "operation_configs": "operation_configs",
    }
)
"""Each field, and what it is called in a model's configuration."""

DEVICES = tuple(sorted(PLATFORMS | {"gpu"}))
LANGUAGES = ("jax", "pallas", "triton")
_FLOATS = ("bfloat16", "float16", "float32", "float64")
_DTYPES = {name: jnp.dtype(name) for name in _FLOATS}
_SHORT = {"f2": "float16", "f4": "float32", "f8": "float64"}


def from_config(config: Any, name: str) -> Any:
    """Returns what a configuration calls name, or `NOT_GIVEN`.

    Args:
        config: A mapping, whose keys count, or an object, whose attributes do.
        name: The key or attribute. A property that raises AttributeError is missing;
            another error is not caught.
    """
    if isinstance(config, Mapping):
        return config.get(name, NOT_GIVEN)
    return getattr(config, name, NOT_GIVEN)


def checked(where: str, field: str, label: str, value: Any) -> Any:
    """Returns the value of a field as it is kept; None is the default.

    Args:
        where: Who was called.
        field: The field.
        label: What the caller calls it.
        value: What was given, or `NOT_GIVEN`.

    Raises:
        TypeError: For a value of another type.
        ValueError: For an unknown value.
    """
    if value is None or value is NOT_GIVEN:
        return _DEFAULTS.get(field)
    return CHECKS[field](where, label, value)


def _dtype(where: str, label: str, value: Any) -> np.dtype[Any]:
    known = ", ".join(_FLOATS)
    if isinstance(value, str):
        name = _SHORT.get(value, value)
        if name not in _DTYPES:
            got = f"{label}={value[:40]!r}{near_miss(value[:40], _FLOATS)}"
            raise fail_type(where, "a floating dtype", got, f"pass one of {known}")
    else:
        name = ""
        if isinstance(value, type | np.dtype):  # and no array, which has one
            with contextlib.suppress(TypeError, ValueError):
                name = np.dtype(value).name
        if name not in _DTYPES:
            got = f"{label}={brief(value)}"
            raise fail_type(where, "a floating dtype", got, f"pass one of {known}")
    return _DTYPES[name]


def _axis(where: str, label: str, value: Any) -> AxisType:
    names = value if isinstance(value, list | tuple) else (value,)
    for name in names:
        if not isinstance(name, str):
            got = f"{label}={brief(value)}"
            todo = "pass a mesh axis such as 'sp', or a tuple of them"
            raise fail_type(where, f"{label} to name a mesh axis", got, todo)
    if not names or "" in names:
        got, todo = f"{label}={value!r}", "leave it out for the one of partition_axis"
        raise fail_value(where, f"{label} to name a mesh axis", got, todo)
    if len(set(names)) < len(names):
        got, todo = f"{label}={brief(value)}", "name each axis once"
        raise fail_value(where, f"{label} to name different mesh axes", got, todo)
    plain = tuple(map(str.__str__, names))  # an enumeration's member is its value
    return plain if isinstance(value, list | tuple) else plain[0]


def _name(where: str, label: str, value: Any, known: tuple[str, ...]) -> str:
    plain = value.value if isinstance(value, enum.Enum) else value
    todo = "pass one of " + ", ".join(known)
    if not isinstance(plain, str):
        raise fail_type(where, f"{label} to be a str", f"{label}={brief(value)}", todo)
    name = plain.strip().lower()
    if name not in known:
        got = f"{label}={plain[:40]!r}{near_miss(name[:40], known)}"
        raise fail_value(where, f"a known {label}", got, todo)
    return name


def _backend(where: str, label: str, value: Any) -> str:
    return device(_name(where, label, value, DEVICES))


def is_device(value: Any) -> bool:
    """Returns whether a platform is one of devices, and so means a backend."""
    plain = value.value if isinstance(value, enum.Enum) else value
    return isinstance(plain, str) and plain.strip().lower() in DEVICES


def device(name: str) -> str:
    """Returns a device platform, "gpu" resolved to its vendor."""
    return gpu_vendor() if name == "gpu" else name


def _platform(where: str, label: str, value: Any) -> str:
    return _name(where, label, value, (*LANGUAGES, *DEVICES))


def _partition_axis(where: str, label: str, value: Any) -> PartitionAxis:
    from switchax.partition import PartitionAxis

    if isinstance(value, Mapping):
        return PartitionAxis.from_dict(value)
    if not isinstance(value, PartitionAxis):
        got = f"{label}={brief(value)}"
        raise fail_type(where, "a PartitionAxis", got, "pass PartitionAxis(...)")
    return value


def _partition_manager(where: str, label: str, value: Any) -> PartitionManager:
    from switchax.partition import PartitionManager

    if isinstance(value, Mapping):
        return PartitionManager.from_dict(value, is_last_made=False)
    if not isinstance(value, PartitionManager):
        got = f"{label}={brief(value)}"
        todo = "pass PartitionManager(PartitionAxis())"
        raise fail_type(where, "a PartitionManager", got, todo)
    return value


def _mesh(where: str, label: str, value: Any) -> AnyMesh:
    if not isinstance(value, Mesh | AbstractMesh):
        got = f"{label}={brief(value)}"
        raise fail_type(where, "a Mesh or AbstractMesh", got, "see jax.make_mesh")
    return value


def _configs(where: str, label: str, value: Any) -> Mapping[str, Any]:
    todo = "pass {'name': config}"
    if not isinstance(value, Mapping):
        rule, got = "a mapping from operation name to config", f"{label}={brief(value)}"
        raise fail_type(where, rule, got, todo)
    for name, config in value.items():
        if not isinstance(name, str):
            got = f"{label} with the key {brief(name)}"
            raise fail_type(where, "names of operations", got, todo)
        try:
            hash(config)  # would fail later, deep inside jit
        except TypeError:
            got = f"{label}[{name!r}]={brief(config)}, which cannot be hashed"
            todo = "pass an instance of the operation's config_class"
            raise fail_type(where, "frozen configs", got, todo) from None
    kept = {name: config for name, config in value.items() if config is not None}
    return types.MappingProxyType(kept)


CHECKS: Mapping[str, Callable[[str, str, Any], Any]] = types.MappingProxyType(
    {
        "runtime_dtype": _dtype,
        "runtime_softmax_dtype": _dtype,
        "sequence_axis_name": _axis,
        "platform": _platform,
        "backend": _backend,
        "partition_axis": _partition_axis,
        "partition_manager": _partition_manager,
        "mesh": _mesh,
        "operation_configs": _configs,
    }
)
_DEFAULTS: Mapping[str, Any] = types.MappingProxyType(
    {
        "runtime_softmax_dtype": _DTYPES["float32"],
        "operation_configs": types.MappingProxyType({}),
    }
)
