"""Calls one after the other, and beside each other, leave nothing behind (R13)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from switchax.errors import UnsupportedError
from switchax.testing.running import jitted
from switchax.testing.suite import Finding, worst

from .calls import AttentionCall, draw
from .gradients import as_stacked, gradient_findings
from .programs import traced
from .subject import Subject, asking, cotangents, results_of

__all__ = ["check_at_once", "check_in_turn"]


def check_in_turn(subject: Subject) -> Finding:
    """A second value or shape is not answered by what the first left behind (R13).

    A second value that is wrong, but not as the answer to the call before would be,
    is wrong by itself: then the finding is one of logits (R2). The first value is of
    the rule of the case.
    """
    call = subject.call
    longer = {"q_len": 2 * call.q_len, "kv_len": 2 * call.kv_len}
    changes: list[dict[str, Any]] = [{}, {"seed": call.seed + 4}, longer, {}]
    changes[1:1] = _other_options(call)
    findings: list[Finding] = []
    before = call
    for change in changes:
        other = dataclasses.replace(call, **change)
        one = dataclasses.replace(subject, call=other)
        drawn = draw(other, dirty=False)
        try:
            found = asking(one, drawn).attention_outputs
        except UnsupportedError:
            if not findings:
                raise
            continue  # it takes calls of this form in some sizes only
        what = _changed(change) or "its first value again"
        what = f"output of {what} after another call" if findings else "output"
        finding = one.measure(what, found, drawn.oracle().output)
        if findings:  # of the first value the rule is the case's
            finding = dataclasses.replace(finding, rule="R13")
        if "scale" in change and finding.is_wrong:
            stale = dataclasses.replace(drawn, options=draw(before).options).oracle()
            if one.measure("", found, stale.output).is_wrong:
                finding = dataclasses.replace(finding, rule="R2", quantity="output")
        findings.append(finding)
        before = other
    return worst(findings)


def check_at_once(subject: Subject) -> Finding:
    """Two calls of other options in one program have each their own gradient (R13).

    All is computed forward before anything is backward, as in a model of two layers.
    """
    call = subject.call
    changes = [*_other_options(call), *([{"causal": False}] if call.causal else [])]
    changes = [c for c in changes if not _is_refused(subject, c)]
    calls = [call, *(dataclasses.replace(call, **change) for change in changes)]
    drawn = [draw(one, dirty=False) for one in calls]
    arrays, names = traced(drawn[0]), subject.derived(drawn[0])
    given = cotangents(call, drawn[0])
    cotangent = {field: jnp.asarray(array) for field, array in given.items()}

    def run(floats: list[Any]) -> Any:
        def results(floats: list[Any]) -> Any:
            pairs = zip(drawn, floats, strict=True)
            return [
                results_of(subject, one, {**arrays, **some}, *given)
                for one, some in pairs
            ]

        found, pull = jax.vjp(results, floats)
        return found, pull([cotangent] * len(found))[0]

    outputs, gradients = jitted(run)([{n: arrays[n] for n in names}] * len(calls))
    findings = []
    for index, one in enumerate(calls):
        other = dataclasses.replace(subject, call=one)
        how = f"of {_changed(changes[index - 1])} beside " if index else "beside "
        how += "a call of other options"
        found = as_stacked((outputs[index], gradients[index]))
        findings += gradient_findings(other, [drawn[index]], given, found, how)
    return worst(findings)


def _is_refused(subject: Subject, change: Mapping[str, Any]) -> bool:
    """Whether an operation takes calls of this form in some options only."""
    drawn = draw(dataclasses.replace(subject.call, **change), dirty=False)
    try:
        jax.eval_shape(lambda a: results_of(subject, drawn, a), traced(drawn))
    except UnsupportedError:
        return True
    return False


def _other_options(call: AttentionCall) -> list[dict[str, Any]]:
    """Other values of the options that a call has."""
    changes: list[dict[str, Any]] = []
    if call.window is not None:
        changes.append({"window": (0, 0)})
    if call.soft_cap is not None:
        changes.append({"soft_cap": call.soft_cap / 16})
    if call.scale is not None:
        changes.append({"scale": None})
    if call.causal and call.offset == "last":
        changes.append({"offset": "zero"})
    return changes


def _changed(change: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in change.items())
