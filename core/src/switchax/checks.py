"""Checks of arguments that every kind needs, each with an error in the house form."""

from __future__ import annotations

import math
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .errors import house_message, near_miss
from .target import first_device

if TYPE_CHECKING:
    from .metadata import OperationMetadata

__all__ = [
    "as_array",
    "as_bool",
    "as_metadata",
    "as_number",
    "brief",
    "check_choice",
    "check_devices",
    "check_keywords",
    "fail_type",
    "fail_value",
    "is_integer",
    "unwrapped",
]


def fail_value(where: str, rule: str, got: str, todo: str) -> ValueError:
    """Builds the ValueError of a wrong value."""
    return ValueError(house_message(where, rule, got, todo))


def fail_type(where: str, rule: str, got: str, todo: str) -> TypeError:
    """Builds the TypeError of a wrong type."""
    return TypeError(house_message(where, rule, got, todo))


def check_keywords(
    where: str,
    given: Iterable[str],
    known: Sequence[str],
    elsewhere: Mapping[str, str] = types.MappingProxyType({}),
) -> None:
    """Raises a TypeError with the near miss for a keyword nobody knows.

    Args:
        where: Who was called.
        given: The keywords.
        known: Those that there are.
        elsewhere: What other libraries call some of them.
    """
    for name in given:
        if name not in known:
            ours = elsewhere.get(name)
            is_here = ours in known
            meant = f" (here it is {ours!r})" if is_here else near_miss(name, known)
            raise fail_type(
                where,
                "keywords of the contract",
                f"unknown keyword {name!r}{meant}",
                f"known are {', '.join(known)}",
            )


def check_choice(where: str, name: str, value: Any, known: Sequence[str]) -> str:
    """Returns value if it is one of the known strings, else raises."""
    if not isinstance(value, str):
        raise fail_type(
            where, f"{name} to be a str", f"{name}={value!r}", _one_of(known)
        )
    if value not in known:
        got = f"{name}={value!r}{near_miss(value, known)}"
        raise fail_value(where, f"a known {name}", got, _one_of(known))
    return value


def _one_of(known: Sequence[str]) -> str:
    return "pass one of " + ", ".join(map(repr, known))


def as_bool(where: str, name: str, value: Any) -> bool:
    """Returns a static bool, or raises a TypeError."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise fail_type(
        where,
        f"{name} to be a static bool",
        f"{name}={brief(value)}",
        "pass True or False; it decides what is compiled",
    )


def as_metadata(where: str, metadata: Any) -> OperationMetadata:
    """Returns the metadata, the default for None, or raises a TypeError."""
    from .metadata import OperationMetadata  # which imports this module

    if metadata is None:
        return OperationMetadata()
    if isinstance(metadata, OperationMetadata):
        _check_comparison(where, type(metadata), OperationMetadata)
        return metadata
    rule, got = "metadata to be an OperationMetadata", f"metadata={brief(metadata)}"
    raise fail_type(where, rule, got, "pass OperationMetadata(...)")


def _check_comparison(where: str, cls: type, base: type) -> None:
    """Refuses a subclass whose instances a program could not tell apart."""
    name = cls.__qualname__
    if any(getattr(cls, n) is not getattr(base, n) for n in ("__eq__", "__hash__")):
        todo = f"make {name} a dataclass with eq=False"
        raise fail_type(where, "metadata compared as its base is", name, todo)
    if any(vars(c).get("__slots__") for c in cls.__mro__[: cls.__mro__.index(base)]):
        todo = f"leave __slots__ out of {name}"
        raise fail_type(where, "metadata with its attributes in __dict__", name, todo)


def as_number(where: str, name: str, value: Any, todo: str) -> float:
    """Returns a static finite float, or raises.

    Args:
        where: Who was called.
        name: The argument.
        value: A number, or a concrete array of one number.
        todo: What to do about a traced value.
    """
    if isinstance(value, bool | np.bool_) or not _is_number(value):
        got = f"{name}={brief(value)}"
        raise fail_type(where, f"{name} to be a static real number", got, todo)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        got = f"{name}={number}"
        raise fail_value(where, f"{name} to be finite", got, "pass a finite number")
    return number


def _is_number(value: Any) -> bool:
    """Whether it is one real number, known when the program is compiled."""
    if isinstance(value, jax.core.Tracer | np.ma.MaskedArray | np.timedelta64):
        return False
    if isinstance(value, int | float | np.number):
        return not np.iscomplexobj(value)
    if not isinstance(value, np.ndarray | jax.Array) or value.ndim:
        return False
    # Numpy takes a time difference for an integer; bfloat16 only JAX for a number.
    integer = jnp.issubdtype(value.dtype, jnp.integer) and value.dtype.kind != "m"
    return integer or bool(jnp.issubdtype(value.dtype, jnp.floating))


def is_integer(value: Any) -> bool:
    """Whether it is one whole number, of Python or numpy, known beforehand."""
    whole = isinstance(value, int | np.integer)
    return whole and not isinstance(value, bool | np.timedelta64)


def as_array(where: str, name: str, value: Any, todo: str = "") -> Any:
    """Returns a JAX array or tracer, or raises for anything else.

    Args:
        where: Who was called.
        name: The argument.
        value: An array of JAX or numpy, or what makes itself one.
        todo: What to do about something else; by default, to make it an array.

    Raises:
        TypeError: For what is no array, or one that JAX cannot hold as it is.
        ValueError: For an array that was deleted or donated.
    """
    value = unwrapped(value)
    if isinstance(value, jax.Array):
        _check_alive(where, name, value)
        return value
    if isinstance(value, np.ma.MaskedArray):
        got = f"{name}, which is a masked array of numpy"
        todo = f"its mask would be lost: pass {name}.filled(...), and hide keys by mask"
        raise fail_type(where, f"{name} to be an array", got, todo)
    if isinstance(value, np.ndarray | np.generic):
        try:
            return jnp.asarray(value)
        except (TypeError, ValueError):
            first_device()  # raises what it was, if JAX cannot start
            got = f"{name} of dtype {value.dtype}"
            todo = todo or "cast it, for example to float32"
            rule = f"{name} to be of a dtype that JAX has"
            raise fail_type(where, rule, got, todo) from None
    raise fail_type(
        where,
        f"{name} to be an array",
        f"{name}={brief(value)}",
        todo or f"pass {name}=jnp.asarray(...)",
    )


def unwrapped(value: Any) -> Any:
    """Returns what an object makes of itself for JAX, or the value as it is."""
    if not isinstance(value, jax.Array) and hasattr(value, "__jax_array__"):
        return value.__jax_array__()
    return value


def _check_alive(where: str, name: str, array: jax.Array) -> None:
    if not isinstance(array, jax.core.Tracer) and array.is_deleted():
        got = f"{name}, which was deleted or donated"
        todo = "keep a copy, or do not donate it"
        raise fail_value(where, f"{name} to be an array", got, todo)


def brief(value: Any) -> str:
    """Returns the value and its type, cut to a length that fits an error."""
    if isinstance(value, jax.core.Tracer):
        return f"a traced {jax.typeof(value)}"
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested deeply, or an int of many digits
        return f"one of type {type(value).__name__}"
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def check_devices(where: str, arrays: Mapping[str, Any]) -> None:
    """Raises a ValueError if committed arrays live on different devices."""
    first: tuple[str, frozenset[Any]] | None = None
    for name, array in arrays.items():
        if isinstance(array, jax.core.Tracer) or not getattr(array, "committed", False):
            continue
        devices = frozenset(array.sharding.device_set)
        if first is None:
            first = name, devices
        elif devices != first[1]:
            got = f"{first[0]} on {_devices(first[1])}, {name} on {_devices(devices)}"
            todo = "move them with jax.device_put"
            raise fail_value(where, "arrays on the same devices", got, todo)


def _devices(devices: frozenset[Any]) -> str:
    return "{" + ", ".join(sorted(map(str, devices))) + "}"
