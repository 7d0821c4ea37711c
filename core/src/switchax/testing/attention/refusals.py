"""What is not declared is refused, before any kernel starts."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from switchax.errors import UnsupportedError
from switchax.testing.suite import Finding, worst

from .calls import AttentionCall
from .programs import on_host, traced
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
    call = jax.jit(lambda a: subject.operation(**a, **drawn.options, **asked))
    try:
        found = on_host(call(traced(drawn)))
    except UnsupportedError:
        return Finding(rule="R12")
    finding = worst(outputs(subject, found, drawn.oracle()))
    if finding.is_wrong and _plain_is_right(subject):
        text = "accepts what it does not declare, and computes something else: "
        text += finding.text or f"output is off by {finding.error:.3g}"
        return Finding(finding.error, text, "R12", "output", accepted=True)
    return Finding() if finding.is_wrong else dataclasses.replace(finding, rule="R12")


def _plain_is_right(subject: Subject) -> bool:
    """Whether a call of no features is right; if not, others tell of that."""
    plain = dataclasses.replace(subject, call=AttentionCall(dtype=subject.call.dtype))
    drawn = plain.draw()
    try:
        found = asking(plain, drawn)
    except UnsupportedError:
        return True
    return not worst(outputs(plain, found, drawn.oracle())).is_wrong


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
