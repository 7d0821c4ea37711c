"""PartitionAxis: what each semantic axis means on a mesh of devices."""

from __future__ import annotations

import dataclasses
import json
import types
from collections.abc import Mapping
from typing import Any, Self

import jax
from jax.sharding import PartitionSpec

from switchax.axes import (
    GENERATION_MODES,
    NOT_GIVEN,
    RUNTIME_MODE_TYPES,
    AxisType,
    LogicalAxes,
    check_mode,
    freeze_axes,
)
from switchax.checks import check_keywords, fail_type, fail_value
from switchax.sharding import as_spec, check_distinct, flat_names

from . import rules as registry
from .document import brief, check_members, read_object
from .fields import DERIVED_FROM, TOKEN_FIELDS
from .rules import AxisRule, Rules, current_rules
from .translation import Translation

__all__ = ["PartitionAxis"]

_DERIVED: Any = NOT_GIVEN
_CACHED_SPECS = 4096


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class PartitionAxis:
    """Which mesh axes each semantic axis is split over.

    Every field takes the name of a mesh axis, a tuple of names (major first), or None
    or `()` for "not split". A field that is left out (`NOT_GIVEN`) reads as the value
    derived from others, and follows them through `replace`; `dataclasses.replace`
    would freeze what is derived. The `decode_` fields hold in the modes decode and
    insert; left out, they mean "as in training", and None means "not split".

    Frozen, hashable and comparable (equal if the same was given, so that equal ones
    stay equal through `replace`), a static argument of jit, and a pytree without
    leaves.

    Attributes:
        data_parallel_axis: The mesh axis of `DATA_PARALLEL`.
        fully_sharded_data_parallel_axis: That of `FULLY_SHARDED_DATA_PARALLEL`.
        tensor_parallel_axis: That of `TENSOR_PARALLEL`.
        sequence_parallel_axis: That of `SEQUENCE_PARALLEL`.
        expert_parallel_axis: That of `EXPERT_PARALLEL`.
        batch_axis: `BATCH`; from fully sharded data and data parallel.
        sequence_axis: `LENGTH`; from sequence parallel.
        query_sequence_axis: `QUERY_LENGTH`; from sequence parallel.
        head_axis: `HEAD`; from tensor parallel.
        kv_head_axis: `KV_HEAD`; from tensor parallel.
        key_sequence_axis: `KV_LENGTH`; from sequence parallel.
        hidden_state_axis: `EMBED`; from tensor parallel.
        mlp_intermediate_axis: `MLP_INTERMEDIATE`; from tensor parallel.
        vocab_axis: `VOCAB`; from tensor parallel.
        expert_axis: `EXPERT`; from expert parallel.
        expert_gate_axis: `EXPERT_GATE`.
        attention_dim_axis: `HEAD_DIM`.
        attention_kv_dim_axis: `KV_HEAD_DIM`.
        bias_head_sequence_axis: `BIAS_HEAD_SEQ`.
        bias_key_sequence_axis: `BIAS_KV_SEQ`.
        decode_batch_axis: `BATCH` while generating.
        decode_query_sequence_axis: `QUERY_LENGTH` while generating.
        decode_head_axis: `HEAD` while generating.
        decode_kv_head_axis: `KV_HEAD` while generating.
        decode_key_sequence_axis: `KV_LENGTH` while generating.
        decode_attention_dim_axis: `HEAD_DIM` while generating.
        decode_attention_kv_dim_axis: `KV_HEAD_DIM` while generating.

    Raises:
        TypeError: For an unknown field, or a value that names no mesh axis.
        ValueError: For an empty name.

    Example:
        >>> from switchax.axes import BATCH, HEAD, HEAD_DIM, MODE_TRAIN, QUERY_LENGTH
        >>> paxis = PartitionAxis(decode_query_sequence_axis=None)
        >>> paxis.head_axis, paxis.replace(tensor_parallel_axis="model").head_axis
        ('tp', 'model')
        >>> paxis.resolve_spec([BATCH, QUERY_LENGTH, HEAD, HEAD_DIM], MODE_TRAIN)
        PartitionSpec(('fsdp', 'dp'), 'sp', 'tp', None)
    """

    data_parallel_axis: AxisType = "dp"
    fully_sharded_data_parallel_axis: AxisType = "fsdp"
    tensor_parallel_axis: AxisType = "tp"
    sequence_parallel_axis: AxisType = "sp"
    expert_parallel_axis: AxisType = "ep"
    batch_axis: AxisType = _DERIVED
    sequence_axis: AxisType = _DERIVED
    query_sequence_axis: AxisType = _DERIVED
    head_axis: AxisType = _DERIVED
    kv_head_axis: AxisType = _DERIVED
    key_sequence_axis: AxisType = _DERIVED
    hidden_state_axis: AxisType = _DERIVED
    mlp_intermediate_axis: AxisType = _DERIVED
    vocab_axis: AxisType = _DERIVED
    expert_axis: AxisType = _DERIVED
    expert_gate_axis: AxisType = None
    attention_dim_axis: AxisType = None
    attention_kv_dim_axis: AxisType = None
    bias_head_sequence_axis: AxisType = None
    bias_key_sequence_axis: AxisType = None
    decode_batch_axis: AxisType = _DERIVED
    decode_query_sequence_axis: AxisType = _DERIVED
    decode_head_axis: AxisType = _DERIVED
    decode_kv_head_axis: AxisType = _DERIVED
    decode_key_sequence_axis: AxisType = _DERIVED
    decode_attention_dim_axis: AxisType = _DERIVED
    decode_attention_kv_dim_axis: AxisType = _DERIVED

    def __post_init__(self) -> None:
        given = {}
        for name, default in _DEFAULTS.items():
            value = getattr(self, name)
            if value is NOT_GIVEN:
                value = default
            if value is NOT_GIVEN:
                value = _derived([getattr(self, s) for s in DERIVED_FROM[name]])
            else:
                value = _mesh_axes(name, value)
                if value != default:
                    given[name] = value
            object.__setattr__(self, name, value)
        for field in dataclasses.fields(self):
            if field.name not in _DEFAULTS:  # a subclass's own
                given[field.name] = getattr(self, field.name)
        object.__setattr__(self, "_given", tuple(given.items()))
        object.__setattr__(self, "_hash", hash(tuple(given.items())))
        leaves = (n for f in _DEFAULTS for n in flat_names(getattr(self, f)))
        object.__setattr__(self, "_mesh_axes", frozenset(leaves))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PartitionAxis) or type(self) is not type(other):
            return NotImplemented
        return self is other or self._given_items() == other._given_items()

    def __hash__(self) -> int:
        return vars(self)["_hash"]  # type: ignore[no-any-return]

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self._given_items())
        return f"{type(self).__name__}({given})"

    def __reduce__(self) -> tuple[Any, ...]:
        # A hash of strings differs from process to process, so it is made again.
        return _from_given, (type(self), self._given_items())

    def _given_items(self) -> tuple[tuple[str, AxisType], ...]:
        return vars(self)["_given"]  # type: ignore[no-any-return]

    @property
    def mesh_axes(self) -> frozenset[str | int]:
        """Every mesh axis that some field names."""
        return vars(self)["_mesh_axes"]  # type: ignore[no-any-return]

    @property
    def field_names(self) -> tuple[str, ...]:
        """The names of the fields, in order."""
        return tuple(_DEFAULTS)

    def replace(self, **updates: Any) -> Self:
        """Returns a copy with other values.

        A replaced mesh name reaches every field that is derived from it. `NOT_GIVEN`
        makes a field derived, or its default, again.

        Args:
            **updates: Fields and their values.

        Raises:
            TypeError: For an unknown field, with the near miss, or a wrong value.

        Example:
            >>> PartitionAxis().replace(sequence_parallel_axis="cp").key_sequence_axis
            'cp'
        """
        check_keywords("PartitionAxis.replace", updates, tuple(_fields(type(self))))
        return type(self)(**{**dict(self._given_items()), **updates})

    @classmethod
    def register(
        cls,
        semantic_axis: str,
        axis_rule: Any,
        *,
        generation_axis_rule: Any = NOT_GIVEN,
        override: bool = False,
    ) -> None:
        """Gives a semantic axis of one's own a meaning, for the whole process.

        Within `axis_rules` it holds for that scope only. Thread-safe. What is traced
        already stays as it is, likewise after `unregister`; `axis_rules` traces again.

        Args:
            semantic_axis: The name; surrounding space is stripped.
            axis_rule: A token or another registered axis (an alias, in every mode), a
                field of `PartitionAxis` (while generating its `decode_` field, if it
                has one), a tuple or list of those, None for "not split"; any other
                name is literally a mesh axis.
            generation_axis_rule: The same for the modes decode and insert, except that
                a field means just itself. Left out, `axis_rule` holds.
            override: Whether the name may be known already, as a token or registered;
                "_" stays what is never split.

        Raises:
            TypeError: For a name or rule of another type.
            ValueError: For an empty name, or a known one without override.

        Example:
            >>> PartitionAxis.register("__PAGE__", "batch_axis")
        """
        rule = AxisRule(axis_rule, generation_axis_rule)
        registry.register(semantic_axis, rule, override)

    @classmethod
    def unregister(cls, semantic_axis: str, *, missing_ok: bool = True) -> None:
        """Forgets a registered axis; a token means again what it says. Thread-safe.

        Args:
            semantic_axis: The name.
            missing_ok: Whether the name may be unknown.

        Raises:
            KeyError: If it is unknown and must not be.

        Example:
            >>> PartitionAxis.unregister("__PAGE__")
        """
        registry.unregister(semantic_axis, missing_ok)

    @classmethod
    def get_registered_axes(cls) -> dict[str, dict[str, Any]]:
        """Returns the registered axes known here, by name.

        Returns:
            A copy: for each name its `axis_rule` and `generation_axis_rule`
            (`NOT_GIVEN` if left out).

        Example:
            >>> with axis_rules({"__PAGE__": "dp"}):
            ...     PartitionAxis.get_registered_axes()["__PAGE__"]["axis_rule"]
            'dp'
        """
        axes = current_rules().axes
        return {
            name: {
                "axis_rule": rule.axis_rule,
                "generation_axis_rule": rule.generation_axis_rule,
            }
            for name, rule in axes.items()
        }

    def resolve_axis(self, axes: LogicalAxes, mode: RUNTIME_MODE_TYPES) -> list[Any]:
        """Translates each axis into mesh axes, and checks nothing else.

        Args:
            axes: For each dimension a token, a registered axis, a mesh axis (named by
                a field, by a rule, or by the mesh in force), None or `EMPTY`; or a
                list of those, and of fields of `PartitionAxis`, flattened.
            mode: A runtime mode.

        Returns:
            For each dimension a mesh axis, a tuple of mesh axes or None; a list where
            a list was given.

        Raises:
            TypeError: For axes that are no sequence, or an unhashable axis.
            ValueError: For an unknown mode or name (with the near miss), a bare
                string, or a registered axis that leads back to itself.

        Example:
            >>> PartitionAxis().resolve_axis([BATCH, [FSDP, SP], None], MODE_TRAIN)
            [('fsdp', 'dp'), ['fsdp', 'sp'], None]
        """
        where = "resolve_axis"
        generating = check_mode(where, mode) in GENERATION_MODES
        asked = freeze_axes(where, axes)
        return self._resolved(where, asked, generating, current_rules())

    def resolve_spec(
        self, axes: LogicalAxes, mode: RUNTIME_MODE_TYPES
    ) -> PartitionSpec:
        """Translates axes into a spec, one entry for each.

        Args:
            axes: See `resolve_axis`.
            mode: A runtime mode.

        Returns:
            The spec, not yet corrected for any shape or mesh.

        Raises:
            TypeError: See `resolve_axis`.
            ValueError: See `resolve_axis`; also for a mesh axis that would split two
                dimensions, or one twice.

        Example:
            >>> PartitionAxis().resolve_spec([BATCH, None, EMBED], MODE_TRAIN)
            PartitionSpec(('fsdp', 'dp'), None, 'tp')
        """
        rules = current_rules()
        # Models ask the same thousands of times while they are traced.
        if type(axes) is list or type(axes) is tuple:
            try:
                return rules.specs[self, tuple(axes), mode]  # type: ignore[no-any-return]
            except (KeyError, TypeError):
                pass
        where = "resolve_spec"
        generating = check_mode(where, mode) in GENERATION_MODES
        asked = freeze_axes(where, axes)
        try:
            return rules.specs[self, asked, mode]  # type: ignore[no-any-return]
        except (KeyError, TypeError):
            pass
        dimensions = self._resolved(where, asked, generating, rules)
        entries = [tuple(flat_names(entry)) for entry in dimensions]
        check_distinct(where, entries, asked)
        spec = as_spec(entries)
        if self._may_cache(asked, rules):
            if len(rules.specs) >= _CACHED_SPECS:
                rules.specs.clear()
            rules.specs[self, asked, mode] = spec
        return spec

    def _may_cache(self, asked: tuple[Any, ...], rules: Rules) -> bool:
        """Returns whether the answer depends on nothing but the cache's key.

        An int may equal what is no int, and a name that only the mesh in force knows
        is unknown under another.
        """
        known = {*TOKEN_FIELDS, *rules.axes, *rules.names, *self.mesh_axes}
        return all(isinstance(n, str) and n in known for n in flat_names(asked))

    def _resolved(
        self, where: str, asked: tuple[Any, ...], generating: bool, rules: Rules
    ) -> list[Any]:
        translation = Translation(self, where, generating, rules)
        return [translation.dimension(axis) for axis in asked]

    def to_dict(self) -> dict[str, Any]:
        """Returns what was given, and the five mesh names, as JSON data.

        Fields that are derived are left out, so that they are derived again.

        Example:
            >>> PartitionAxis(head_axis=("tp", "sp")).to_dict()["head_axis"]
            ['tp', 'sp']
        """
        own = {name: getattr(self, name) for name in _MESH_FIELDS}
        values = {**own, **dict(self._given_items())}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in values.items()
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the axis that `to_dict` described.

        Args:
            data: Fields and their values; a list is a tuple.

        Raises:
            TypeError: If data is no mapping.
            ValueError: For an unknown field or a wrong value.

        Example:
            >>> PartitionAxis.from_dict({"head_axis": "model"}).head_axis
            'model'
        """
        where = "PartitionAxis.from_dict"
        check_members(where, data, _fields(cls))
        try:
            return cls(**data)
        except (TypeError, ValueError, RecursionError) as error:
            got = f"{brief(error, 200)} ({type(error).__name__})"
            todo = "pass what to_dict returned"
            raise fail_value(where, "names of mesh axes", got, todo) from None

    def to_json(self, *, indent: int | None = None) -> str:
        """Returns `to_dict` as JSON text.

        Example:
            >>> PartitionAxis.from_json(PartitionAxis().to_json()) == PartitionAxis()
            True
        """
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the axis that `to_json` described; executes nothing.

        Args:
            text: JSON text from anywhere.

        Raises:
            TypeError: If text is no str.
            ValueError: For everything else that `to_json` would not write.
        """
        return cls.from_dict(read_object("PartitionAxis.from_json", text))


def _fields(cls: type[PartitionAxis]) -> Mapping[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(cls)}


_DEFAULTS: Mapping[str, Any] = types.MappingProxyType(_fields(PartitionAxis))
_MESH_FIELDS = tuple(_DEFAULTS)[:5]


def _from_given(cls: type[Any], given: tuple[tuple[str, AxisType], ...]) -> Any:
    return cls(**dict(given))


def _derived(sources: list[AxisType]) -> AxisType:
    return sources[0] if len(sources) == 1 else tuple(flat_names(sources))


def _plain(name: Any) -> Any:
    """Returns the value of an enumeration's member, which is a name."""
    return str.__str__(name) if isinstance(name, str) else name


def _mesh_axes(field: str, value: Any) -> AxisType:
    """Returns the value of a field in one of the forms that it may have."""
    names = tuple(map(_plain, flat_names(value)))
    for name in names:
        if name == "":
            todo = "name a mesh axis, or pass None"
            raise fail_value("PartitionAxis", "a name", f"{field}={value!r}", todo)
        is_int = isinstance(name, int) and not isinstance(name, bool)
        if not isinstance(name, str) and not (is_int and abs(name) < 2**63):
            got = f"{field} with {brief(type(name).__name__)}"
            todo = "pass the name of a mesh axis, a tuple of names, or None"
            raise fail_type("PartitionAxis", "names of mesh axes", got, todo)
    if isinstance(value, list | tuple):
        return names
    return names[0] if names else None
