"""Values and gradients of one call, held against the oracle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, TypeAlias

import numpy as np

from switchax.errors import UnsupportedError
from switchax.kinds.attention import AttentionOutput
from switchax.testing.running import RefusedLate, shortened
from switchax.testing.suite import Finding, worst
from switchax.testing.tolerance import ROUNDING, allowed

from .calls import (
    NEUTRAL,
    AttentionCall,
    Drawn,
    draw,
    largest_logit,
)
from .gradients import gradients_of, slack_of
from .subject import Subject, asking, cotangents, of_oracle, outputs

__all__ = [
    "check_accumulation",
    "check_alone",
    "check_effect",
    "check_lse",
    "check_value",
    "check_weights",
]

# Kernels work on blocks of a power of two, of this size at most.
_BLOCK = 128

# How a call asks for further outputs, and what their derivatives are declared as.
_FIELDS = {"return_lse": "lse", "return_weights": "attention_weights"}
_DERIVED = {"lse": "lse", "attention_weights": "weights"}


def check_value(subject: Subject) -> Finding:
    """Output, lse and weights; then the value under autodiff, and each gradient."""
    drawn = subject.draw()
    expected = drawn.oracle()
    names = subject.derived(drawn)
    if 0 in drawn.arrays["query"].shape:
        names = []
    whole = _at_once(subject, drawn, names) if names else None
    plain = asking(subject, drawn) if whole is None else whole[0]
    findings = outputs(subject, plain, expected)
    if worst(findings).is_wrong:
        return _blamed_on_lengths(subject, worst(findings))
    if not names:
        return worst(findings)
    if whole is None:
        given, asked = _what_to_derive(subject, drawn, _fields_there(plain))
        try:
            derived = subject.programs.gradients(
                subject.operation, drawn, names, given, **asked
            )
        except UnsupportedError as error:
            return subject.refused(f"derivatives of {', '.join(names)}", error, "R11")
        except RefusedLate:
            raise
        except Exception as error:  # though the outputs alone did not
            text = f"derivatives of {', '.join(names)} raise {shortened(error)}"
            return Finding(text=text, rule="R11", quantity="gradients")
        whole = plain, given, *derived
    return worst([*findings, *_gradients(subject, drawn, whole, expected)])


# Outputs, the cotangents, outputs under autodiff, and gradients.
_Whole: TypeAlias = tuple[
    AttentionOutput, dict[str, Any], AttentionOutput, dict[str, Any]
]


def _at_once(subject: Subject, drawn: Drawn, names: list[str]) -> _Whole | None:
    """Outputs and gradients from one program, or None where one of them raises."""
    fields = [_FIELDS[name] for name in subject.asked]
    given, asked = _what_to_derive(subject, drawn, fields)
    try:
        plain, output, gradients = subject.programs.outputs_and_gradients(
            subject.operation, drawn, subject.asked, names, given, **asked
        )
    except Exception:  # asked again one by one, it is told by the part that raises
        return None
    return plain, given, output, gradients


def _blamed_on_lengths(subject: Subject, finding: Finding) -> Finding:
    """Names R1 where logits are right as soon as the lengths fill whole blocks."""
    call = subject.call
    if subject.rule != "R2" or finding.rule:
        return finding
    lengths = {n: -(-getattr(call, n) // _BLOCK) * _BLOCK for n in ("q_len", "kv_len")}
    if call.q_len == 1:  # decoding, for which kernels have a way of its own
        lengths["q_len"] = 1
    whole = dataclasses.replace(subject, call=dataclasses.replace(call, **lengths))
    drawn = whole.draw()
    if worst(outputs(whole, asking(whole, drawn), drawn.oracle())).is_wrong:
        return finding
    return dataclasses.replace(finding, rule="R1")


def _fields_there(plain: AttentionOutput) -> list[str]:
    return [name for name in _DERIVED if getattr(plain, name) is not None]


def _what_to_derive(
    subject: Subject, drawn: Drawn, fields: Iterable[str]
) -> tuple[dict[str, Any], dict[str, bool]]:
    """Cotangents of the output and of those fields that have a declared derivative.

    Beside them, how a call asks for these fields.
    """
    declared = subject.capabilities.differentiable
    derived = [name for name in fields if _DERIVED[name] in declared]
    given = cotangents(subject.call, drawn, ["attention_outputs", *derived])
    return given, {ask: True for ask, name in _FIELDS.items() if name in derived}


def _gradients(
    subject: Subject, drawn: Drawn, whole: _Whole, expected: Any
) -> list[Finding]:
    _, given, found, gradients = whole
    output = found.attention_outputs
    wanted, slack = gradients_of(subject, drawn, given, output)
    rule = "R11" if subject.rule not in ("R6", "R7") else ""
    kept = "" if subject.rule in ("R6", "R7", "R9") else "R11"
    findings = [
        subject.measure("output under autodiff", output, expected.output, rule=rule)
    ]
    # A training step is given those that the forward rule returns.
    for what, got, right in (
        ("lse", found.lse, expected.lse),
        ("weights", found.attention_weights, expected.weights),
    ):
        if got is not None:
            what = f"{what} under autodiff"
            findings.append(subject.measure(what, got, right, 0, rule))
    for name in subject.derived(drawn):
        gradient = gradients[name]
        if gradient.dtype != drawn.arrays[name].dtype:
            text = f"d_{name} is of dtype {gradient.dtype}"
            return [Finding(text=text, rule="R11", quantity=f"d_{name}")]
        limits = wanted[name], 3, kept, slack[name]
        findings.append(subject.measure(f"d_{name}", gradient, *limits))
    return findings


def check_accumulation(subject: Subject) -> Finding:
    """A long sum of numbers that are alike, to two roundings; going backward too.

    The gradient of query is a sum over keys, those of the others are sums over rows.
    """
    drawn = subject.draw()
    found = asking(subject, drawn)
    findings = []
    expected = drawn.oracle().output
    of_sum = _of_a_sum(subject.call)
    if subject.call.q_len <= subject.call.kv_len:
        output, slack = found.attention_outputs, of_sum * np.abs(expected).max()
        measured = subject.measure("output", output, expected, 2, slack=slack)
        findings.append(measured)
    names = subject.derived(drawn)
    if not names or (findings and findings[0].is_wrong):
        return worst(findings)
    (d_output,) = cotangents(subject.call, drawn).values()
    # The gradient of query averages over keys, and is small otherwise. It is also a
    # difference of large numbers, which shows where that is all the precision there is.
    size = 1024 if findings and subject.call.dtype in ("bfloat16", "float16") else 1
    d_output = (size * (1 + d_output / 8)).astype(d_output.dtype)
    given = {"attention_outputs": d_output}
    try:
        found, gradients = subject.programs.gradients(
            subject.operation, drawn, names, given
        )
    except UnsupportedError as error:
        return subject.refused(f"derivatives of {', '.join(names)}", error, "R11")
    output = found.attention_outputs
    wanted = drawn.oracle_vjp(**of_oracle(given))
    slack = slack_of(drawn, given, output, 0.0)
    slack = {n: slack[n] + of_sum * np.abs(wanted[n]).max() for n in names}
    slack["output"] = of_sum * np.abs(expected).max()
    what = "output under autodiff"
    measured = subject.measure(what, output, expected, slack=slack["output"])
    findings.append(measured)
    findings += [
        subject.measure(f"d_{n}", gradients[n], wanted[n], slack=slack[n])
        for n in names
    ]
    return worst(findings)


def _of_a_sum(call: AttentionCall) -> float:
    """How far off a sum of terms that are alike may be, of 1, added one by one.

    The k-th addition rounds what is k terms large: of n terms at most a unit each, and
    random.
    """
    terms = max(call.q_len, call.kv_len)
    return math.sqrt(terms) * ROUNDING[call.dtype][1]


def check_alone(subject: Subject) -> Finding:
    """The gradient of one argument is the same where no other is asked for (R11)."""
    drawn = subject.draw()
    asking(subject, drawn)
    given, expected = cotangents(subject.call, drawn), drawn.oracle().output
    findings = []
    for name in subject.derived(drawn):
        try:
            found, gradients = subject.programs.gradients(
                subject.operation, drawn, [name], given
            )
        except UnsupportedError as error:
            return subject.refused(f"derivatives of {name}", error, "R11")
        output = found.attention_outputs
        wanted, slack = gradients_of(subject, drawn, given, output)
        limits = wanted[name], 3, "", slack[name]
        findings.append(subject.measure("output under autodiff", output, expected))
        findings.append(subject.measure(f"d_{name} alone", gradients[name], *limits))
    return worst(findings)


def check_lse(subject: Subject) -> Finding:
    """The lse alone, where it can be asked for: natural, in float32, with sinks."""
    drawn = subject.draw()
    found = subject.programs.outputs(subject.operation, drawn, return_lse=True)
    return subject.measure("lse", found.lse, drawn.oracle().lse, 0)


def check_weights(subject: Subject) -> Finding:
    """The weights alone, without lse."""
    drawn = subject.draw()
    found = subject.programs.outputs(subject.operation, drawn, return_weights=True)
    weights = drawn.oracle().weights
    return subject.measure("weights", found.attention_weights, weights, 0)


def check_effect(subject: Subject) -> Finding:
    """Every feature of the call must change something, as it does in the oracle."""
    call, drawn = subject.call, subject.draw()
    found = asking(subject, drawn)
    for feature, neutral in NEUTRAL.items():
        if feature not in call.features:
            continue
        without = dataclasses.replace(call, **neutral)
        other = draw(without, dirty=False)
        other.arrays.update({n: drawn.arrays[n] for n in other.arrays})
        expected = np.abs(other.oracle().output - drawn.oracle().output).max(initial=0)
        limit = allowed(call.dtype, largest_logit(call, drawn))
        if expected < 10 * limit:
            continue
        try:
            plain = asking(subject, other)
        except UnsupportedError:
            continue  # it takes the feature in some calls only
        got = np.abs(
            plain.attention_outputs.astype("float64")
            - found.attention_outputs.astype("float64")
        ).max()
        if not got > expected / 2:
            text = f"{feature} changes the output by {got:.2g}, not by {expected:.2g}"
            return Finding(math.inf, text, quantity=feature)
    return Finding()
