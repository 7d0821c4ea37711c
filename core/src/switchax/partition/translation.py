"""From names that a model uses to axes of a mesh, for one PartitionAxis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from switchax.axes import EMPTY, NOT_GIVEN, AxisType
from switchax.checks import brief, fail_type, fail_value
from switchax.errors import near_miss
from switchax.sharding import current_mesh, flat_names

from .fields import DECODE_FIELDS, TOKEN_FIELDS
from .rules import AxisRule, Rules

if TYPE_CHECKING:
    from .axis import PartitionAxis

_UNKNOWN: Final = object()


class Translation:
    """One call's translation of names, so that its conditions are said once."""

    def __init__(
        self, paxis: PartitionAxis, where: str, generating: bool, rules: Rules
    ) -> None:
        self.paxis = paxis
        self.where = where
        self.generating = generating
        self.rules = rules
        self._fields = paxis.field_names
        self._trail: list[str] = []

    def dimension(self, axis: Any) -> Any:
        """Translates what was asked for one dimension."""
        if axis is None or (isinstance(axis, str) and axis == EMPTY):
            return None
        if not isinstance(axis, tuple):
            return self._known(axis, self._name(axis), axis)
        return [name for member in flat_names(axis) for name in self._member(member)]

    def _member(self, name: Any) -> Iterator[Any]:
        value = self._name(name)
        if value is _UNKNOWN and isinstance(name, str) and name in self._fields:
            value = self._field(name)
        return flat_names(self._known(name, value, name))

    def _known(self, name: Any, value: Any, literal: Any) -> Any:
        """Returns the value, or the name itself if it is a mesh axis, or raises."""
        if value is not _UNKNOWN:
            return value
        if not isinstance(name, bool) and isinstance(name, str | int):
            mesh = current_mesh()
            if name in self.paxis.mesh_axes | self.rules.names or (
                mesh is not None and name in mesh.axis_names
            ):
                return literal
        raise self._unknown(name)

    def _unknown(self, name: Any) -> ValueError:
        mesh = current_mesh()
        axes = () if mesh is None else mesh.axis_names
        known = [*TOKEN_FIELDS, *self.rules.axes, *map(str, self.paxis.mesh_axes)]
        known += map(str, axes)
        if isinstance(name, str) and name in self._fields:
            token = {field: token for token, field in TOKEN_FIELDS.items()}.get(name)
            todo = f"pass {token!r}" if token else "pass a token"
        else:
            todo = "register it with PartitionAxis.register, or name a mesh axis"
        got = f"{name!r}{near_miss(str(name), known)}"
        rule = "a token, a registered axis or a mesh axis"
        return fail_value(self.where, rule, got, todo)

    def _name(self, name: Any) -> Any:
        """Returns what a token or registered axis stands for, else _UNKNOWN."""
        try:
            hash(name)
        except TypeError:  # a set or a dict
            todo = "pass a token or the name of a mesh axis"
            raise fail_type(self.where, "an axis", brief(name), todo) from None
        if not isinstance(name, str):
            return _UNKNOWN
        rule = self.rules.axes.get(name)
        if rule is not None:
            return self._rule(name, rule)
        return self._field(TOKEN_FIELDS[name]) if name in TOKEN_FIELDS else _UNKNOWN

    def _field(self, field: str) -> AxisType:
        if self.generating:
            field = DECODE_FIELDS.get(field, field)
        return getattr(self.paxis, field)  # type: ignore[no-any-return]

    def _rule(self, name: str, rule: AxisRule) -> Any:
        if name in self._trail:
            chain = " -> ".join(map(repr, (*self._trail, name)))
            todo = "register one of them anew with override=True"
            raise fail_value(self.where, "axes that lead to a mesh axis", chain, todo)
        self._trail.append(name)
        try:
            exact = self.generating and rule.generation_axis_rule is not NOT_GIVEN
            chosen = rule.generation_axis_rule if exact else rule.axis_rule
            return self._expanded(chosen, exact)
        finally:
            self._trail.pop()

    def _expanded(self, rule: Any, exact: bool) -> Any:
        """Returns what a rule stands for; an unknown name in it is a mesh axis."""
        if isinstance(rule, tuple):
            return tuple(flat_names([self._expanded(r, exact) for r in rule]))
        if rule is None or (isinstance(rule, str) and rule == EMPTY):
            return None
        value = self._name(rule)
        if value is _UNKNOWN and isinstance(rule, str) and rule in self._fields:
            value = getattr(self.paxis, rule) if exact else self._field(rule)
        return rule if value is _UNKNOWN else value
