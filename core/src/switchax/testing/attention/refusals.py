"""What is not declared is refused, before any kernel starts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from switchax.errors import UnsupportedError
from switchax.testing.running import jitted
from switchax.testing.suite import Finding, worst

from .calls import AttentionCall, Drawn
from .programs import on_host, traced
from .singles import visibilities
from .subject import Subject, asking, outputs

__all__ = ["check_keywords", "check_refused", "check_underivable"]


def check_keywords(subject: Subject) -> Finding:
    """An unknown keyword is a TypeError (R12)."""
    drawn = subject.draw()
    arrays = traced(drawn)
    unknown = {"casual": True}
    try:
        subject.operation(**arrays, **drawn.options, **unknown)
    except TypeError as error:
        if "casual" in str(error):
            return Finding()
        text = f"an unknown keyword raises a TypeError that does not name it: {error}"
        return Finding(text=text, quantity="keyword")
    return Finding(
        text="an unknown keyword is swallowed", quantity="keyword", accepted=True
    )


def check_refused(subject: Subject) -> Finding:
    """A call that is not declared is refused before any kernel, or adapted right."""
    drawn = subject.draw()
    asked = {"return_lse": True} if subject.rule == "lse" else {}
    call = jitted(lambda a: subject.operation(**a, **drawn.options, **asked))
    try:
        found = on_host(call(traced(drawn)))
    except UnsupportedError:
        return Finding(rule="R12")
    finding = worst(outputs(subject, found, drawn.oracle()))
    if finding.is_wrong and _is_right_without(subject, drawn):
        text = "accepts what it does not declare, and computes something else: "
        text += finding.text or f"output is off by {finding.error:.3g}"
        return Finding(finding.error, text, "R12", "output", accepted=True)
    return Finding() if finding.is_wrong else dataclasses.replace(finding, rule="R12")


def _is_right_without(subject: Subject, drawn: Drawn) -> bool:
    """Whether calls of no features are right, and those of what core needs.

    Core may compute a feature by one that is declared, as causality by a mask. What is
    wrong in calls of that is told by the cases of its own rule.
    """
    kind, capabilities = subject.operation.kind, subject.capabilities
    given = {**drawn.arrays, **drawn.options}
    request = kind.bind("conform", given, subject.operation.metadata).request
    needed = kind.plan(request, capabilities).request.features - request.features
    calls = (AttentionCall(**call) for _, call in visibilities(full=False))
    of_needed = [call for call in calls if call.features and call.features <= needed]
    plain = AttentionCall(dtype=subject.call.dtype)
    of_needed = [dataclasses.replace(c, dtype=plain.dtype) for c in of_needed]
    return all(map(functools.partial(_is_right, subject), [plain, *of_needed]))


def _is_right(subject: Subject, call: AttentionCall) -> bool:
    other = dataclasses.replace(subject, call=call)
    drawn = other.draw()
    try:
        found = asking(other, drawn)
    except UnsupportedError:
        return True
    return not worst(outputs(other, found, drawn.oracle())).is_wrong


def check_underivable(subject: Subject) -> Finding:
    """The derivative of an argument that is not declared raises (R11)."""
    drawn = subject.draw()
    arrays = traced(drawn)
    declared = subject.capabilities.differentiable
    names = [n for n in drawn.floats if n not in declared]
    asking(subject, drawn)  # the call itself must not be what is refused
    for name in names:

        def loss(x: Any, name: str = name) -> Any:
            given = {**arrays, name: x}
            return subject.operation(**given, **drawn.options).attention_outputs.sum()

        try:
            jax.grad(loss)(arrays[name])
        except UnsupportedError:
            continue
        text = f"the derivative of {name} is not declared, and does not raise"
        return Finding(text=text, rule="R11", quantity=f"d_{name}", accepted=True)
    return Finding()
