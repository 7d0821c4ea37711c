"""Attention calls to check operations with, each drawn from one description."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from switchax.axes import MODE_TRAIN
from switchax.kinds.attention import MaskPattern
from switchax.kinds.attention.oracle import (
    OracleOutput,
    attention_oracle,
    attention_oracle_vjp,
)
from switchax.testing.suite import fields_that_differ

__all__ = [
    "NEUTRAL",
    "AttentionCall",
    "Drawn",
    "draw",
    "largest_logit",
    "longest",
    "to_layout",
    "visible_pairs",
]

INF, NAN = math.inf, math.nan
_APART = 1 << 16
_BLOCK = 128  # of keys, as kernels have them
_LARGEST = np.iinfo(np.int32).max
_ALIKE_IN_FLOAT32 = 1 << 24  # and the number after it
Array = NDArray[Any]
# What a call is that does not use a feature.
NEUTRAL: dict[str, dict[str, Any]] = {
    "bias": {"bias": ""},
    "mask": {"mask": ""},
    "mask_pattern": {"pattern": ""},
    "segment_ids": {"segments": ""},
    "kv_lengths": {"lengths": ""},
    "q_lengths": {"lengths": ""},
    "causal": {"causal": False},
    "window": {"window": None},
    "q_offset": {"offset": "zero"},
    "q_offset_per_batch": {"offset": "zero"},
    "logits_soft_cap": {"soft_cap": None},
    "softmax_aux": {"sinks": None},
}


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """One call of attention without its values.

    Attributes:
        batch: Batch size; 1 in layout "thd", whatever this says.
        q_len: Query rows.
        kv_len: Keys.
        heads: Query heads.
        kv_heads: Heads of key and value.
        head_dim: Of query and key.
        v_head_dim: Of value; None is head_dim.
        dtype: Of query, key, value and, unless `bias_dtype` says otherwise, bias.
        layout: "bthd", "bhtd" or "thd".
        bias: "" (none), "full", "head" `[1, heads, q_len, kv_len]`, "slopes" `[1,
            heads, 1, kv_len]`, "sample" `[batch, 1, q_len, kv_len]`, "padding"
            `[batch, 1, 1, kv_len]`, "square" `[q_len, kv_len]`, "row" `[heads, q_len,
            1]`, "rows" `[batch, 1, q_len, 1]`, "key" `[kv_len]`, "heads" `[1, heads, 1,
            1]`, "samples" `[batch, 1, 1, 1]`, "each" `[batch, heads, 1, 1]`, "token"
            `[1, 1, q_len, 1]`, "each_row" `[batch, heads, q_len, 1]`, "scalar" `[1, 1,
            1, 1]`, "unbatched" `[heads, q_len, kv_len]`, or "minus_inf", full with some
            -inf, some rows of nothing else, and none of the first block of keys where
            there are two.
        bias_level: What is added to the bias.
        bias_dtype: Dtype of bias and sinks; "" is that of query, and for sinks float32,
            or float64 for float64.
        mask: "" (none), "full", "key", "square", "head", "sample" or "padding", shaped
            as those of bias ("padding" is one of whole blocks where keys are more than
            one), or "unbatched"; or "by_head" `[batch, heads, 1, kv_len]`, by which
            every row sees a key; or "blocks", full, of triangles and of padding,
            another form for each head and sample; or "row", "rows", "token" and
            "each_row", by which some rows see none; or "samples", "heads", "each" and
            "scalar", by which each other sample and head sees none.
        pattern: "" (none), "chunks" (a row sees the keys of its own third), "noise"
            (an array; each row sees some key), "rows" (likewise, of which some see
            none, nor are some keys seen) or "blocks" (of whole blocks of 128, some
            seen, some not, and some of noise).
        segments: "" (none), "ids" (every row sees a key), "interleaved" likewise,
            "apart" (the later half of the rows sees none), "many" (a document for
            every two tokens), "descending" (four documents, whose ids fall),
            "split" (two documents, of every second sample one),
            "negative" (on both sides, at the start) or "trailing" (at the end).
        lengths: "", "q", "kv" or "both": of the samples, the first is two thirds of
            the axis (or, by seed, whole blocks), the second 0, the third beyond it,
            and the fifth negative.
        causal: As in the call.
        window: As in the call.
        offset: "zero", "negative", "last" (`kv_len - q_len`), "beyond" (past all
            keys), "traced" (about the last), "within" (traced, a sixth before it) or
            "batch", of which the first sample's is not the largest.
        soft_cap: `logits_soft_cap`.
        sinks: None, 0 for `softmax_aux` `[heads]`, or n for `[heads, n]`.
        sink_level: What is added to the sinks.
        dropout: `dropout_prob`.
        key_impl: Of the dropout key, "" for JAX's default.
        scale: `softmax_scale`.
        factor: What query, key and value are multiplied by.
        alike: Whether value's entries are near 1, so that sums over keys grow.
        mode: As in the call; it says how arrays lie, and changes no value.
        plain: Whether neither lse nor weights are asked for.
        seed: Of the values.
    """

    batch: int = 2
    q_len: int = 7
    kv_len: int = 7
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    v_head_dim: int | None = None
    dtype: str = "float32"
    layout: str = "bthd"
    bias: str = ""
    bias_dtype: str = ""
    bias_level: float = 0.0
    mask: str = ""
    pattern: str = ""
    segments: str = ""
    lengths: str = ""
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    offset: str = "zero"
    soft_cap: float | None = None
    sinks: int | None = None
    sink_level: float = 0.0
    dropout: float = 0.0
    key_impl: str = ""
    scale: float | None = None
    factor: float = 1.0
    alike: bool = False
    mode: str = MODE_TRAIN
    plain: bool = False
    seed: int = 0

    def __str__(self) -> str:
        changed = fields_that_differ(self).items()
        return ", ".join(f"{name}={value!r}" for name, value in changed) or "defaults"

    @property
    def lengths_of_axes(self) -> tuple[int, ...]:
        """batch, q_len, kv_len, heads."""
        return self.batch, self.q_len, self.kv_len, self.heads

    @property
    def features(self) -> frozenset[str]:
        """The features that the call uses, lse and weights aside."""
        positional = self.causal or self.window is not None
        used = {
            "bias": bool(self.bias),
            "mask": bool(self.mask),
            "mask_pattern": bool(self.pattern),
            "segment_ids": bool(self.segments),
            "q_lengths": self.lengths in ("q", "both"),
            "kv_lengths": self.lengths in ("kv", "both"),
            "causal": self.causal,
            "window": self.window is not None,
            "q_offset": positional and self.offset not in ("zero", "batch"),
            "q_offset_per_batch": positional and self.offset == "batch",
            "logits_soft_cap": self.soft_cap is not None,
            "softmax_aux": self.sinks is not None,
            "dropout": self.dropout > 0,
            "gqa": self.heads != self.kv_heads,
            "v_head_dim": self.v_head_dim not in (None, self.head_dim),
        }
        return frozenset(name for name, is_used in used.items() if is_used)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """The values of a call.

    Attributes:
        arrays: Array arguments by name, numpy but for `dropout_key`.
        options: The other arguments.
    """

    arrays: dict[str, Any]
    options: dict[str, Any]

    def without(self, *names: str) -> Drawn:
        """Returns the call without some arguments."""
        kept = {n: a for n, a in self.arrays.items() if n not in names}
        options = {n: o for n, o in self.options.items() if n not in names}
        return Drawn(kept, options)

    @property
    def batch(self) -> int:
        """Batch size; 1 in layout "thd"."""
        return 1 if self.options["layout"] == "thd" else len(self.arrays["query"])

    @property
    def floats(self) -> list[str]:
        """Names of the arguments that have gradients."""
        names = ("query", "key", "value", "bias", "softmax_aux")
        return [name for name in names if name in self.arrays]

    def oracle(self, **more: Any) -> OracleOutput:
        """Returns what `attention_oracle` says of the call."""
        return attention_oracle(**self._in_numpy(), **more)

    def oracle_vjp(self, **more: Any) -> dict[str, NDArray[np.float64]]:
        """Returns the gradients that `attention_oracle_vjp` says it has."""
        return attention_oracle_vjp(**self._in_numpy(), **more)

    def _in_numpy(self) -> dict[str, Any]:
        arrays = {
            n: np.asarray(a) for n, a in self.arrays.items() if n != "dropout_key"
        }
        options = {n: o for n, o in self.options.items() if n != "mode"}
        return {**arrays, **options}


def draw(
    call: AttentionCall, dirty: bool = True, rng: np.random.Generator | None = None
) -> Drawn:
    """Draws the values of a call.

    Args:
        call: The call.
        dirty: Whether what nothing can see is NaN or Inf.
        rng: Draws the values; by default one of the call's seed.
    """
    rng = np.random.default_rng(call.seed) if rng is None else rng
    batch = 1 if call.layout == "thd" else call.batch
    full = (batch, call.heads, call.q_len, call.kv_len)
    arrays = _operands(rng, call, batch)
    arrays |= _logit_arrays(rng, call, full)
    arrays |= _visibility_arrays(rng, call, full)
    options = _options(call)
    if isinstance(options.get("q_offset"), np.ndarray):
        arrays["q_offset"] = options.pop("q_offset")
    drawn = Drawn(arrays, options)
    if dirty and 0 not in full:
        _soil(call, drawn)
    return drawn


def _operands(
    rng: np.random.Generator, call: AttentionCall, batch: int
) -> dict[str, Any]:
    arrays = {}
    v_head_dim = call.head_dim if call.v_head_dim is None else call.v_head_dim
    for name, length, heads, dim in (
        ("query", call.q_len, call.heads, call.head_dim),
        ("key", call.kv_len, call.kv_heads, call.head_dim),
        ("value", call.kv_len, call.kv_heads, v_head_dim),
    ):
        array = call.factor * rng.normal(size=(batch, length, heads, dim))
        if name == "value" and call.alike:
            array = 1 + array / 8
        arrays[name] = to_layout(array, call.layout).astype(call.dtype)
    return arrays


def to_layout(array: Array, layout: str) -> Array:
    """Brings an array of bthd to a layout."""
    if layout == "thd":
        return np.asarray(array[0])
    return array.swapaxes(1, 2) if layout == "bhtd" else array


def _logit_arrays(
    rng: np.random.Generator, call: AttentionCall, full: tuple[int, ...]
) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    batch, heads, q_len, kv_len = full
    shapes = {
        "full": full,
        "row": (heads, q_len, 1),
        "rows": (batch, 1, q_len, 1),
        "unbatched": (heads, q_len, kv_len),
        "key": (kv_len,),
        "sample": (batch, 1, q_len, kv_len),
        "head": (1, heads, q_len, kv_len),
        "slopes": (1, heads, 1, kv_len),
        "square": (q_len, kv_len),
        "padding": (batch, 1, 1, kv_len),
        "heads": (1, heads, 1, 1),
        "samples": (batch, 1, 1, 1),
        "each": (batch, heads, 1, 1),
        "token": (1, 1, q_len, 1),
        "each_row": (batch, heads, q_len, 1),
        "scalar": (1, 1, 1, 1),
        "by_head": (batch, heads, 1, kv_len),
    }
    if call.bias:
        bias = call.bias_level + rng.normal(size=shapes.get(call.bias, full))
        if call.bias == "minus_inf":
            bias[rng.random(full) < 0.3] = -INF
            bias[:, :, : q_len // 2] = -INF
            # What is left of a row may start after a block of nothing.
            bias[..., : _BLOCK + 2 if kv_len > _BLOCK + 2 else 0] = -INF
        arrays["bias"] = bias.astype(call.bias_dtype or call.dtype)
    if call.mask:
        mask = rng.random(shapes.get(call.mask, full)) < 0.7
        if call.mask == "blocks":
            mask = _of_blocks(full, call.seed // 2)
        if call.mask == "padding" and kv_len > _BLOCK:
            ends = np.resize([kv_len - _BLOCK, kv_len, _BLOCK], mask.shape[0])
            mask = np.arange(kv_len) < ends[:, None, None, None]
        if mask.ndim == 4 and mask.shape[2:] == (1, 1) != full[2:]:
            samples, of_each = (np.arange(size) for size in mask.shape[:2])
            numbers = samples[:, None] + of_each + call.seed // 2
            mask = (numbers % 2 == 1)[..., None, None]
        elif call.mask not in ("row", "rows", "token", "each_row") and kv_len:
            mask[..., -1] |= ~mask.any(axis=-1)
        arrays["mask"] = mask
    if call.sinks is not None:
        shape = (heads, call.sinks) if call.sinks else (heads,)
        precise = "float64" if call.dtype == "float64" else "float32"
        sinks = call.sink_level + rng.normal(size=shape)
        arrays["softmax_aux"] = sinks.astype(call.bias_dtype or precise)
    return arrays


def _of_blocks(full: tuple[int, ...], first: int) -> Array:
    """Masks of which whole blocks are seen or hidden, others for each head."""
    batch, heads, q_len, kv_len = full
    rows, keys = np.arange(q_len)[:, None], np.arange(kv_len)[None]
    padding = np.broadcast_to(keys >= min(_BLOCK, kv_len // 2), (q_len, kv_len))
    forms = np.stack([keys <= rows, keys >= rows, padding])
    number = first + np.arange(batch * heads).reshape(batch, heads)
    return np.asarray(forms[number % len(forms)])


def _visibility_arrays(
    rng: np.random.Generator, call: AttentionCall, full: tuple[int, ...]
) -> dict[str, Any]:
    arrays: dict[str, Any] = {}
    batch, _, q_len, kv_len = full
    if call.segments:
        for name, ids in _segment_ids(rng, call, full).items():
            arrays[name] = (ids[0] if call.layout == "thd" else ids).astype("int32")
    for name, length in (("q", q_len), ("kv", kv_len)):
        if call.lengths in (name, "both"):
            # By seed, so that calls that are mapped over differ in them.
            odd = call.seed // 2 % 2
            some = [length - length // 3 - (odd if length > 3 else 0), 0]
            if odd and length > _BLOCK:  # a whole block, or two of half the size
                some[0] = _BLOCK if length > 2 * _BLOCK else _BLOCK // 2
            beyond = _LARGEST if odd else length + 3
            some = [*(some[::-1] if odd and batch > 1 else some), beyond, length]
            some += [-3]
            lengths = np.resize(some, batch)
            if call.lengths == "both" and name == "kv" and batch > 2:
                lengths = np.roll(lengths, -1)  # rows without keys, keys without rows
            arrays[f"{name}_lengths"] = lengths.astype("int32")
    if call.dropout:
        key = jax.random.key(call.seed, impl=call.key_impl or None)
        arrays["dropout_key"] = key
    return arrays


def _segment_ids(
    rng: np.random.Generator, call: AttentionCall, full: tuple[int, ...]
) -> dict[str, Array]:
    batch, _, q_len, kv_len = full
    q_ids, kv_ids = (
        np.sort(rng.integers(0, 2, size=(batch, length)), axis=1)
        for length in (q_len, kv_len)
    )
    if kv_len:
        bounds = kv_ids.min(axis=1), kv_ids.max(axis=1)
        q_ids = np.clip(q_ids, *(bound[:, None] for bound in bounds))
    # Ids of many documents: none of them is one of another by its low bits.
    q_ids, kv_ids = q_ids * _APART, kv_ids * _APART
    if call.segments == "apart":
        q_ids[:, q_len // 2 :] = 5 * _APART
    if call.segments == "interleaved":
        q_ids, kv_ids = (np.arange(n) % 2 for n in (q_len, kv_len))
        q_ids = np.minimum(q_ids, max(kv_len - 1, 0))
        q_ids, kv_ids = (
            np.tile(_ALIKE_IN_FLOAT32 + ids, (batch, 1)) for ids in (q_ids, kv_ids)
        )
    if call.segments == "many":
        documents = (np.arange(length) // 2 for length in (q_len, kv_len))
        q_ids, kv_ids = (np.tile(ids, (batch, 1)) for ids in documents)
    if call.segments == "descending":
        documents = (3 - np.arange(n) * 4 // max(n, 1) for n in (q_len, kv_len))
        q_ids, kv_ids = (np.tile(ids, (batch, 1)) for ids in documents)
    if call.segments == "split":
        documents = (np.arange(n) * 2 // max(n, 1) for n in (q_len, kv_len))
        q_ids, kv_ids = (np.tile(ids, (batch, 1)) for ids in documents)
        q_ids[1::2], kv_ids[1::2] = 0, 0
    # No negative id matches, whichever it is: both sides have equal ones.
    if call.segments == "trailing":
        q_ids[:, q_len - q_len // 3 :] = -1
        kv_ids[:, kv_len - kv_len // 3 :] = -1
    if call.segments == "negative":
        q_ids[:, : 1 + q_len // 3] = -2
        kv_ids[:, : 1 + kv_len // 3] = -2
    return {"q_segment_ids": q_ids, "kv_segment_ids": kv_ids}


@functools.cache
def _noise(q_len: int, kv_len: int, seed: int) -> Array:
    return np.asarray(np.random.default_rng(seed).random((q_len, kv_len)) < 0.6)


def _pattern(call: AttentionCall) -> MaskPattern:
    """Returns the pattern of a call; by seed, noise is another."""
    q_len, kv_len = call.q_len, call.kv_len
    third = max(-(-kv_len // 3), 1)
    if call.pattern == "chunks":  # an outer function, so that equal calls are equal
        return MaskPattern.chunked(third, q_len, kv_len)
    seen = _noise(q_len, kv_len, call.seed).copy()
    if call.pattern == "rows":
        seen[: q_len // 3], seen[:, : kv_len // 3] = False, False
    elif kv_len:
        seen[:, -1] |= ~seen.any(axis=1)
    if call.pattern == "blocks":
        row, key = np.arange(q_len)[:, None] // _BLOCK, np.arange(kv_len) // _BLOCK
        seen = (seen | ((row + key) % 3 != 1)) & ((row + 2 * key) % 3 != 1)
    return MaskPattern(seen)


def _options(call: AttentionCall) -> dict[str, Any]:
    options: dict[str, Any] = {"layout": call.layout}
    for name, option in (
        ("causal", call.causal),
        ("window", call.window),
        ("softmax_scale", call.scale),
        ("logits_soft_cap", call.soft_cap),
        ("dropout_prob", call.dropout),
    ):
        if option is not None and option is not False and option != 0.0:
            options[name] = option
    if call.pattern:
        options["mask_pattern"] = _pattern(call)
    if call.mode != MODE_TRAIN:
        options["mode"] = call.mode
    if call.scale == 0.0:
        options["softmax_scale"] = 0.0
    if call.causal or call.window:
        last = call.kv_len - call.q_len
        batch = 1 if call.layout == "thd" else call.batch
        odd = call.seed // 2 % 2
        several = [last, -1, 0, 2] if odd or batch == 1 else [-1, last, 2, 0]
        offsets: dict[str, Any] = {
            "zero": 0,
            "negative": -2,
            "last": last,
            "beyond": 100 + call.kv_len,
            # By seed, as lengths are.
            "traced": np.array(last + 1 - odd, "int32"),
            "within": np.array(last - last // 6 - odd, "int32"),
            "batch": np.resize(several, batch).astype("int32"),
        }
        options["q_offset"] = offsets[call.offset]
    return options


def _soil(call: AttentionCall, drawn: Drawn) -> None:
    visible = visible_pairs(call, drawn)
    q_len = call.q_len
    seen = np.asarray(visible.any(axis=(1, 2)))
    unseen = to_layout(~seen[:, :, None, None], call.layout)
    for name in ("key", "value"):
        array = drawn.arrays[name]
        drawn.arrays[name] = np.where(unseen, _dirt(array), array)
    if "q_lengths" in drawn.arrays:
        past = np.arange(q_len) >= drawn.arrays["q_lengths"][:, None]
        past = to_layout(past[:, :, None, None], call.layout)
        query = drawn.arrays["query"]
        drawn.arrays["query"] = np.where(past, _dirt(query), query)
    if call.bias:
        bias = drawn.arrays["bias"]
        shape = (1,) * (4 - bias.ndim) + bias.shape
        # An entry that several rows, heads or samples share is seen by any of them.
        shared = tuple(axis for axis, size in enumerate(shape) if size == 1)
        seen = np.asarray(visible.any(axis=shared, keepdims=True)).reshape(bias.shape)
        drawn.arrays["bias"] = np.where(seen, bias, np.array(NAN, bias.dtype))


def _dirt(array: Array) -> Array:
    """NaN and infinities of both signs, in turn."""
    return np.resize(np.array([NAN, INF, -INF]), array.shape).astype(array.dtype)


def visible_pairs(call: AttentionCall, drawn: Drawn) -> NDArray[np.bool_]:
    """Returns where a logit of 0 has weight, bool `[batch, heads, q_len, kv_len]`."""
    zeros = {n: np.zeros(drawn.arrays[n].shape) for n in ("query", "key", "value")}
    hidden_by = drawn.without("bias", "softmax_aux", "dropout_prob", *zeros)
    weights = Drawn({**hidden_by.arrays, **zeros}, hidden_by.options).oracle().weights
    return weights[None] > 0 if call.layout == "thd" else weights > 0


def largest_logit(call: AttentionCall, drawn: Drawn) -> float:
    """Returns a bound of the logits, by the lengths of query and key vectors.

    Sinks are logits too.
    """
    scale = max(call.head_dim, 1) ** -0.5 if call.scale is None else call.scale
    product = math.prod(longest(drawn.arrays[name]) for name in ("query", "key"))
    sinks = np.abs(drawn.arrays.get("softmax_aux", np.zeros(0)).astype("float64"))
    sink = sinks[np.isfinite(sinks)].max(initial=0.0)
    return float(max(sink, abs(call.bias_level), abs(scale) * product))


def longest(array: Array) -> float:
    """Returns the length of the longest vector along the last axis, if finite."""
    lengths = np.linalg.norm(array.astype("float64"), axis=-1)
    return float(lengths[np.isfinite(lengths)].max(initial=0.0))
