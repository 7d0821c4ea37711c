"""The features of attention: what a call may use and an operation may refuse."""

from __future__ import annotations

import dataclasses

from switchax.kind import Feature

from .request import AttentionRequest

__all__ = ["FEATURES", "VISIBILITY", "with_features"]

FEATURES = {
    "bias": Feature(("bias",), summary="an array added to the logits"),
    "mask": Feature(("mask",), summary="a boolean mask, True takes part"),
    "mask_pattern": Feature(
        ("mask_pattern",), summary="a mask that is known when a call is traced"
    ),
    "segment_ids": Feature(
        ("q_segment_ids", "kv_segment_ids"), summary="equal ids see each other"
    ),
    "q_lengths": Feature(("q_lengths",), summary="valid query rows of each sample"),
    "kv_lengths": Feature(("kv_lengths",), summary="valid keys of each sample"),
    "causal": Feature(("causal",), summary="no key after the row's own"),
    "window": Feature(("window",), summary="keys near the row's own only"),
    "q_offset": Feature(
        ("q_offset",), summary="rows start elsewhere than key 0; an int or a scalar"
    ),
    "q_offset_per_batch": Feature(
        ("q_offset",), summary="rows of each sample start elsewhere; [batch]"
    ),
    "logits_soft_cap": Feature(("logits_soft_cap",), summary="cap * tanh(x / cap)"),
    "softmax_aux": Feature(("softmax_aux",), summary="sinks, extra logits"),
    "dropout": Feature(("dropout_prob", "dropout_key"), summary="drops probabilities"),
    "gqa": Feature(summary="fewer kv heads than query heads"),
    "v_head_dim": Feature(summary="value of another head_dim than key"),
    "lse": Feature(optional=("return_lse",), summary="the log-sum-exp of each row"),
    "weights": Feature(
        optional=("return_weights",), summary="the probabilities of each row"
    ),
}

# The features that only say which key is visible to which row (R3).
VISIBILITY = frozenset(
    {
        "mask",
        "mask_pattern",
        "segment_ids",
        "q_lengths",
        "kv_lengths",
        "causal",
        "window",
        "q_offset",
        "q_offset_per_batch",
    }
)


def with_features(request: AttentionRequest) -> AttentionRequest:
    """Returns the request with `features` set to everything that it uses (R12)."""
    arrays = dict(request.arrays)
    positional = request.causal or request.window is not None
    offset = arrays.get("q_offset")
    used = {
        "bias": "bias" in arrays,
        "mask": "mask" in arrays,
        "mask_pattern": request.mask_pattern is not None,
        "segment_ids": "q_segment_ids" in arrays,
        "q_lengths": "q_lengths" in arrays,
        "kv_lengths": "kv_lengths" in arrays,
        "causal": request.causal,
        "window": request.window is not None,
        "q_offset": positional
        and (bool(request.q_offset) or (offset is not None and offset.shape == ())),
        "q_offset_per_batch": positional and offset is not None and offset.shape != (),
        "logits_soft_cap": request.logits_soft_cap is not None,
        "softmax_aux": "softmax_aux" in arrays,
        "dropout": request.dropout_prob > 0,
        "gqa": request.heads != request.kv_heads,
        "v_head_dim": request.v_head_dim != request.head_dim,
        "lse": request.return_lse,
        "weights": request.return_weights,
    }
    features = frozenset(name for name, is_used in used.items() if is_used)
    return dataclasses.replace(request, features=features)
