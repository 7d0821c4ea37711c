"""What the oracle says of gradients, and what stored roundings may change of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from switchax.testing.suite import Finding, worst
from switchax.testing.tolerance import ROUNDING

from .calls import Drawn, to_layout
from .subject import Subject, of_oracle

__all__ = [
    "as_stacked",
    "gradient_findings",
    "gradients_of",
    "result_findings",
    "slack_of",
]

Floats = NDArray[np.float64]
# The sum of terms that are rounded each by itself errs by so many times the root of the
# sum of squares: of up to nine it is the most that they can add up to.
_SPREAD = 3
_OF_ORACLE = {"attention_outputs": "output", "attention_weights": "weights"}


def gradients_of(
    subject: Subject, drawn: Drawn, given: Mapping[str, Any], output: Any, **more: Any
) -> tuple[dict[str, Floats], dict[str, Any]]:
    """Returns the gradients of a call by name, and what each may differ by beside.

    Args:
        subject: The operation and the call.
        drawn: The values of the call.
        given: Cotangents by field of `AttentionOutput`.
        output: The output as the operation returned it with its gradients.
        **more: As for `attention_oracle_vjp`.
    """
    wanted = drawn.oracle_vjp(**of_oracle(given), **more)
    unit, accumulated = ROUNDING[subject.call.dtype]
    if unit == accumulated:  # then what accumulates is as large: see `tolerance`
        return wanted, dict.fromkeys(wanted)
    return wanted, slack_of(drawn, given, output, unit, **more)


def as_stacked(found: Any) -> Any:
    """Arrays of one call as those of several."""
    return jax.tree.map(lambda x: np.asarray(x)[None], found)


def gradient_findings(
    subject: Subject, drawn: list[Drawn], given: Any, found: Any, how: str
) -> list[Finding]:
    """Compares outputs and their gradients, of several calls along the first axis.

    Args:
        subject: The operation and the call.
        drawn: The calls.
        given: Cotangents by field, the same for each call.
        found: Outputs by field, and gradients by argument.
        how: In which way they were computed.
    """
    results, gradients = found
    findings = result_findings(subject, drawn, results, how)
    if not gradients or worst(findings).is_wrong:
        return findings
    pairs = zip(drawn, np.asarray(results["attention_outputs"]), strict=True)
    each = [gradients_of(subject, call, given, output) for call, output in pairs]
    for name, gradient in gradients.items():
        wanted = np.stack([gradients[name] for gradients, _ in each])
        slack = [slack[name] for _, slack in each if slack[name] is not None]
        limits = wanted, 3, "", np.stack(slack) if slack else None
        findings.append(subject.measure(f"d_{name} {how}", gradient, *limits))
    return findings


def result_findings(
    subject: Subject, drawn: list[Drawn], found: Mapping[str, Any], how: str
) -> list[Finding]:
    """Compares outputs by field, of several calls along the first axis."""
    findings = []
    for field, got in found.items():
        name = _OF_ORACLE.get(field, field)
        wanted = np.stack([getattr(call.oracle(), name) for call in drawn])
        stored = 3 if name == "output" else 0
        findings.append(
            subject.measure(f"{name} {how}", np.asarray(got), wanted, stored)
        )
    return findings


def slack_of(
    drawn: Drawn, given: Mapping[str, Any], output: Any, unit: float, **more: Any
) -> dict[str, Any]:
    """Returns what stored roundings may change of gradients, entry by entry.

    With `D_i = sum(d_output_i * output_i)`, the cotangents of logits are
    `ds_ij = p_ij * (d_output_i.v_j - D_i)`, whose two numbers may be far larger than
    their difference. Of the output as it was returned, with what rounding it and the
    weights made of it, D is off by `sum(d_output_i * (returned_i - output_i))`, which
    is known. It enters as a cotangent of -lse does, so the oracle says what comes of
    it. Beside that each ds, and in the gradient of value each p, is rounded once by
    itself: `unit` of it at most.

    Args:
        drawn: The values of the call.
        given: Cotangents by field of `AttentionOutput`.
        output: The output as it was returned.
        unit: The unit roundoff of what is stored; 0 where only the output is.
        **more: As for `attention_oracle_vjp`.
    """
    oracle, layout = drawn.oracle(**more), drawn.options["layout"]
    d_output = np.asarray(given["attention_outputs"]).astype("float64")
    off = np.asarray(output).astype("float64") - oracle.output
    off = np.where(np.isfinite(off), off, 0.0)
    shift = (d_output * off).sum(-1)
    shift = shift if layout == "bhtd" else np.swapaxes(shift, -1, -2)  # as lse is
    of_shift = drawn.oracle_vjp(d_output=np.zeros(d_output.shape), d_lse=shift, **more)
    slack: dict[str, Any] = {n: np.abs(error) for n, error in of_shift.items()}
    if not unit:
        return slack
    rounded = _of_each_rounded(drawn, given, oracle.weights, **more)
    return {n: a + _SPREAD * unit * rounded.get(n, 0.0) for n, a in slack.items()}


def _of_each_rounded(
    drawn: Drawn, given: Mapping[str, Any], weights: Floats, **more: Any
) -> dict[str, Any]:
    """By argument, the root of the sum of squares of what it is a sum of."""
    layout, arrays = drawn.options["layout"], drawn.arrays
    weights = weights[None] if layout == "thd" else weights
    d_logits: Any = _of_logits(drawn, given, weights.shape, **more) ** 2
    query, key, d_output = (
        np.swapaxes(_batched(np.where(np.isfinite(x), x, 0), layout), 1, 2) ** 2
        for x in (
            arrays["query"].astype("float64"),
            arrays["key"].astype("float64"),
            np.asarray(given["attention_outputs"]).astype("float64"),
        )
    )  # [batch, heads, length, dim]
    group = query.shape[1] // max(key.shape[1], 1)
    scale = drawn.options.get("softmax_scale", query.shape[-1] ** -0.5)

    def of_keys(x: Any) -> Any:
        batch, heads, *rest = x.shape
        return x.reshape(batch, heads // group, group, *rest).sum(2)

    columns = np.swapaxes(d_logits, 2, 3), np.swapaxes(weights**2, 2, 3)
    squares = {
        "query": scale**2 * d_logits @ np.repeat(key, group, axis=1),
        "key": scale**2 * of_keys(columns[0] @ query),
        "value": of_keys(columns[1] @ d_output),
    }
    found: dict[str, Any] = {
        name: np.sqrt(to_layout(np.swapaxes(x, 1, 2), layout))
        for name, x in squares.items()
    }
    if "bias" in arrays:
        shape = arrays["bias"].shape
        axes = tuple(range(4 - len(shape)))
        whole = d_logits.sum(axes)
        kept = tuple(i for i, size in enumerate(shape) if size == 1)
        found["bias"] = np.sqrt(whole.sum(kept, keepdims=True))
    return found


def _of_logits(
    drawn: Drawn, given: Mapping[str, Any], shape: tuple[int, ...], **more: Any
) -> Floats:
    """The cotangents of the logits, as those of a bias that is as large as they are."""
    bias = np.broadcast_to(drawn.arrays.get("bias", 0.0), shape)
    whole = dataclasses.replace(drawn, arrays={**drawn.arrays, "bias": bias})
    found: Floats = whole.oracle_vjp(**of_oracle(given), **more)["bias"]
    return found


def _batched(array: Any, layout: str) -> Any:
    """Brings an array of a layout to bthd."""
    if layout == "thd":
        return array[None]
    return array.swapaxes(1, 2) if layout == "bhtd" else array
