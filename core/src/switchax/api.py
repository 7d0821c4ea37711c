"""`switchax.attention`: the one call that a model makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import Array
from jax.typing import ArrayLike

from .axes import MODE_TRAIN
from .kinds.attention import ATTENTION, AttentionOutput, MaskPattern
from .kinds.attention.arguments import check_names
from .metadata import OperationMetadata
from .running import run_named

__all__ = ["attention"]


def attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    mask_pattern: MaskPattern | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_offset: ArrayLike | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None,
    dropout_prob: float = 0.0,
    dropout_key: Array | None = None,
    layout: str = "bthd",
    mode: str = MODE_TRAIN,
    return_lse: bool = False,
    return_weights: bool = False,
    operation: str | Sequence[str] = "auto",
    metadata: OperationMetadata | None = None,
    **unknown: Any,
) -> Any:
    """Scaled dot-product attention by the operation of a name.

    For query head h, which reads kv head `h // (heads // kv_heads)`, the logits are
    `softmax_scale * query @ key^T + bias`, then soft-capped, then masked; the output
    is `softmax(logits) @ value`. A row that sees no key gives 0. What the operation
    cannot honour it refuses; nothing is dropped.

    Args:
        query: `[batch, q_len, heads, head_dim]`, any floating dtype.
        key: `[batch, kv_len, kv_heads, head_dim]`, dtype of query.
        value: `[batch, kv_len, kv_heads, v_head_dim]`, dtype of query.
        bias: Floating, broadcastable to `[batch, heads, q_len, kv_len]`; added after
            the scale and before the soft cap.
        mask: bool, broadcastable likewise; True takes part.
        mask_pattern: A mask that is known when the call is traced, the same for all
            samples and heads, whose hidden tiles some operations do not visit.
        q_segment_ids: integer `[batch, q_len]`; equal ids see each other, a negative
            id matches nothing.
        kv_segment_ids: integer `[batch, kv_len]`; goes with `q_segment_ids`.
        q_lengths: integer `[batch]`; rows from there on see nothing.
        kv_lengths: integer `[batch]`; keys from there on are unseen.
        causal: Whether key j is seen by row i only if `j <= i + q_offset`.
        window: `(left, right)`, the keys seen on either side of the row's own, which
            is not counted; None on a side is unlimited.
        q_offset: Key position of query row 0: an int, an integer scalar (which may
            be traced) or `[batch]`. Must be given with `causal` or `window` where
            `q_len != kv_len`.
        softmax_scale: A number, `head_dim ** -0.5` by default.
        logits_soft_cap: A positive number c for `c * tanh(logits / c)`, or None.
        softmax_aux: Sinks, floating `[heads]` or `[heads, num_sinks]`: extra logits
            of the denominator, neither scaled nor capped.
        dropout_prob: Probability in [0, 1) with which probabilities are dropped.
        dropout_key: One PRNG key; needed with `dropout_prob`.
        layout: "bthd" as above, "bhtd" with axes 1 and 2 swapped, or "thd": packed
            tokens without a batch axis, told apart by segment ids `[tokens]`.
        mode: One of the runtime modes: `switchax.MODE_TRAIN`, the default,
            `MODE_PREFILL`, `MODE_DECODE` or `MODE_INSERT`. It chooses how arrays are
            wished to lie on a mesh, and changes no value.
        return_lse: Whether the log-sum-exp is returned too.
        return_weights: Whether the probabilities are returned too.
        operation: "auto", a name, `plugin:operation`, or names tried in order. A
            named operation runs or raises; it is never replaced.
        metadata: Dtype to cast to, backend, configurations, and on many devices the
            mesh and the `PartitionAxis` that says what its axes mean.
        **unknown: Nothing; an unknown keyword is an error.

    Returns:
        The output, `[batch, q_len, heads, v_head_dim]` in query's layout and dtype;
        or, if lse or weights were asked for, an `AttentionOutput`: the fields
        `attention_outputs`, `attention_weights` and `lse`, None where not asked for.

    Raises:
        TypeError: For an unknown keyword, a wrong type or dtype.
        ValueError: For a wrong shape or value, an unknown or contested name.
        UnsupportedError: For a call that the operation, or every operation, refuses.

    Example:
        >>> x = jax.numpy.ones((1, 4, 2, 8))
        >>> switchax.attention(x, x, x, causal=True).shape
        (1, 4, 2, 8)

    References:
        Ashish Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762,
        section 3.2. We add grouped heads, windows, soft cap and sinks, and define
        the output of a row that sees no key as 0.
    """
    if unknown:
        check_names("attention", unknown, "operation", "metadata")
    arguments = {
        "query": query,
        "key": key,
        "value": value,
        "bias": bias,
        "mask": mask,
        "mask_pattern": mask_pattern,
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "q_lengths": q_lengths,
        "kv_lengths": kv_lengths,
        "causal": causal,
        "window": window,
        "q_offset": q_offset,
        "softmax_scale": softmax_scale,
        "logits_soft_cap": logits_soft_cap,
        "softmax_aux": softmax_aux,
        "dropout_prob": dropout_prob,
        "dropout_key": dropout_key,
        "layout": layout,
        "mode": mode,
        "return_lse": return_lse,
        "return_weights": return_weights,
    }
    outputs = run_named(ATTENTION, "attention", operation, arguments, metadata)
    if return_lse or return_weights:
        return AttentionOutput(**outputs)
    return outputs["attention_outputs"]
