"""The meaning of attention, in float64 numpy, sharing no code with any operation.

Written to be read beside the rules R1 to R11, not to be fast: every intermediate of
shape `[batch, heads, q_len, kv_len]` is held in memory. Nothing of switchax is
imported, so a mistake in the package cannot also be a mistake in its judge.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["OracleOutput", "attention_oracle", "attention_oracle_vjp"]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Window = tuple[int | None, int | None]

_RANKS = {"bthd": 4, "bhtd": 4, "thd": 3}


class OracleOutput(NamedTuple):
    """What attention is, to float64.

    Attributes:
        output: `[batch, q_len, heads, v_head_dim]` float64, in the caller's layout.
        weights: `[batch, heads, q_len, kv_len]` float64 (`[heads, q_len, kv_len]` in
            thd), the probabilities that multiply value, after dropout.
        lse: `[batch, heads, q_len]` float64 (`[heads, tokens]` in thd), the natural
            log of the softmax denominator, sinks included, dropout excluded.
    """

    output: Floats
    weights: Floats
    lse: Floats


@dataclass(frozen=True)
class _Rules:
    """Everything of a call but query, key and value, as the caller gave it."""

    bias: ArrayLike | None = None
    mask: ArrayLike | None = None
    mask_pattern: ArrayLike | None = None
    q_segment_ids: ArrayLike | None = None
    kv_segment_ids: ArrayLike | None = None
    q_lengths: ArrayLike | None = None
    kv_lengths: ArrayLike | None = None
    causal: bool = False
    window: Window | None = None
    q_offset: ArrayLike | None = None
    softmax_scale: float | None = None
    logits_soft_cap: float | None = None
    softmax_aux: ArrayLike | None = None
    dropout_keep: ArrayLike | None = None
    dropout_prob: float = 0.0
    layout: str = "bthd"


@dataclass(frozen=True)
class _Trace:
    """Every intermediate of the forward pass, all per query head, batch first."""

    query: Floats  # [batch, heads, q_len, head_dim]
    key: Floats  # [batch, heads, kv_len, head_dim]
    value: Floats  # [batch, heads, kv_len, v_head_dim]
    kv_heads: int
    scale: float
    visible: Bools  # [batch, heads, q_len, kv_len], all False in an empty row
    slope: Floats  # d logit / d (scale * q.k + bias), 1 without a soft cap
    probs: Floats  # softmax, before dropout, 0 where not visible
    drop: Floats  # the factor of dropout: 0, or 1 / (1 - dropout_prob)
    sink_probs: Floats  # [batch, heads, q_len, num_sinks]
    lse: Floats  # [batch, heads, q_len]


def _require(holds: bool, rule: str, got: str, remedy: str) -> None:
    if not holds:
        raise ValueError(f"attention_oracle: expected {rule}, got {got}; {remedy}")


def _float64(x: ArrayLike) -> Floats:
    return np.asarray(x).astype(np.float64)


def _shaped(name: str, x: ArrayLike, shape: tuple[int, ...]) -> NDArray[Any]:
    array = np.asarray(x)
    _require(
        array.shape == shape,
        f"{name} of shape {list(shape)}",
        f"{name}.shape={list(array.shape)}",
        "pass one entry for each",
    )
    return array


def _broadcast(name: str, x: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    try:
        return np.broadcast_to(x, shape)
    except ValueError:
        raise ValueError(
            f"attention_oracle: expected {name} broadcastable to [batch, heads, q_len, "
            f"kv_len]={list(shape)}, got {name}.shape={list(x.shape)}; add or drop axes"
        ) from None


def _booleans(name: str, x: ArrayLike) -> Bools:
    array = np.asarray(x)
    if array.dtype != np.bool_:
        raise TypeError(
            f"attention_oracle: expected a boolean {name}, got "
            f"{name}.dtype={array.dtype}; True takes part"
        )
    return array


def _to_bhtd(name: str, x: ArrayLike, layout: str) -> Floats:
    array = _float64(x)
    _require(
        array.ndim == _RANKS[layout],
        f"{name} of rank {_RANKS[layout]} in layout {layout!r}",
        f"{name}.shape={list(array.shape)}",
        "reshape it or name another layout",
    )
    if layout == "thd":
        return array.transpose(1, 0, 2)[None]
    return array.swapaxes(1, 2) if layout == "bthd" else array


def _from_bhtd(x: Floats, layout: str) -> Floats:
    if layout == "thd":
        return x.transpose(0, 2, 1, 3).reshape(x.shape[2], x.shape[1], x.shape[3])
    return x.swapaxes(1, 2) if layout == "bthd" else x


def _repeat_heads(x: Floats, heads: int) -> Floats:
    """Query head h reads kv head `h // (heads // kv_heads)`."""
    kv_heads = x.shape[1]
    return x if kv_heads == 0 else np.repeat(x, heads // kv_heads, axis=1)


def _sum_groups(grad: Floats, kv_heads: int) -> Floats:
    batch, heads, *rest = grad.shape
    if kv_heads == 0:
        return grad
    groups = grad.reshape(batch, kv_heads, heads // kv_heads, *rest)
    return np.asarray(groups.sum(axis=2))


def _sum_to_shape(grad: Floats, shape: tuple[int, ...]) -> Floats:
    """Undo a broadcast from `shape`."""
    grad = grad.sum(axis=tuple(range(grad.ndim - len(shape))))
    stretched = tuple(axis for axis, size in enumerate(shape) if size == 1)
    return np.asarray(grad.sum(axis=stretched, keepdims=True))


def _over_batch(x: ArrayLike, batch: int) -> NDArray[Any]:
    """A scalar or `[batch]`, as `[batch, 1, 1, 1]`."""
    array = np.asarray(x)
    if array.ndim == 0:
        array = np.broadcast_to(array, (batch,))
    return _shaped("q_offset", array, (batch,)).reshape(batch, 1, 1, 1)


def _check_window(window: object) -> None:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(
            f"attention_oracle: expected window as a pair (left, right), got "
            f"window={window!r}; a bare n is read as n keys to the left by some and n "
            "keys with the row's own by others"
        )
    _require(
        all(side is None or side >= 0 for side in window),
        "window sides that are None or at least 0",
        f"window={window}",
        "use None for an unlimited side",
    )


def _visible_by_position(rules: _Rules, shape: tuple[int, ...]) -> Bools:
    """R3 to R5: what causal and window leave of each row."""
    batch, _, q_len, kv_len = shape
    left, right = rules.window or (None, None)
    if rules.window is None and not rules.causal:
        return np.ones((1, 1, 1, 1), dtype=bool)
    _require(
        rules.q_offset is not None or q_len == kv_len,
        "q_offset with causal or window where q_len != kv_len",
        f"q_offset=None, q_len={q_len}, kv_len={kv_len}",
        "use 0 to align the first rows or kv_len - q_len to align the last",
    )
    offset = 0 if rules.q_offset is None else rules.q_offset
    own = np.arange(q_len)[:, None] + _over_batch(offset, batch)
    j = np.arange(kv_len)
    visible = np.ones((*own.shape[:3], kv_len), dtype=bool)
    if rules.causal:
        visible &= j <= own
    if left is not None:
        visible &= own - left <= j
    if right is not None:
        visible &= j <= own + right
    return visible


def _visible(rules: _Rules, shape: tuple[int, ...]) -> Bools:
    """R3: key j is visible to query i if all that was given agrees."""
    batch, _, q_len, kv_len = shape
    visible = np.broadcast_to(_visible_by_position(rules, shape), shape).copy()
    if rules.mask is not None:
        visible &= _broadcast("mask", _booleans("mask", rules.mask), shape)
    if rules.mask_pattern is not None:
        name, pairs = "mask_pattern", np.asarray(rules.mask_pattern)
        visible &= _shaped(name, _booleans(name, pairs), (q_len, kv_len))
    if rules.q_segment_ids is not None and rules.kv_segment_ids is not None:
        lead = () if rules.layout == "thd" else (batch,)
        q_ids = _shaped("q_segment_ids", rules.q_segment_ids, (*lead, q_len))
        kv_ids = _shaped("kv_segment_ids", rules.kv_segment_ids, (*lead, kv_len))
        row, column = q_ids[..., None, :, None], kv_ids[..., None, None, :]
        visible &= (row == column) & (row >= 0)
    if rules.q_lengths is not None:
        lengths = _shaped("q_lengths", rules.q_lengths, (batch,))
        visible &= np.arange(q_len)[:, None] < lengths[:, None, None, None]
    if rules.kv_lengths is not None:
        lengths = _shaped("kv_lengths", rules.kv_lengths, (batch,))
        visible &= np.arange(kv_len) < lengths[:, None, None, None]
    return visible


def _logits(
    rules: _Rules, query: Floats, key: Floats, scale: float
) -> tuple[Floats, Floats]:
    """R2: the logits of all pairs and their slope, `[batch, heads, q_len, kv_len]`."""
    x = scale * np.einsum("bhqd,bhkd->bhqk", query, key)
    if rules.bias is not None:
        x = x + _broadcast("bias", _float64(rules.bias), x.shape)
    if rules.logits_soft_cap is None:
        return x, np.ones_like(x)
    tanh = np.tanh(x / rules.logits_soft_cap)
    return rules.logits_soft_cap * tanh, 1.0 - tanh**2


def _sinks(rules: _Rules, shape: tuple[int, ...]) -> Floats:
    """R9: the sinks of every row, `[batch, heads, q_len, num_sinks]`."""
    batch, heads, q_len, _ = shape
    if rules.softmax_aux is None:
        return np.zeros((batch, heads, q_len, 0))
    sinks = _float64(rules.softmax_aux)
    _require(
        sinks.ndim in (1, 2) and sinks.shape[0] == heads,
        f"softmax_aux of shape [heads] or [heads, num_sinks] with heads={heads}",
        f"softmax_aux.shape={list(sinks.shape)}",
        "give each query head its own sinks",
    )
    if sinks.ndim == 1:
        sinks = sinks[:, None]
    return np.broadcast_to(sinks[:, None], (batch, heads, q_len, sinks.shape[1]))


def _softmax(x: Floats) -> tuple[Floats, Floats]:
    """Softmax and logsumexp of the last axis; nothing but -inf gives 0 and -inf.

    The weights are divided by their sum: `exp(x - lse)` would not add up to 1 where
    the logarithm of the sum is lost beside a huge largest logit.
    """
    largest = x.max(axis=-1, initial=-np.inf)
    largest = np.where(largest == -np.inf, 0.0, largest)
    unnormalised = np.exp(x - largest[..., None])
    total = unnormalised.sum(axis=-1)
    lse = np.asarray(largest + np.log(total))
    return unnormalised / np.where(total == 0, 1.0, total)[..., None], lse


def _drop(rules: _Rules, shape: tuple[int, ...]) -> Floats:
    """R10: the factor of every probability."""
    _require(
        0.0 <= rules.dropout_prob < 1.0,
        "0 <= dropout_prob < 1",
        f"dropout_prob={rules.dropout_prob}",
        "give the share of probabilities to drop",
    )
    if rules.dropout_keep is None:
        _require(
            rules.dropout_prob == 0.0,
            "dropout_keep with dropout_prob > 0",
            f"dropout_keep=None, dropout_prob={rules.dropout_prob}",
            "pass the mask that the operation under test used",
        )
        return np.ones(shape)
    keep = _broadcast(
        "dropout_keep", _booleans("dropout_keep", rules.dropout_keep), shape
    )
    return keep / (1.0 - rules.dropout_prob)


def _contract(weights: Floats, visible: Bools, values: Floats) -> Floats:
    """`sum_j weights[i, j] * values[j]` over the visible pairs (i, j) alone.

    A zero weight would not do, for 0 * NaN is NaN: rows of `values` that are not finite
    leave the product and are added pair by pair.
    """
    finite = np.asarray(np.isfinite(values).all(axis=(0, 1, 3)))
    kept = np.where(visible & finite, weights, 0.0)
    clean = np.where(finite[:, None], values, 0.0)
    total: Floats = np.einsum("bhij,bhjd->bhid", kept, clean)
    for j in np.flatnonzero(~finite):
        pair = weights[..., j, None] * values[:, :, None, j]
        total = total + np.where(visible[..., j, None], pair, 0.0)
    return total


def _check(rules: _Rules, query: Floats, key: Floats, value: Floats) -> None:
    (batch, heads, _, head_dim), (_, kv_heads, kv_len, _) = query.shape, key.shape
    _require(
        key.shape[0] == batch
        and key.shape[3] == head_dim
        and value.shape[:3] == (batch, kv_heads, kv_len),
        "query, key and value with one batch, query and key with one head_dim, key and "
        "value with one kv_heads and kv_len",
        f"query, key, value as bhtd={query.shape}, {key.shape}, {value.shape}",
        "check the layout",
    )
    _require(
        heads == 0 if kv_heads == 0 else heads % kv_heads == 0,
        "heads divisible by kv_heads",
        f"heads={heads}, kv_heads={kv_heads}",
        "repeat key and value heads to a divisor of heads",
    )
    _require(
        (rules.q_segment_ids is None) == (rules.kv_segment_ids is None),
        "both or neither of q_segment_ids and kv_segment_ids",
        f"q_segment_ids {'missing' if rules.q_segment_ids is None else 'alone'}",
        "pass both",
    )
    cap = rules.logits_soft_cap
    _require(
        cap is None or 0.0 < cap < np.inf,
        "logits_soft_cap None or finite and positive",
        f"logits_soft_cap={cap}",
        "use None for no cap",
    )
    if rules.window is not None:
        _check_window(rules.window)


def _forward(
    query: ArrayLike, key: ArrayLike, value: ArrayLike, rules: _Rules
) -> _Trace:
    _require(
        rules.layout in _RANKS,
        f"layout in {sorted(_RANKS)}",
        f"layout={rules.layout!r}",
        "transpose the arrays to one of them",
    )
    q = _to_bhtd("query", query, rules.layout)
    k = _to_bhtd("key", key, rules.layout)
    v = _to_bhtd("value", value, rules.layout)
    _check(rules, q, k, v)
    kv_heads, heads = k.shape[1], q.shape[1]
    k, v = _repeat_heads(k, heads), _repeat_heads(v, heads)
    shape = (*q.shape[:3], k.shape[2])
    # With head_dim 0 every logit is the bias, whatever the scale.
    scale = rules.softmax_scale
    scale = max(q.shape[3], 1) ** -0.5 if scale is None else float(scale)

    visible = _visible(rules, shape)
    logits, slope = _logits(rules, q, k, scale)
    logits = np.where(visible, logits, -np.inf)
    nonempty = logits.max(axis=-1, initial=-np.inf) != -np.inf
    visible &= nonempty[..., None]
    sinks = _sinks(rules, shape)
    probs, lse = _softmax(np.concatenate([logits, sinks], axis=-1))
    return _Trace(
        query=q,
        key=k,
        value=v,
        kv_heads=kv_heads,
        scale=scale,
        visible=visible,
        slope=slope,
        probs=np.where(visible, probs[..., : shape[3]], 0.0),
        drop=_drop(rules, shape),
        sink_probs=probs[..., shape[3] :],
        lse=lse,
    )


def attention_oracle(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    mask_pattern: ArrayLike | None = None,
    q_segment_ids: ArrayLike | None = None,
    kv_segment_ids: ArrayLike | None = None,
    q_lengths: ArrayLike | None = None,
    kv_lengths: ArrayLike | None = None,
    causal: bool = False,
    window: Window | None = None,
    q_offset: ArrayLike | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    softmax_aux: ArrayLike | None = None,
    dropout_keep: ArrayLike | None = None,
    dropout_prob: float = 0.0,
    layout: str = "bthd",
) -> OracleOutput:
    """Attention as the rules R1 to R10 define it, in float64.

    For query row i with its visible keys j:
    `x_ij = softmax_scale * q_i.k_j + bias_ij`, `s_ij = cap * tanh(x_ij / cap)`,
    `lse_i = log(sum_j exp(s_ij) + sum_n exp(sink_n))`, `p_ij = exp(s_ij - lse_i)`,
    `o_i = sum_j keep_ij * p_ij / (1 - dropout_prob) * v_j`. A pair that is not visible
    takes part in none of these sums, even where it holds NaN. A row without a visible
    key, or whose visible logits are all -inf, gives 0, and the lse of the sinks alone.
    A logit of -inf from `bias` gives a zero weight but does not hide a pair.

    Args:
        query: `[batch, q_len, heads, head_dim]`, any real dtype; a jax array will do.
        key: `[batch, kv_len, kv_heads, head_dim]`; query head h reads kv head
            `h // (heads // kv_heads)`.
        value: `[batch, kv_len, kv_heads, v_head_dim]`.
        bias: Floats broadcastable to `[batch, heads, q_len, kv_len]`, added to the
            scaled logits before the soft cap.
        mask: Bools broadcastable to `[batch, heads, q_len, kv_len]`; True takes part.
        mask_pattern: Bools `[q_len, kv_len]`, or what numpy makes such of; likewise.
        q_segment_ids: `[batch, q_len]` ints (`[tokens]` in thd), matched with
            `kv_segment_ids`; a negative id matches nothing.
        kv_segment_ids: `[batch, kv_len]` ints (`[tokens]` in thd).
        q_lengths: `[batch]` ints; rows from there on are empty. `[1]` in thd.
        kv_lengths: `[batch]` ints; keys from there on are invisible. `[1]` in thd.
        causal: Whether key j must have `j <= i + q_offset`.
        window: `(left, right)`, keys to each side of the row's own, which does not
            count; None is unlimited.
        q_offset: The key position of query row 0, a scalar or `[batch]` ints; None is 0
            where `q_len == kv_len`.
        softmax_scale: The factor of q.k, by default `head_dim ** -0.5`.
        logits_soft_cap: The bound that tanh puts on the logits, or None.
        softmax_aux: `[heads]` or `[heads, num_sinks]` floats, extra logits in the
            denominator, neither scaled nor capped.
        dropout_keep: Bools broadcastable to `[batch, heads, q_len, kv_len]`; True keeps
            the probability. Explicit, to be given the mask an operation drew.
        dropout_prob: The share that was dropped; what is kept is divided by the rest.
        layout: `"bthd"`, `"bhtd"` (axes 1 and 2 swapped) or `"thd"` (packed,
            `[tokens, heads, dim]`, one sample without a batch axis).

    Returns:
        Output in the caller's layout, weights after dropout and lse, all float64.

    Raises:
        ValueError: If shapes disagree, an option is out of its range, only one side has
            segment ids, `q_offset` is missing with causal or window where
            `q_len != kv_len`, or `dropout_prob` comes without `dropout_keep`.
        TypeError: If `mask` or `dropout_keep` is not boolean.

    Example:
        >>> query = key = [[[[0.0]], [[0.0]]]]
        >>> value = [[[[1.0]], [[3.0]]]]
        >>> attention_oracle(query, key, value, causal=True).output.ravel().tolist()
        [1.0, 2.0]

    References:
        Vaswani et al., "Attention Is All You Need", 2017, arXiv:1706.03762, section
        3.2.1. Bias, visibility, soft cap, sinks and empty rows are ours to define.
    """
    rules = _Rules(
        bias=bias,
        mask=mask,
        mask_pattern=mask_pattern,
        q_segment_ids=q_segment_ids,
        kv_segment_ids=kv_segment_ids,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        causal=causal,
        window=window,
        q_offset=q_offset,
        softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        softmax_aux=softmax_aux,
        dropout_keep=dropout_keep,
        dropout_prob=dropout_prob,
        layout=layout,
    )
    with np.errstate(all="ignore"):  # invisible pairs may compute any nonsense
        t = _forward(query, key, value, rules)
        weights = t.probs * t.drop
        output = _from_bhtd(_contract(weights, t.visible, t.value), layout)
    if layout == "thd":
        return OracleOutput(output, weights[0], t.lse[0])
    return OracleOutput(output, weights, t.lse)


def attention_oracle_vjp(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    d_output: ArrayLike,
    d_lse: ArrayLike | None = None,
    d_weights: ArrayLike | None = None,
    **arguments: Any,
) -> dict[str, Floats]:
    """Gradients of the outputs times their cotangents, in float64.

    That is of `sum(d_output * output) + sum(d_lse * lse) + sum(d_weights * weights)`.
    The closed form, summed over visible pairs alone: with `w_ij` the weights after
    dropout and `c_ij` its factor, `dp_ij = c_ij * (do_i.v_j + dw_ij)`,
    `D_i = sum_j p_ij * dp_ij`, `ds_ij = p_ij * (dp_ij - D_i + dlse_i)`,
    `dx_ij = ds_ij * (1 - tanh(x_ij / cap)^2)`, and from there
    `dq_i = scale * sum_j dx_ij k_j`, `dk_j = scale * sum_i dx_ij q_i`,
    `dv_j = sum_i w_ij do_i`, `dbias = dx`,
    `dsink_n = sum_i exp(sink_n - lse_i) * (dlse_i - D_i)`. The cotangents of an empty
    row reach nothing, save `d_lse` the sinks.

    Args:
        query: `[batch, q_len, heads, head_dim]`, as in `attention_oracle`.
        key: `[batch, kv_len, kv_heads, head_dim]`.
        value: `[batch, kv_len, kv_heads, v_head_dim]`.
        d_output: `[batch, q_len, heads, v_head_dim]` floats, in the caller's layout.
        d_lse: `[batch, heads, q_len]` floats (`[heads, tokens]` in thd); None is 0.
        d_weights: `[batch, heads, q_len, kv_len]` floats (`[heads, tokens, tokens]` in
            thd); None is 0.
        **arguments: The keywords of `attention_oracle`, with the same meaning.

    Returns:
        A float64 gradient for each of `query`, `key`, `value`, and for `bias` and
        `softmax_aux` where they were given, each in its argument's own shape.

    Raises:
        ValueError: As `attention_oracle`, or if a cotangent's shape is not the
            shape of its output.
        TypeError: As `attention_oracle`, or for an unknown keyword.

    Example:
        >>> query = key = value = [[[[0.0]], [[0.0]]]]
        >>> d_output = [[[[1.0]], [[1.0]]]]
        >>> grads = attention_oracle_vjp(
        ...     query, key, value, d_output=d_output, causal=True
        ... )
        >>> grads["value"].ravel().tolist()
        [1.5, 0.5]

    References:
        Dao et al., "FlashAttention", 2022, arXiv:2205.14135, appendix B.2. The terms of
        bias, soft cap, sinks, dropout's factor and lse are derived alike.
    """
    rules = _Rules(**arguments)
    with np.errstate(all="ignore"):
        trace = _forward(query, key, value, rules)
        return _backward(trace, rules, d_output, d_lse, d_weights)


def _backward(
    t: _Trace,
    rules: _Rules,
    d_output: ArrayLike,
    d_lse: ArrayLike | None,
    d_weights: ArrayLike | None,
) -> dict[str, Floats]:
    d_out = _to_bhtd("d_output", d_output, rules.layout)
    _shaped("d_output (as bhtd)", d_out, (*t.lse.shape, t.value.shape[-1]))
    g_lse = np.zeros_like(t.lse)
    if d_lse is not None:
        lse_shape = t.lse.shape[1:] if rules.layout == "thd" else t.lse.shape
        g_lse = _float64(_shaped("d_lse", d_lse, lse_shape)).reshape(t.lse.shape)

    g_weights = np.zeros_like(t.probs)
    if d_weights is not None:
        shape = t.probs.shape[1:] if rules.layout == "thd" else t.probs.shape
        g_weights = _float64(_shaped("d_weights", d_weights, shape))
        g_weights = g_weights.reshape(t.probs.shape)

    d_probs = np.einsum("bhqd,bhkd->bhqk", d_out, t.value) + g_weights
    d_probs = t.drop * d_probs
    d_mean = np.where(t.visible, t.probs * d_probs, 0.0).sum(axis=-1)
    d_denominator = g_lse - d_mean
    d_logits = t.probs * (d_probs + d_denominator[..., None])
    d_x = np.where(t.visible, d_logits * t.slope, 0.0)

    d_xt, visible_t = d_x.swapaxes(2, 3), t.visible.swapaxes(2, 3)
    weights_t = (t.probs * t.drop).swapaxes(2, 3)
    d_query = t.scale * _contract(d_x, t.visible, t.key)
    d_key = t.scale * _contract(d_xt, visible_t, t.query)
    d_value = _contract(weights_t, visible_t, d_out)
    grads = {
        "query": _from_bhtd(d_query, rules.layout),
        "key": _from_bhtd(_sum_groups(d_key, t.kv_heads), rules.layout),
        "value": _from_bhtd(_sum_groups(d_value, t.kv_heads), rules.layout),
    }
    if rules.bias is not None:
        grads["bias"] = _sum_to_shape(d_x, np.shape(rules.bias))
    if rules.softmax_aux is not None:
        d_sinks = (t.sink_probs * d_denominator[..., None]).sum(axis=(0, 2))
        grads["softmax_aux"] = d_sinks.reshape(np.shape(rules.softmax_aux))
    return grads
