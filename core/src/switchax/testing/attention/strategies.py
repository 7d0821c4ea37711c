"""Calls that Hypothesis makes of what an operation declares."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from switchax.axes import MODE_DECODE, MODE_PREFILL, MODE_TRAIN
from switchax.capabilities import Capabilities

from .calls import AttentionCall

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["attention_calls", "drawn_calls"]

_CALLS = 60


def attention_calls(capabilities: Capabilities) -> SearchStrategy[AttentionCall]:
    """Returns a strategy for the legal calls that use only what is declared.

    Args:
        capabilities: What the operation declares.
    """
    from hypothesis import strategies as st

    features = capabilities.features

    def of(feature: str, neutral: Any, *others: Any) -> SearchStrategy[Any]:
        # Simple values first, so that most calls combine a few features, not all.
        return st.sampled_from([neutral, *(others if feature in features else ())])

    offsets = ["zero"]
    offsets += ["negative", "last", "traced"] if "q_offset" in features else []
    offsets += ["batch"] if "q_offset_per_batch" in features else []
    lengths = [""] + [n for n in ("q", "kv") if f"{n}_lengths" in features]
    lengths += ["both"] if len(lengths) == 3 else []
    sizes = st.sampled_from([1, 2, 7, 33, 64, 65, 130, 257])
    wide = st.one_of(st.none(), st.integers(0, 300))
    windows = st.one_of(st.none(), st.tuples(wide, wide))
    groups = [(1, 1), (4, 4)] + ([(4, 1), (6, 2)] if "gqa" in features else [])

    def build(heads: tuple[int, int], **fields: Any) -> AttentionCall:
        return _legal(AttentionCall(heads=heads[0], kv_heads=heads[1], **fields))

    return st.builds(
        build,
        heads=st.sampled_from(groups),
        batch=st.integers(1, 4),
        q_len=sizes,
        kv_len=sizes,
        head_dim=st.sampled_from([8, 16, 20, 64]),
        v_head_dim=of("v_head_dim", None, 8, 24),
        dtype=st.sampled_from(sorted(capabilities.dtypes)),
        layout=st.sampled_from(["bthd", "bhtd", "thd"]),
        bias=of("bias", "", "full", "row", "key", "slopes", "minus_inf"),
        mask=of("mask", "", "full", "row", "key", "sample", "head"),
        pattern=of("mask_pattern", "", "chunks", "noise", "rows"),
        segments=of("segment_ids", "", "ids", "apart", "negative"),
        lengths=st.sampled_from(lengths),
        causal=of("causal", False, True),
        window=windows if "window" in features else st.none(),
        offset=st.sampled_from(offsets),
        soft_cap=of("logits_soft_cap", None, 0.7, 5.0),
        sinks=of("softmax_aux", None, 0, 3),
        scale=st.sampled_from([None, 0.3, -1.0]),
        mode=st.sampled_from([MODE_TRAIN, MODE_DECODE, MODE_PREFILL]),
        plain=st.booleans(),
        seed=st.integers(0, 999),
    )


def _legal(call: AttentionCall) -> AttentionCall:
    """Returns the call without what the contract refuses in it."""
    changes: dict[str, Any] = {}
    if call.layout == "thd":
        changes |= {"batch": 1}
    if not call.causal and call.window is None:
        changes["offset"] = "zero"
    return dataclasses.replace(call, **changes)


def drawn_calls(capabilities: Capabilities, seed: int) -> list[AttentionCall]:
    """Returns calls that Hypothesis draws, for one seed the same ones each time.

    Args:
        capabilities: What the operation declares.
        seed: Of the draw.
    """
    import hypothesis
    from hypothesis import HealthCheck, Phase, given, settings

    calls: list[AttentionCall] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=_CALLS,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(attention_calls(capabilities))
    def collect(call: AttentionCall) -> None:
        calls.append(call)

    collect()
    return list(dict.fromkeys(calls))
