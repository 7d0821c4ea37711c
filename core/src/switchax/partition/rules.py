"""Semantic axes of one's own: registered for the process, or for a scope."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import types
from collections.abc import Iterator, Mapping
from typing import Any

from switchax.axes import EMPTY, NOT_GIVEN
from switchax.checks import brief, check_keywords, fail_type, fail_value

from . import context
from .fields import DERIVED_FROM, TOKEN_FIELDS


@dataclasses.dataclass(frozen=True)
class AxisRule:
    """What a registered axis stands for.

    Attributes:
        axis_rule: A token, a field of PartitionAxis, a literal mesh axis, a tuple of
            those, or None.
        generation_axis_rule: The same while generating, if not left out.
    """

    axis_rule: Any
    generation_axis_rule: Any = NOT_GIVEN


class Rules:
    """One state of the registry; never changed, so it can carry a cache.

    Attributes:
        axes: The rules by name.
        specs: Specs that were resolved under these rules, by axis, axes and mode.
    """

    def __init__(self, axes: Mapping[str, AxisRule]) -> None:
        self.axes = types.MappingProxyType(dict(axes))
        self.specs: dict[Any, Any] = {}

    @functools.cached_property
    def names(self) -> frozenset[Any]:
        """Every mesh axis in a rule: what is no token, field or other rule."""
        rules = self.axes.values()
        values = [v for r in rules for v in (r.axis_rule, r.generation_axis_rule)]
        leaves = frozenset(leaf for value in values for leaf in _leaves(value))
        fields = {*TOKEN_FIELDS.values(), *DERIVED_FROM}
        return leaves - fields - TOKEN_FIELDS.keys() - self.axes.keys() - {EMPTY}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rules) and self.axes == other.axes

    @functools.cached_property
    def _hash(self) -> int:
        return hash(frozenset(self.axes.items()))

    def __hash__(self) -> int:
        return self._hash


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple):
        for member in value:
            yield from _leaves(member)
    elif value is not None and value is not NOT_GIVEN:
        yield value


_lock = threading.RLock()
_registered = Rules({})


def current_rules() -> Rules:
    """Returns the axes known here: those of the scope, else of the process."""
    scoped = context.scope.get()
    return _registered if scoped is None else scoped


def registered() -> Rules:
    """Returns the axes that are registered for the process, to be restored."""
    return _registered


def restore(axes: Rules) -> None:
    """Makes these the axes that are registered for the process."""
    global _registered
    with _lock:
        _registered = axes


def _replace(axes: Mapping[str, AxisRule]) -> None:
    """Makes these the rules of the innermost scope, or outside of any, of all."""
    global _registered
    if context.scope.peek() is None:
        _registered = Rules(axes)
    else:
        context.scope.change(Rules(axes))


def register(name: Any, rule: AxisRule, override: bool) -> None:
    """Adds an axis; see `PartitionAxis.register`."""
    name, rule = _checked_name("register", name), _checked("register", rule)
    with _lock:
        axes = current_rules().axes
        is_taken = name in axes or name in TOKEN_FIELDS or name == EMPTY
        if is_taken and not override:
            todo = "choose another, or pass override=True"
            raise fail_value("register", "a new semantic axis", repr(name), todo)
        _replace({**axes, name: rule})


def unregister(name: Any, missing_ok: bool) -> None:
    """Removes an axis; see `PartitionAxis.unregister`."""
    name = _checked_name("unregister", name)
    with _lock:
        axes = dict(current_rules().axes)
        if axes.pop(name, None) is not None:
            _replace(axes)
        elif not missing_ok:
            known = ", ".join(map(repr, axes)) or "none"
            raise KeyError(
                f"unregister: expected a registered axis, got {name!r}; "
                f"registered: {known}"
            )


@contextlib.contextmanager
def axis_rules(rules: Mapping[str, Any]) -> Iterator[None]:
    """Gives semantic axes a meaning within a `with` block, in this context.

    They come over those that are known already, tokens included. What is registered
    or unregistered inside is undone on leaving; what others register meanwhile for
    the process is seen after it. Jitted functions are traced again under other rules.

    Args:
        rules: By name a rule as in `PartitionAxis.register`, or a mapping with
            `axis_rule` and optionally `generation_axis_rule`, as
            `get_registered_axes` returns.

    Raises:
        TypeError: For what is no rule.
        ValueError: For an empty name.

    Example:
        >>> with axis_rules({"__PAGE__": "sp"}):
        ...     PartitionAxis().resolve_spec(["__PAGE__"], MODE_TRAIN)
        PartitionSpec('sp',)
    """
    where = "axis_rules"
    if not isinstance(rules, Mapping):
        got = f"{brief(rules)}"
        raise fail_type(where, "a mapping from name to rule", got, "pass {name: rule}")
    parsed = {_checked_name(where, n): _parsed(where, r) for n, r in rules.items()}
    block = context.scope.enter(Rules({**current_rules().axes, **parsed}))
    try:
        yield
    finally:
        context.scope.leave(block)


def _parsed(where: str, rule: Any) -> AxisRule:
    if isinstance(rule, Mapping):
        known = ("axis_rule", "generation_axis_rule")
        check_keywords(where, rule, known)
        if "axis_rule" not in rule:
            todo = "None says that it is never split"
            raise fail_type(where, "an axis_rule", repr(dict(rule)), todo)
        rule = AxisRule(**rule)
    elif not isinstance(rule, AxisRule):
        rule = AxisRule(rule)
    return _checked(where, rule)


def _checked_name(where: str, name: Any) -> str:
    todo = "pass a name such as '__PAGE__'"
    if not isinstance(name, str):
        got = f"semantic_axis={brief(name)}"
        raise fail_type(where, "a str as name", got, todo)
    if not name.strip():
        raise fail_value(where, "a name", f"semantic_axis={name!r}", todo)
    return name.strip()


def _checked(where: str, rule: AxisRule) -> AxisRule:
    generating = rule.generation_axis_rule
    if generating is not NOT_GIVEN:
        generating = _frozen(where, generating)
    return AxisRule(_frozen(where, rule.axis_rule), generating)


def _frozen(where: str, rule: Any) -> Any:
    if isinstance(rule, list | tuple):
        return tuple(_frozen(where, member) for member in rule)
    if rule is None or (isinstance(rule, str | int) and not isinstance(rule, bool)):
        if rule == "":
            todo = "None says that it is never split"
            raise fail_value(where, "a rule", "an empty name", todo)
        return rule
    got = f"{brief(rule)}"
    todo = "pass a token, a field of PartitionAxis, a mesh axis, or a tuple of those"
    raise fail_type(where, "a rule", got, todo)
