"""What is asked again where a kernel takes another way.

Kernels have a fast way for half precision, for whole blocks, for many rows or for a
layout of their own, and leave the rest to a reference: what was asked of small calls in
the first dtype says nothing of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from switchax.capabilities import Capabilities

from .singles import Entry

__all__ = ["dirty_ways", "other_ways"]

# What is odd of each feature, and easily left out.
_ODD: tuple[Entry, ...] = (
    ("R3", {"segments": "negative"}),
    ("R9", {"sinks": 2}),
    ("R2", {"scale": -0.7}),
    ("R6", {"bias": "minus_inf"}),
    ("R3", {"mask": "by_head"}),
    ("R2", {"bias": "padding"}),
)
_MANY: dict[str, Any] = {"q_len": 64, "kv_len": 64}
_SQUARE: dict[str, Any] = {"q_len": 9, "kv_len": 9}
_WHOLE: dict[str, Any] = {"q_len": 256, "kv_len": 256, "heads": 2, "kv_heads": 1}
# Whole blocks, two of 128 each way: where they are and what is hidden of each.
_BLOCKS: tuple[Entry, ...] = (
    ("R3", {"causal": True, **_WHOLE, "batch": 1}),
    ("R3", {"segments": "split", **_WHOLE, "batch": 3}),
    ("R5", {"window": (130, 3), **_WHOLE, "batch": 1}),
    ("R5", {"window": (32, 0), "offset": "last", **_WHOLE, "q_len": 128, "batch": 1}),
    ("R5", {"window": (3, 32), "offset": "within", **_WHOLE, "q_len": 128}),
)
# Patterns of which tiles are skipped, and what else hides keys beside them.
_TILES: dict[str, Any] = {"q_len": 300, "kv_len": 520, "heads": 2, "kv_heads": 1}
_ROWS_OF_TILES: dict[str, Any] = {"pattern": "rows", **_TILES, "q_len": 400, "batch": 1}
_PATTERNS: tuple[Entry, ...] = (
    ("R6", _ROWS_OF_TILES),
    ("R3", {"pattern": "blocks", **_TILES, "batch": 1}),
    ("R3", {"pattern": "chunks", "causal": True, "offset": "last", **_TILES}),
    ("R3", {"pattern": "blocks", "mask": "blocks", "lengths": "kv", **_TILES}),
    ("R6", {"pattern": "rows", "bias": "full", "sinks": 0, "segments": "ids"}),
    ("R3", {"pattern": "noise", "q_len": 1, "kv_len": 70, "kv_heads": 1}),
    ("R4", {"pattern": "noise", "window": (20, 2), "offset": "batch", "kv_len": 70}),
)


def dirty_ways(capabilities: Capabilities) -> Iterator[dict[str, Any]]:
    """Yields calls whose padding is dirty, of whole blocks and by layout."""
    yield {"lengths": "kv", **_WHOLE}
    if "mask_pattern" in capabilities.features:
        yield _ROWS_OF_TILES
    for layout in (x for x in ("bhtd", "thd") if x in capabilities.layouts[1:]):
        yield {"lengths": "kv", "kv_len": 70, "layout": layout}
        yield {"causal": True, "q_len": 5, "kv_len": 9, "layout": layout}


def other_ways(capabilities: Capabilities, dtypes: list[str]) -> Iterator[Entry]:
    """Yields what is asked again: in half precision, of whole blocks, by layout.

    Args:
        capabilities: What the operation declares.
        dtypes: Its dtypes, the one that is asked most first.
    """
    narrow = dtypes[1] if len(dtypes) > 1 else dtypes[0]
    for rule, call in _ODD:
        yield rule, {**call, **_MANY, "dtype": narrow}
    yield from _BLOCKS
    if "mask_pattern" in capabilities.features:
        yield from _PATTERNS
        yield "R8", {**_PATTERNS[1][1], "dtype": narrow}
    # The largest length that there is: blocks of it are counted without overflow.
    yield "R3", {"lengths": "both", "kv_len": 130, "batch": 3, "seed": 2}
    yield "R2", {"bias": "rows", "soft_cap": 0.8}
    yield "R2", {"bias": "rows", "sinks": 0}
    for layout in (x for x in ("bhtd", "thd") if x in capabilities.layouts[1:]):
        for rule, call in _ODD:
            yield rule, {**call, **_SQUARE, "layout": layout}
        yield "R2", {"bias": "unbatched", **_SQUARE, "layout": layout}
        yield "R3", {"mask": "unbatched", **_SQUARE, "layout": layout}
    if capabilities.layouts[0] == "thd":
        yield "R2", {"bias": "unbatched", **_SQUARE, "layout": "thd"}
        yield "R3", {"mask": "unbatched", **_SQUARE, "layout": "thd"}
