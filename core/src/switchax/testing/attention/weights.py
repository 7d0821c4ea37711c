"""Weights as a value shows them that is the identity: what is hidden, and dropped."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import jax
import numpy as np

from switchax.errors import UnsupportedError
from switchax.testing.suite import Finding, worst
from switchax.testing.tolerance import allowed, distance

from .calls import Drawn, to_layout, visible_pairs
from .gradients import gradients_of
from .subject import Subject, cotangents

__all__ = ["check_dropout", "check_hidden"]


def check_hidden(subject: Subject) -> Finding:
    """Keys that are hidden have no weight, however low the logits of the others are.

    So low that float32 does not tell them apart: of the others the sum alone is known.
    """
    drawn = subject.draw()
    weights = _weights(subject, drawn)
    visible = visible_pairs(subject.call, drawn)
    sums = np.where(visible, weights, 0).sum(-1)
    limit = allowed(subject.call.dtype, 1)
    findings = []
    for what, got, wanted in (
        ("weight of what is hidden", np.where(visible, 0, weights), 0 * weights),
        ("weight of what is visible", sums, visible.any(-1)),
    ):
        error, text = distance(got, wanted, limit)
        findings.append(Finding(error, f"{what} {text}" if text else "", quantity=what))
    return worst(findings)


def check_dropout(subject: Subject) -> Finding:
    """Drops by key after the softmax, rescales, repeats, and leaves lse alone (R10)."""
    call, drawn = subject.call, subject.draw()
    programs, operation = subject.programs, subject.operation
    first, again, other = (_probabilities(subject, drawn, seed) for seed in (0, 0, 1))
    plain = drawn.without("dropout_prob").oracle()
    weights = plain.weights[None] if call.layout == "thd" else plain.weights
    visible = weights > 0
    text = _dropped_wrongly(first, again, other, visible, call.dropout)
    if text:
        return Finding(text=text, quantity="dropout")
    kept = np.where(visible, first > 0, True)  # [batch, heads, q_len, kv_len]
    expected = np.where(kept, weights / (1 - call.dropout), 0.0)
    findings = [subject.measure("kept probabilities", first, expected)]
    keyed = _with_key(drawn, 0)
    names = subject.derived(drawn)
    capabilities = subject.capabilities
    if names:
        fields = ["attention_outputs"]
        fields += ["lse"] if "lse" in capabilities.differentiable else []
        if "weights" in capabilities.differentiable:
            fields += ["attention_weights"]
        given, output, found = _of_what_is_given(subject, drawn, keyed, names, fields)
        whole = drawn.oracle(dropout_keep=kept).output
        findings.append(subject.measure("output under autodiff", output, whole))
        wanted, slack = gradients_of(subject, drawn, given, output, dropout_keep=kept)
        findings += [
            subject.measure(f"d_{n}", found[n], wanted[n], slack=slack[n])
            for n in names
        ]
    if "weights" in capabilities.features:
        asked = programs.outputs(operation, keyed, return_weights=True)
        of_layout = expected[0] if call.layout == "thd" else expected
        findings.append(subject.measure("weights", asked.attention_weights, of_layout))
    if "lse" in capabilities.features:
        try:
            lse = programs.outputs(operation, keyed, return_lse=True).lse
        except UnsupportedError:
            return worst(findings)  # it gives lse in some calls only
        findings.append(subject.measure("lse", lse, plain.lse, 0))
    return worst(findings)


def _of_what_is_given(
    subject: Subject, drawn: Drawn, keyed: Drawn, names: list[str], fields: list[str]
) -> tuple[dict[str, Any], Any, Any]:
    """Cotangents, output and gradients; without those of lse where it is refused."""
    given = cotangents(subject.call, drawn, fields)
    asked = {"return_lse": True} if "lse" in fields else {}
    asked |= {"return_weights": True} if "attention_weights" in fields else {}
    try:
        found, gradients = subject.programs.gradients(
            subject.operation, keyed, names, given, **asked
        )
    except UnsupportedError:
        if "lse" not in fields:
            raise
        rest = [field for field in fields if field != "lse"]
        return _of_what_is_given(subject, drawn, keyed, names, rest)
    return given, found.attention_outputs, gradients


def _with_key(drawn: Drawn, seed: int) -> Drawn:
    impl = jax.random.key_impl(drawn.arrays["dropout_key"])
    key = {"dropout_key": jax.random.key(seed, impl=impl)}
    return dataclasses.replace(drawn, arrays={**drawn.arrays, **key})


def _probabilities(subject: Subject, drawn: Drawn, seed: int) -> Any:
    """Returns what is left of the probabilities, `[batch, heads, q_len, kv_len]`."""
    return _weights(subject, _with_key(drawn, seed))


def _weights(subject: Subject, drawn: Drawn) -> Any:
    """Returns the weights of a call, `[batch, heads, q_len, kv_len]`.

    A value that is a part of the identity shows those of as many keys.
    """
    layout, value = subject.call.layout, drawn.arrays["value"]
    kv_len, width = subject.call.kv_len, value.shape[-1]
    parts = []
    for start in range(0, kv_len, width):
        eye = np.eye(kv_len, width, -start, dtype=value.dtype)
        whole = np.broadcast_to(
            eye[None, :, None],
            (drawn.batch, kv_len, subject.call.kv_heads, width),
        )
        shown = {"value": np.ascontiguousarray(to_layout(whole, layout))}
        one = dataclasses.replace(drawn, arrays={**drawn.arrays, **shown})
        found = subject.programs.outputs(subject.operation, one).attention_outputs
        found = found.astype("float64")
        found = found[None] if layout == "thd" else found
        parts.append(found if layout == "bhtd" else np.swapaxes(found, 1, 2))
    return np.concatenate(parts, axis=-1)[..., :kv_len]


_BLOCKS = (16, 32, 64, 128, 256)
_ENOUGH = 64  # by chance so many agree once in 2**26 times, at a share of a quarter


def _diagonals(kept: Any, visible: Any) -> str:
    """Says along which two axes at once others drop the same, as by i + j, or ""."""
    names = ("samples", "heads", "rows", "keys")
    for one, two in itertools.combinations(range(4), 2):
        if one == 2:
            continue  # see `_shifts`
        steps = (1, *_BLOCKS) if two >= 2 else (1,)
        for also in steps:
            sizes = kept.shape[one] - 1, kept.shape[two] - also
            if min(sizes) <= 0:
                continue
            for sign in (1, -1):
                first = _from(kept, visible, one, 0, sizes[0])
                other = _from(kept, visible, one, 1, sizes[0])
                starts = (0, also) if sign > 0 else (also, 0)
                first = _from(*first, two, starts[0], sizes[1])
                other = _from(*other, two, starts[1], sizes[1])
                both = first[1] & other[1]
                same = np.array_equal(first[0][both], other[0][both])
                if both.sum() >= _ENOUGH and same:
                    what = f"1 {names[one]} and {sign * also} {names[two]}"
                    return f"the same is dropped {what} apart"
    return ""


def _shifts(kept: Any, visible: Any) -> str:
    """Says by how many rows and keys at once others drop the same, or "".

    Of every shift, by one correlation: with 1 for what is kept and -1 for what is
    dropped, it is the number of pairs where all of them agree.
    """
    rows, keys = kept.shape[2:]
    size = (2 * rows, 2 * keys)
    for sample, head in np.ndindex(kept.shape[:2]):
        seen = visible[sample, head]
        signs = np.where(seen, np.where(kept[sample, head], 1.0, -1.0), 0.0)
        agreeing, pairs = (
            np.fft.irfft2(np.abs(np.fft.rfft2(x, size)) ** 2, size)
            for x in (signs, seen.astype(float))
        )
        same = (agreeing > pairs - 0.5) & (pairs > _ENOUGH - 0.5)
        same[0, 0] = False
        if same.any():
            at = zip(np.argwhere(same)[0], kept.shape[2:], strict=True)
            row, key = (n if n < length else n - 2 * length for n, length in at)
            return f"the same is dropped {row} rows and {key} keys apart"
    return ""


def _from(
    kept: Any, visible: Any, axis: int, start: int, count: int
) -> tuple[Any, Any]:
    """Returns both, of an axis but a range."""
    index = (slice(None),) * axis + (slice(start, start + count),)
    return kept[index], visible[index]


def _dropped_wrongly(
    first: Any, again: Any, other: Any, visible: Any, share: float
) -> str:
    """Says what is wrong with which probabilities were dropped, or ""."""
    if not np.array_equal(first, again):
        return "the same key drops others"
    kept, kept_otherwise = first > 0, other > 0
    if visible.sum() < _ENOUGH:
        return ""
    if np.array_equal(kept[visible], kept_otherwise[visible]):
        return "another key drops the same"
    for axis, what in enumerate(("samples", "heads", "rows", "keys")):
        for apart in (1, *(_BLOCKS if axis >= 2 else range(2, kept.shape[axis]))):
            if kept.shape[axis] <= apart:
                break
            count = 1 if apart == 1 else kept.shape[axis] - apart
            first_ones, others = (np.arange(count) + start for start in (0, apart))
            both = visible.take(first_ones, axis) & visible.take(others, axis)
            one, two = (kept.take(at, axis)[both] for at in (first_ones, others))
            if both.sum() >= _ENOUGH and np.array_equal(one, two):
                return f"two {what} drop the same, {apart} apart"
    text = _diagonals(kept, visible) or _shifts(kept, visible)
    if text:
        return text
    rate = 1 - kept[visible].mean()
    deviation = math.sqrt(share * (1 - share) / visible.sum())
    if abs(rate - share) > 6 * deviation:
        return f"drops {rate:.3f} of the probabilities, not {share}"
    return ""
