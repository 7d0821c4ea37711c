"""How the arrays of attention are split, by what their dimensions mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from jax.sharding import PartitionSpec

from switchax.axes import (
    BATCH,
    BIAS_HEAD_SEQ,
    BIAS_KV_SEQ,
    HEAD,
    HEAD_DIM,
    KV_HEAD,
    KV_HEAD_DIM,
    KV_LENGTH,
    QUERY_LENGTH,
    RUNTIME_MODE_TYPES,
    check_mode,
)
from switchax.checks import as_bool, brief, fail_type, fail_value
from switchax.errors import Refusal, UnsupportedError, house_message, near_miss

if TYPE_CHECKING:
    from switchax.partition import PartitionAxis, PartitionManager

__all__ = ["AttnShardingRules", "attention_rules"]

# The dimensions of query, key and value in each layout.
_LAYOUTS = {
    "bthd": ("batch", "length", "heads", "head_dim"),
    "bhtd": ("batch", "heads", "length", "head_dim"),
    "thd": ("length", "heads", "head_dim"),
}


class AttnShardingRules(NamedTuple):
    """A wished-for `PartitionSpec` for each array of attention.

    None of them is corrected for a shape or a mesh yet; see
    `switchax.sharding.correct_spec`.

    Attributes:
        query3d: Query of one position, [batch, heads, head_dim].
        query: Query in the layout asked for.
        key: Key in that layout.
        value: Value in that layout.
        bias: [batch, heads, q_len, kv_len].
        mask: [batch, heads, q_len, kv_len]; its heads are never split.
        output: As `query`.
        q_segment_ids: [batch, q_len], [tokens] in layout "thd".
        kv_segment_ids: [batch, kv_len], [tokens] in layout "thd".
        softmax_aux: [heads] or [heads, num_sinks]; None without sinks.
    """

    query3d: PartitionSpec
    query: PartitionSpec
    key: PartitionSpec
    value: PartitionSpec
    bias: PartitionSpec
    mask: PartitionSpec
    output: PartitionSpec
    q_segment_ids: PartitionSpec
    kv_segment_ids: PartitionSpec
    softmax_aux: PartitionSpec | None


def attention_rules(
    manager: PartitionManager,
    mode: Any,
    layout: Any,
    qkv_mni_sharding: Any,
    softmax_aux: Any,
) -> AttnShardingRules:
    """Resolves the dimensions of every array; see `OperationMetadata.get_shardings`."""
    from switchax.partition.rules import current_rules

    where = "get_shardings"
    mode = check_mode(where, mode)
    dimensions = _dimensions(where, layout)
    like_query = as_bool(where, "qkv_mni_sharding", qkv_mni_sharding)
    sinks = _sink_axes(where, softmax_aux)
    # Kept with the specs of `resolve_spec`, whose keys have three members.
    known = current_rules().specs
    key = manager.paxis, mode, layout, like_query, sinks
    rules: AttnShardingRules | None = known.get(key)
    if rules is None:  # another thread may forget what is known meanwhile
        rules = _resolved(manager.paxis, mode, dimensions, like_query, sinks)
        known[key] = rules
    return rules


def _resolved(
    paxis: PartitionAxis,
    mode: RUNTIME_MODE_TYPES,
    dimensions: tuple[str, ...],
    like_query: bool,
    sinks: tuple[Any, ...] | None,
) -> AttnShardingRules:
    def resolved(*axes: Any) -> PartitionSpec:
        return paxis.resolve_spec(axes, mode)

    def operand(length: str, heads: str, head_dim: str) -> PartitionSpec:
        meaning = {
            "batch": BATCH,
            "length": length,
            "heads": heads,
            "head_dim": head_dim,
        }
        return resolved(*[meaning[name] for name in dimensions])

    def ids(length: str) -> PartitionSpec:
        return resolved(BATCH, length) if "batch" in dimensions else resolved(length)

    query = operand(QUERY_LENGTH, HEAD, HEAD_DIM)
    if like_query:
        key = operand(KV_LENGTH, HEAD, HEAD_DIM)
    else:
        key = operand(KV_LENGTH, KV_HEAD, KV_HEAD_DIM)
    return AttnShardingRules(
        query3d=resolved(BATCH, HEAD, HEAD_DIM),
        query=query,
        key=key,
        value=key,
        bias=resolved(BATCH, BIAS_HEAD_SEQ, QUERY_LENGTH, BIAS_KV_SEQ),
        mask=resolved(BATCH, None, QUERY_LENGTH, BIAS_KV_SEQ),
        output=query,
        q_segment_ids=ids(QUERY_LENGTH),
        kv_segment_ids=ids(KV_LENGTH),
        softmax_aux=None if sinks is None else resolved(*sinks),
    )


def _dimensions(where: str, layout: Any) -> tuple[str, ...]:
    if not isinstance(layout, str):
        got = f"layout={brief(layout)}"
        raise fail_type(where, "layout to be a str", got, "for example 'bthd'")
    if layout in _LAYOUTS:
        return _LAYOUTS[layout]
    got = f"layout={layout[:40]!r}{near_miss(layout[:40], _LAYOUTS)}"
    allowed = ", ".join(_LAYOUTS)
    message = house_message(where, "a known layout", got, f"pass one of {allowed}")
    refusal = Refusal("layout", "layout", repr(layout), allowed)
    raise UnsupportedError(message, {where: (refusal,)})


def _sink_axes(where: str, softmax_aux: Any) -> tuple[Any, ...] | None:
    if softmax_aux is None:
        return None
    rank = getattr(softmax_aux, "ndim", None)
    if not isinstance(rank, int):
        got = f"softmax_aux={brief(softmax_aux)}"
        raise fail_type(where, "softmax_aux to be an array", got, "or pass None")
    if rank not in (1, 2):
        rule = "softmax_aux [heads] or [heads, num_sinks]"
        got = f"softmax_aux of rank {rank}"
        raise fail_value(where, rule, got, "give every query head its own sinks")
    # A device that has a head needs every sink of it.
    return (HEAD,) if rank == 1 else (HEAD, None)
