"""Calls that combine what is declared, so that every two of it meet in one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from switchax.axes import MODE_DECODE, MODE_INSERT, MODE_PREFILL, MODE_TRAIN
from switchax.capabilities import Capabilities

from .calls import NEUTRAL, AttentionCall

__all__ = ["as_declared", "covering", "honoured", "rule_of", "together"]

Changes = dict[str, Any]

# Of each factor one value is taken in a call; what is not declared is left out.
_QUICK: dict[str, list[Changes]] = {
    "heads": [
        {},
        {"heads": 6, "kv_heads": 2},
        {"heads": 1, "kv_heads": 1, "batch": 5},
        {"heads": 4, "kv_heads": 1},
    ],
    "head_dim": [{"head_dim": 64}, {"head_dim": 256}, {"v_head_dim": 20}],
    # The long ones have three blocks of 128, the number at which neighbours end; the
    # even ones whole blocks.
    "lengths_of_axes": [
        {"q_len": 128, "kv_len": 256},
        {"q_len": 1, "kv_len": 300},
        {"q_len": 300, "kv_len": 300, "batch": 1},
    ],
    "layout": [{}, {"layout": "bhtd"}, {"layout": "thd"}],
    "position": [
        {},
        {"causal": True, "offset": "traced"},
        {"window": (6, 3), "offset": "batch"},
        {"causal": True, "window": (200, None)},
        {"window": (None, 1), "offset": "last"},
    ],
    "hidden": [
        {},
        {"mask": "full"},
        {"mask": "padding"},
        {"segments": "ids"},
        {"segments": "interleaved"},
    ],
    "lengths": [{}, {"lengths": "kv"}, {"lengths": "both"}],
    "bias": [{}, {"bias": "full"}, {"bias": "slopes"}, {"bias": "sample"}],
    "logits": [
        {},
        {"soft_cap": 2.0},
        {"scale": 0.9},
        {"soft_cap": 2.0, "scale": 0.9},
    ],
    "sinks": [{}, {"sinks": 0}, {"sinks": 2}],
    "asked": [
        {},
        {"plain": True},
        {"mode": MODE_DECODE},
        {"mode": MODE_PREFILL, "plain": True},
        {"mode": MODE_INSERT},
    ],
}
_FULL: dict[str, list[Changes]] = {
    "heads": [
        *_QUICK["heads"],
        {"heads": 8, "kv_heads": 2},
        {"heads": 32, "kv_heads": 8, "batch": 1},
    ],
    "head_dim": [{}, *_QUICK["head_dim"], {"head_dim": 128}, {"head_dim": 80}],
    "lengths_of_axes": [
        {},
        *_QUICK["lengths_of_axes"],
        {"q_len": 17, "kv_len": 33},
        {"q_len": 64, "kv_len": 63},
        {"q_len": 150, "kv_len": 150, "batch": 1},
        {"q_len": 300, "kv_len": 520, "batch": 1},
    ],
    "layout": _QUICK["layout"],
    "position": [
        *_QUICK["position"],
        {"causal": True},
        {"causal": True, "offset": "last"},
        {"window": (6, 3), "offset": "last"},
        {"window": (3, 1), "offset": "traced"},
        {"causal": True, "window": (20, None), "offset": "batch"},
    ],
    "hidden": [
        *_QUICK["hidden"],
        {"mask": "key"},
        {"mask": "sample"},
        {"mask": "square"},
        {"segments": "negative"},
        {"segments": "trailing"},
    ],
    "lengths": [*_QUICK["lengths"], {"lengths": "q"}],
    "bias": [
        *_QUICK["bias"],
        {"bias": "head"},
        {"bias": "row"},
        {"bias": "padding"},
        {"bias": "full", "bias_dtype": "float32"},
    ],
    "logits": [*_QUICK["logits"], {"soft_cap": 0.7, "scale": 0.3}, {"factor": 2.0}],
    "sinks": [*_QUICK["sinks"], {"sinks": 3}],
    "asked": _QUICK["asked"],
}


def together(
    capabilities: Capabilities, dtypes: list[str], full: bool
) -> Iterator[AttentionCall]:
    """Yields calls in which every two values of two factors occur, where declared.

    Args:
        capabilities: What the operation declares.
        dtypes: Those of it, the first being asked most.
        full: Whether all pairs occur; else those of what is declared, at few values.
    """
    factors = {
        name: _declared(values, capabilities)
        for name, values in (_FULL if full else _QUICK).items()
    }
    factors["dtype"] = [{"dtype": dtype} for dtype in dtypes]
    for number, row in enumerate(covering(factors)):
        call = AttentionCall(seed=number, **row)
        if call.layout == "thd":
            call = dataclasses.replace(call, batch=1)
        yield call


def _declared(values: list[Changes], capabilities: Capabilities) -> list[Changes]:
    """Those values that use nothing undeclared, gqa and lengths aside.

    Of a position what is declared of it: causal or a window without its offset.
    """
    known = honoured(capabilities)
    found: list[Changes] = []
    for value in values:
        forms = [value]
        if "offset" in value:
            forms += [{**value, "offset": "batch"}, _without(value, "offset")]
        if "window" in value and "causal" in value:
            forms += [{**_without(value, "causal"), "window": (value["window"][0], 0)}]
            forms += [_without(value, "window")]
        for form in forms:
            if AttentionCall(**form).features <= known:
                found += [form] if form not in found else []
                break
    return found or [{}]


def _without(changes: Changes, name: str) -> Changes:
    return {n: value for n, value in changes.items() if n != name}


def honoured(capabilities: Capabilities) -> frozenset[str]:
    """What is declared, and what core does by it."""
    adapted = {"gqa"}
    if "segment_ids" in capabilities.features and capabilities.layouts != ("thd",):
        adapted |= {"q_lengths", "kv_lengths"}  # which tokens packed already are not
    return frozenset({*capabilities.features, *adapted})


def as_declared(call: AttentionCall, capabilities: Capabilities) -> AttentionCall:
    """A call without what is not declared.

    What is causal, or has a window, is so no more where no offset is declared: it would
    see the first keys alone.
    """
    known = honoured(capabilities)
    offsets = {"q_offset", "q_offset_per_batch"}
    if not call.features & offsets <= known:
        others = (dataclasses.replace(call, offset=o) for o in ("batch", "traced"))
        without = dataclasses.replace(call, causal=False, window=None, offset="zero")
        call = next((c for c in others if c.features & offsets <= known), without)
    if call.lengths == "both":  # of one side alone, where that is declared
        for side in ("kv", "q"):
            if f"{side}_lengths" in known and not {"q_lengths", "kv_lengths"} <= known:
                call = dataclasses.replace(call, lengths=side)
    for feature, neutral in NEUTRAL.items():
        if feature in call.features - known:
            call = dataclasses.replace(call, **neutral)
    return call


def covering(factors: Mapping[str, list[Changes]]) -> Iterator[Changes]:
    """Yields rows, greedily, until every pair of values of two factors occurred."""
    rng = np.random.default_rng(0)
    names = list(factors)
    wanted = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    while wanted:
        first = min(wanted)
        best: dict[str, int] = {}
        new: set[Any] = set()
        for _ in range(200):
            row = {n: int(rng.integers(len(factors[n]))) for n in names} | dict(first)
            found = wanted & set(itertools.combinations(row.items(), 2))
            if len(found) > len(new):
                best, new = row, found
        wanted -= new
        merged: Changes = {}
        for name, index in best.items():
            merged |= factors[name][index]
        yield merged


def rule_of(call: AttentionCall) -> str:
    """The rule of what is last among those that a call uses: the rest is simpler."""
    used = (
        ("R12", call.mode != MODE_TRAIN),
        ("R9", call.sinks is not None),
        ("R5", call.window is not None),
        ("R4", call.offset != "zero"),
        ("R3", bool(call.mask or call.pattern)),
        ("R3", bool(call.segments or call.lengths or call.causal)),
        ("R2", bool(call.bias or call.soft_cap or call.scale)),
        ("R8", call.dtype not in ("float32", "float64")),
    )
    return next((rule for rule, is_used in used if is_used), "R1")
