"""Calls of attention that ask one thing each, as fields of `AttentionCall`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from switchax.axes import MODE_DECODE

__all__ = [
    "BLOCKS",
    "CACHES",
    "EFFECTS",
    "EMPTY_BESIDE_SINKS",
    "NEWEST",
    "OPERANDS",
    "PLAIN",
    "SPLITS",
    "STEPS",
    "USES",
    "Entry",
    "beside_dropout",
    "logits",
    "shapes",
    "that_hide",
    "visibilities",
]

Entry = tuple[str, dict[str, Any]]

# Of dropout: more than one block of rows and of keys, so that blocks could repeat.
BLOCKS: dict[str, Any] = {"q_len": 300, "kv_len": 130, "head_dim": 64, "batch": 1}
BLOCKS |= {"heads": 4, "kv_heads": 4}
# Each changes the output, whatever else a call has.
EFFECTS: tuple[dict[str, Any], ...] = (
    {"bias": "full"},
    {"mask": "full"},
    {"pattern": "noise"},
    {"segments": "ids", "q_len": 9, "kv_len": 9},
    {"lengths": "kv", "kv_len": 70},
    {"causal": True},
    {"window": (1, 0)},
    {"causal": True, "offset": "traced", "q_len": 5, "kv_len": 70},
    {"soft_cap": 0.8},
    {"sinks": 0},
)
# Decoding over more keys than kernels leave to one of their splits: what is declared of
# each is asked in one call, slots of the cache that are not written yet being dirty.
_CACHE: dict[str, Any] = {"q_len": 1, "kv_len": 1100, "heads": 8, "kv_heads": 2}
_SERVED: dict[str, Any] = {"causal": True, "offset": "within", "window": (600, None)}
_SERVED |= {"lengths": "kv", "soft_cap": 2.0, "sinks": 0}
CACHES: tuple[dict[str, Any], ...] = (
    {**_CACHE, **_SERVED, "batch": 5, "mode": MODE_DECODE},
    {**_CACHE, "causal": True, "offset": "batch", "mask": "sample", "bias": "full"},
)
# The newest three keys of a cache, by positions that no half precision tells apart.
NEWEST: dict[str, Any] = {**_CACHE, "kv_len": 1099, "batch": 1, "lengths": "kv"}
NEWEST |= {"causal": True, "offset": "within", "window": (185, None)}
# Rows that nothing but their sinks give a sum, by each of what may hide all keys.
EMPTY_BESIDE_SINKS: tuple[dict[str, Any], ...] = (
    {"mask": "row", "segments": "apart", "q_len": 9, "kv_len": 9, "sinks": 0},
    {"window": (1, 0), "bias": "minus_inf", "q_len": 9, "kv_len": 5, "sinks": 2},
)
# A step of decoding on a small cache, by options that are in use: of a model with a
# scale of its own, without lse, and where the newest row sees a window alone.
_STEP: dict[str, Any] = {"q_len": 1, "kv_len": 70, "causal": True}
_DECODED: dict[str, Any] = {"offset": "within", "mode": MODE_DECODE}
STEPS: tuple[dict[str, Any], ...] = (
    {**_STEP, "offset": "last", "kv_heads": 2, "window": (4, 0)},
    {**_STEP, **_DECODED, "kv_heads": 2, "scale": 1.0, "plain": True},
    {**_STEP, **_DECODED, "offset": "batch", "kv_heads": 1, "scale": 1.0, "sinks": 2},
)
# What a split over devices must keep of each feature, as far as it is declared.
SPLITS: tuple[dict[str, Any], ...] = (
    {"lengths": "both", "causal": True, "offset": "batch", "soft_cap": 2.0, "sinks": 0},
    {"mask": "sample", "bias": "full", "window": (3, 1), "kv_heads": 2},
    {"segments": "ids", "bias": "padding", "sinks": 2, "scale": 0.9},
)
# What query, key and value share with others under vmap, as far as it is declared.
OPERANDS: tuple[dict[str, Any], ...] = (
    {"lengths": "both", "causal": True, "offset": "batch", "kv_len": 9},
    {"mask": "sample", "bias": "full", "segments": "ids", "sinks": 0},
)
# A call of each feature that uses no other.
USES: dict[str, dict[str, Any]] = {
    "bias": {"bias": "full"},
    "mask": {"mask": "full"},
    "mask_pattern": {"pattern": "noise"},
    "segment_ids": {"segments": "negative"},
    "q_lengths": {"lengths": "q"},
    "kv_lengths": {"lengths": "kv"},
    "causal": {"causal": True},
    "window": {"window": (2, 0)},
    "q_offset": {"causal": True, "offset": "last", "kv_len": 9},
    "q_offset_per_batch": {"causal": True, "offset": "batch", "kv_len": 9},
    "logits_soft_cap": {"soft_cap": 0.8},
    "softmax_aux": {"sinks": 0},
    "dropout": {"dropout": 0.25},
    "gqa": {"kv_heads": 2},
    "v_head_dim": {"v_head_dim": 16},
    "lse": {},
}


# Of operations with further outputs, which may take another way where they are asked
# for: what else changes the output, without them.
PLAIN: tuple[Entry, ...] = (
    ("R2", {"scale": 0.0}),
    ("R2", {"scale": -0.7, "bias": "full"}),
    ("R2", {"soft_cap": 0.8, "kv_heads": 2}),
    ("R3", {"mask": "full", "bias": "head"}),
    ("R3", {"segments": "ids", "q_len": 9, "kv_len": 9}),
    ("R5", {"window": (2, 0), "offset": "traced", "q_len": 5, "kv_len": 70}),
    ("R9", {"sinks": 2, "kv_heads": 2}),
)


def that_hide(entries: list[Entry]) -> Iterator[dict[str, Any]]:
    """Yields the calls in which some key or row may be seen by nothing."""
    for _, call in entries:
        hides = {
            "mask",
            "pattern",
            "segments",
            "lengths",
            "causal",
            "window",
        } & call.keys()
        if hides and call.get("kv_len", 0) <= 70:
            yield call


def shapes(full: bool) -> list[Entry]:
    """Heads, head_dims, layouts and lengths."""
    one = {"heads": 1, "kv_heads": 1}
    entries: list[Entry] = [
        ("R1", {"kv_heads": 2}),
        ("R1", {"heads": 16, "kv_heads": 1}),
        ("R1", one),
        ("R1", {"head_dim": 32, "v_head_dim": 16}),
        ("R1", {"head_dim": 80}),
        ("R1", {"head_dim": 20}),
        ("R1", {"head_dim": 320, **one}),
        ("R1", {"head_dim": 128, **one}),
        ("R1", {"head_dim": 192, **one}),
        ("R1", {"heads": 12, "kv_heads": 4}),
        ("R1", {"layout": "bhtd", "kv_heads": 2}),
        ("R1", {"layout": "thd"}),
        ("R1", {"kv_len": 0}),
        ("R1", {"batch": 0}),
    ]
    lengths: tuple[int, ...] = (1, 2, 64, 65, 128, 129, 200)
    if full:
        lengths = (1, 2, 7, 63, 64, 65, 127, 128, 129, 200, 257)
        entries += [("R1", {"head_dim": d, **one}) for d in (32, 64, 96, 256)]
        entries += [("R1", {"head_dim": 0, "v_head_dim": 8})]
    for kv_len in lengths:
        q_len = 1 if kv_len in (200, 2) else kv_len
        entries.append(("R1", {"q_len": q_len, "kv_len": kv_len, "batch": 1}))
    return entries


def beside_dropout() -> list[dict[str, Any]]:
    """What must still be there where probabilities are dropped."""
    wide = {"q_len": 260, "kv_len": 260, "batch": 1, "head_dim": 64}
    decode = {"q_len": 1, "kv_len": 300, "batch": 3, "head_dim": 64}
    return [
        {**BLOCKS, "causal": True, "kv_heads": 2},
        {"mask": "full", "bias": "full"},
        {"segments": "ids", "scale": 0.5},
        {"lengths": "kv", "soft_cap": 0.8, **decode},
        {"window": (150, 3), "sinks": 0, "dtype": "bfloat16", **wide},
        {"causal": True, "layout": "thd"},
    ]


def logits(full: bool) -> list[Entry]:
    """What changes logits, and sinks."""
    entries: list[Entry] = [
        ("R2", {"scale": -0.7, "factor": 5.0}),  # the largest product is the least
        # The logits are the products, but for what comes after the scale.
        ("R2", {"scale": 1.0, "bias": "full"}),
        ("R2", {"scale": 1.0, "soft_cap": 0.8}),
        ("R2", {"bias": "full", "q_len": 1, "kv_len": 1}),
        ("R2", {"scale": 0.0}),
        ("R2", {"bias": "full"}),
        ("R2", {"bias": "head"}),
        ("R2", {"bias": "row"}),
        ("R2", {"bias": "key"}),
        ("R2", {"bias": "square"}),
        ("R2", {"bias": "by_head"}),
        ("R2", {"bias": "full", "bias_level": -200.0}),
        ("R2", {"bias": "padding"}),
        ("R2", {"soft_cap": 0.8}),
        ("R2", {"bias": "full", "soft_cap": 0.8}),
        ("R2", {"soft_cap": 2.0, "head_dim": 64}),
        ("R2", {"soft_cap": 0.8, "bias": "minus_inf"}),  # -0.8, which hides nothing
        # What is the same for a whole row changes weights beside these alone.
        ("R2", {"bias": "row", "soft_cap": 0.8}),
        ("R2", {"bias": "heads", "soft_cap": 0.8}),
        ("R9", {"bias": "row", "sinks": 0, "kv_len": 200, "batch": 1}),
        ("R9", {"sinks": 0}),
        ("R9", {"sinks": 2}),
        ("R9", {"sinks": 2, "kv_heads": 2}),
        ("R9", {"sinks": 0, "sink_level": 95.0}),
        ("R9", {"sinks": 2, "soft_cap": 0.8, "scale": 2.0}),
    ]
    if full:
        entries += [("R2", {"bias": "full", "scale": 2.0})]
        shapes_of_bias = ("rows", "samples", "each", "token", "each_row", "scalar")
        entries += [("R2", {"bias": x, "soft_cap": 0.8}) for x in shapes_of_bias]
    return entries


def visibilities(full: bool) -> list[Entry]:
    """Calls that hide keys; those in which a row sees none come after their like."""
    long = {"q_len": 5, "kv_len": 70}
    decode = {"q_len": 1, "kv_len": 70}
    wide = {"q_len": 4, "kv_len": 600, "batch": 1}  # more than a block of keys
    one = {"heads": 1, "kv_heads": 1}
    block = {"q_len": 130, "kv_len": 9, "batch": 1, **one}
    square = {"q_len": 9, "kv_len": 9}
    large = {"q_len": 257, "kv_len": 257, "batch": 1, **one}  # three blocks of 128
    even = {"q_len": 128, "kv_len": 128, "batch": 1, **one}  # of whole blocks
    third = {"q_len": 600, "kv_len": 600}  # and of 256
    blocks = {"q_len": 300, "kv_len": 300}  # two and a part
    split = {"q_len": 1, "kv_len": 3000}  # the last of three splits is all hidden
    entries: list[Entry] = [
        ("R3", {"mask": "full"}),
        ("R3", {"mask": "head"}),
        ("R3", {"mask": "square", **wide}),
        ("R3", {"mask": "sample"}),
        ("R3", {"mask": "key"}),
        ("R3", {"mask": "square"}),
        ("R3", {"mask": "by_head"}),
        ("R3", {"mask": "blocks", **blocks, "heads": 2, "kv_heads": 1}),
        ("R3", {"mask": "blocks", "bias": "full", **blocks, "heads": 2, "kv_heads": 1}),
        ("R3", {"mask": "padding", "kv_len": 300}),
        # What samples share has a gradient of all of them, from each block of rows.
        ("R3", {"bias": "head", "causal": True, "q_len": 200, "kv_len": 200}),
        ("R9", {"sinks": 0, "causal": True, "q_len": 200, "kv_len": 200}),
        ("R3", {"mask": "full", "bias": "full"}),
        ("R3", {"pattern": "noise"}),
        ("R6", {"pattern": "rows"}),
        ("R2", {"mask": "full", "soft_cap": 0.8}),
        ("R3", {"causal": True}),
        ("R3", {"causal": True, **one}),
        ("R3", {"causal": True, "q_len": 70, "kv_len": 70, "batch": 1}),
        ("R3", {"causal": True, **even}),
        ("R2", {"causal": True, "soft_cap": 0.8}),
        ("R5", {"window": (2, 0)}),
        ("R5", {"window": (0, 2)}),
        ("R5", {"window": (None, 1), **large}),
        ("R5", {"window": (3, None), **large}),
        ("R5", {"window": (2, 3), "causal": True}),
        ("R5", {"window": (3, None), "causal": True}),
        ("R5", {"window": (None, 2), "causal": True}),
        ("R5", {"window": (0, 150), **large}),
        ("R5", {"window": (300, 0), **large, "q_len": 700, "kv_len": 700}),
        ("R3", {"causal": True, **large, "q_len": 1100, "kv_len": 1100}),
        ("R5", {"window": (300, 0), "causal": True, **large, **third}),
        ("R4", {"causal": True, **large, "q_len": 300, "kv_len": 65}),
        ("R4", {"causal": True, "offset": "last", **large, "q_len": 130}),
        ("R4", {"causal": True, **long}),
        ("R4", {"causal": True, **decode}),
        # Some of its rows are before a block's end, and some behind it.
        ("R4", {"causal": True, "offset": "traced", "q_len": 4, "kv_len": 130}),
        ("R4", {"causal": True, "q_len": 9, "kv_len": 5}),
        ("R4", {"causal": True, "offset": "last", **long}),
        ("R4", {"causal": True, "offset": "traced", **long}),
        ("R4", {"window": (4, 0), "offset": "last", **long}),
        ("R4", {"window": (4, 0), "offset": "traced", **long}),
        ("R4", {"window": (None, 1), "offset": "last", **long}),
        ("R5", {"window": (4, 0), "causal": True, "offset": "last", **long}),
        ("R3", {"segments": "ids", **square}),
        ("R3", {"segments": "ids", "layout": "thd", **square}),
        ("R3", {"segments": "interleaved", **square}),
        ("R3", {"segments": "many", "q_len": 40, "kv_len": 40, "batch": 1}),
        ("R3", {"lengths": "kv", "kv_len": 70, "batch": 1}),
        ("R3", {"lengths": "kv", "kv_len": 300, "batch": 1}),
        ("R3", {"lengths": "kv", "kv_len": 300, "batch": 1, "seed": 2}),
        ("R3", {"lengths": "kv", "kv_len": 256, "batch": 1, "seed": 2}),
        ("R3", {"segments": "descending", **even, "q_len": 200, "kv_len": 200}),
        ("R3", {"lengths": "kv", **split, "batch": 1, **one}),
        ("R4", {"causal": True, "offset": "beyond", "q_len": 5, "kv_len": 128}),
        ("R6", {"mask": "row"}),
        ("R6", {"mask": "rows"}),
        ("R6", {"mask": "samples"}),
        ("R3", {"mask": "row", "kv_len": 200, "batch": 1}),
        ("R6", {"causal": True, "offset": "negative"}),
        ("R6", {"causal": True, "offset": "last", **large, "q_len": 300, "kv_len": 65}),
        ("R6", {"bias": "minus_inf"}),
        ("R6", {"bias": "minus_inf", "plain": True}),
        ("R6", {"bias": "minus_inf", "causal": True}),
        ("R6", {"bias": "minus_inf", "causal": True, "sinks": 0}),
        ("R6", {"bias": "minus_inf", "q_len": 5, "kv_len": 300, "batch": 1}),
        ("R6", {"window": (3, 0), **block}),
        ("R6", {"segments": "apart"}),
        ("R6", {"lengths": "kv"}),
        ("R6", {"causal": True, "offset": "negative", "sinks": 1}),
        ("R6", {"window": (0, 0), "offset": "negative", "layout": "bhtd"}),
        ("R6", {"window": (5, 0), "offset": "beyond"}),
        # Whose rows are far beyond all keys, and reach back to some.
        ("R5", {"window": (104, 0), "offset": "beyond"}),
        ("R3", {"segments": "negative", **square}),
        ("R3", {"segments": "negative", "layout": "thd", **square}),
        ("R3", {"lengths": "kv", "layout": "thd"}),
        ("R3", {"lengths": "q", "layout": "thd"}),
        ("R3", {"lengths": "q"}),
        ("R3", {"lengths": "q", "q_len": 1, "kv_len": 30}),
        ("R3", {"lengths": "both", "batch": 3}),
        ("R3", {"lengths": "both", "kv_len": 9, "batch": 3}),
        ("R4", {"causal": True, "offset": "negative", **long}),
        ("R4", {"causal": True, "offset": "batch", **long}),
        ("R4", {"causal": True, "offset": "batch", **decode}),
    ]
    if full:
        entries += [
            ("R5", {"window": w, "offset": o, **long})
            for w, o in itertools.product(
                ((0, 0), (1, 1), (9, 3), (64, 0)), ("last", "batch", "traced")
            )
        ]
        entries += [("R6", {"bias": "minus_inf", "mask": "full"})]
        shapes_of_masks = ("slopes", "heads", "each", "token", "each_row", "scalar")
        entries += [("R6", {"mask": shape}) for shape in shapes_of_masks]
    return entries
