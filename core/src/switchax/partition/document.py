"""JSON in, checked: text from anywhere gives data or one ValueError."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from switchax.checks import fail_type, fail_value
from switchax.errors import near_miss

__all__ = ["check_members", "get_safe_hash_int", "read_object"]


def read_object(where: str, text: Any) -> dict[str, Any]:
    """Reads a JSON object; nothing in it is ever executed or imported.

    Args:
        where: Who was called.
        text: The JSON text.

    Returns:
        The object's members.

    Raises:
        TypeError: If text is no str.
        ValueError: For anything that is no JSON object, is nested too deeply, names a
            member twice, or holds a number that JSON does not have.

    Example:
        >>> read_object("f", '{"a": [1]}')
        {'a': [1]}
    """
    todo = "pass what to_json returned"
    if not isinstance(text, str):
        got = f"{type(text).__name__}"
        raise fail_type(where, "JSON text as a str", got, todo)
    try:
        data = json.loads(
            text, object_pairs_hook=_distinct, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        got = f"{brief(text)} ({type(error).__name__}: {brief(error, 80)})"
        raise fail_value(where, "a JSON object", got, todo) from None
    if not isinstance(data, dict):
        raise fail_value(where, "a JSON object", brief(text), todo)
    return data


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        raise ValueError("a member is named twice")
    return members


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def brief(value: Any, limit: int = 40) -> str:
    """Returns the value as text, cut to a length that fits an error."""
    text = value if isinstance(value, str) else str(value)
    return repr(text if len(text) <= limit else text[: limit - 3] + "...")


def check_members(where: str, data: Any, known: Mapping[str, Any]) -> None:
    """Checks that data is a mapping with known members only.

    Args:
        where: Who was called.
        data: What should be such a mapping.
        known: The members; what they map to does not matter.

    Raises:
        TypeError: If it is no mapping.
        ValueError: For an unknown member, with the near miss.
    """
    if not isinstance(data, Mapping):
        got = type(data).__name__
        raise fail_type(where, "a mapping", got, "pass what to_dict returned")
    for name in data:
        if not isinstance(name, str) or name not in known:
            got = f"{brief(name)}{near_miss(str(name)[:80], known)}"
            todo = "known are " + ", ".join(known)
            raise fail_value(where, "known members", got, todo)


def get_safe_hash_int(text: Any, algorithm: str = "md5") -> int:
    """Returns a hash that is the same in every process, unlike `hash`.

    Args:
        text: Anything; its `str` is hashed.
        algorithm: A fixed-length one of `hashlib`. The default is no protection
            against anybody who seeks a collision.

    Returns:
        The digest as a non-negative int.

    Raises:
        ValueError: For an unknown algorithm.

    Example:
        >>> get_safe_hash_int("x")
        209794194358692857395451740504350025638
    """
    try:
        digest = hashlib.new(
            algorithm, str(text).encode("utf-8", "surrogatepass"), usedforsecurity=False
        ).digest()
    except (TypeError, ValueError):
        known = sorted(n for n in hashlib.algorithms_guaranteed if "shake" not in n)
        got = f"algorithm={algorithm!r}{near_miss(str(algorithm), known)}"
        todo = f"pass one of {', '.join(known)}"
        raise fail_value("get_safe_hash_int", "an algorithm", got, todo) from None
    return int.from_bytes(digest, "big")
