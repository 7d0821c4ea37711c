"""Transforms, meshes and calls in turn mean one call for each (R13)."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from switchax.errors import UnsupportedError
from switchax.target import current_target
from switchax.testing.suite import Finding, worst

from .calls import draw
from .programs import traced
from .subject import Subject, asking, cotangents

__all__ = [
    "check_forward_mode",
    "check_in_turn",
    "check_mesh",
    "check_second_order",
    "check_transforms",
]


def check_transforms(subject: Subject) -> Finding:
    """vmap, vmap of grad, remat, scan and no jit mean one call for each (R13)."""
    call, operation = subject.call, subject.operation
    drawn = [draw(dataclasses.replace(call, seed=s), dirty=False) for s in (0, 2)]
    names = [n for n in drawn[0].floats if n in subject.capabilities.differentiable]
    options = drawn[0].options
    both = {n: np.stack([d.arrays[n] for d in drawn]) for n in drawn[0].arrays}
    d_output, _ = cotangents(call, drawn[0])
    expected = [d.oracle().output for d in drawn]

    def output(arrays: Any) -> Any:
        return operation(**arrays, **options).attention_outputs

    def gradient(arrays: Any) -> Any:
        floats = {n: arrays[n] for n in names}
        _, pull = jax.vjp(lambda f: output({**arrays, **f}), floats)
        return pull(jnp.asarray(d_output))[0]

    stacked = {n: jnp.asarray(a) for n, a in both.items()}
    first = traced(drawn[0])
    findings = [
        subject.measure("output outside of jit", output(first), expected[0]),
        subject.measure(
            "output under vmap", jax.jit(jax.vmap(output))(stacked), np.stack(expected)
        ),
        subject.measure(
            "output under scan",
            jax.jit(lambda a: jax.lax.scan(lambda c, x: (c, output(x)), 0, a)[1])(
                stacked
            ),
            np.stack(expected),
        ),
    ]
    one = {**first, "query": stacked["query"]}
    axes = {n: 0 if n == "query" else None for n in first}
    mixed = [
        dataclasses.replace(
            drawn[0], arrays={**drawn[0].arrays, "query": d.arrays["query"]}
        )
        for d in drawn
    ]
    found = jax.jit(jax.vmap(output, in_axes=(axes,)))(one)
    wanted = np.stack([m.oracle().output for m in mixed])
    findings.append(subject.measure("output under vmap of query", found, wanted))
    if names:
        vjps = [d.oracle_vjp(d_output=d_output) for d in drawn]
        mapped = jax.jit(jax.vmap(gradient))(stacked)
        remat = jax.jit(
            jax.grad(
                lambda f: (
                    jax.checkpoint(lambda f: output({**first, **f}))(f) * d_output
                ).sum()
            )
        )({n: first[n] for n in names})
        for name in names:
            both_wanted = np.stack([v[name] for v in vjps])
            findings.append(
                subject.measure(f"d_{name} under vmap", mapped[name], both_wanted)
            )
            findings.append(
                subject.measure(f"d_{name} under remat", remat[name], vjps[0][name])
            )
    return worst(findings)


def check_in_turn(subject: Subject) -> Finding:
    """A second value or shape is not answered by what the first left behind (R13).

    A second value that is wrong, but not as the answer to the call before would be,
    is wrong by itself: then the finding is one of logits (R2).
    """
    call = subject.call
    longer = {"q_len": call.q_len + 2, "kv_len": call.kv_len + 3}
    changes: list[dict[str, Any]] = [{}, {"seed": call.seed + 4}, longer, {}]
    if call.scale is not None:
        changes.insert(1, {"scale": None})
    findings, before = [], call
    for change in changes:
        other = dataclasses.replace(call, **change)
        one = dataclasses.replace(subject, call=other)
        drawn = draw(other, dirty=False)
        found = asking(one, drawn).attention_outputs
        what = ", ".join(f"{n}={v!r}" for n, v in change.items()) or "its first value"
        what = f"output after a call with another {what}"
        finding = one.measure(what, found, drawn.oracle().output)
        if "scale" in change and finding.is_wrong:
            stale = dataclasses.replace(drawn, options=draw(before).options).oracle()
            if one.measure("", found, stale.output).is_wrong:
                finding = dataclasses.replace(finding, rule="R2", quantity="output")
        findings.append(finding)
        before = other
    return worst(findings)


def check_mesh(subject: Subject) -> Finding:
    """Split by batch and heads, values and gradients are those of one device."""
    call, drawn = subject.call, subject.draw()
    by_batch = min(2, jax.device_count())
    by_heads = min(2, jax.device_count() // by_batch)
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((by_batch, by_heads), ("dp", "tp"), kinds)
    names = [n for n in drawn.floats if n in subject.capabilities.differentiable]
    d_output, _ = cotangents(call, drawn)
    arrays = traced(drawn)

    def run(floats: Any) -> Any:
        def output(floats: Any) -> Any:
            given = {**arrays, **floats}
            return subject.operation(**given, **drawn.options).attention_outputs

        result, pull = jax.vjp(output, floats)
        return result, pull(jnp.asarray(d_output))[0] if names else {}

    with jax.set_mesh(mesh):
        found, gradients = jax.jit(run)({n: arrays[n] for n in names})
    findings = [subject.measure("output on a mesh", found, drawn.oracle().output)]
    if names:
        wanted = drawn.oracle_vjp(d_output=d_output)
        findings += [
            subject.measure(f"d_{n} on a mesh", gradients[n], wanted[n]) for n in names
        ]
    return worst(findings)


def check_forward_mode(subject: Subject) -> Finding:
    """Forward mode is right where it is declared, else it raises (R13)."""
    drawn = subject.draw()
    names = [n for n in drawn.floats if n in subject.capabilities.differentiable]
    if not names:
        return Finding()
    arrays = traced(drawn)
    rng = np.random.default_rng(7)
    tangents = {
        n: jnp.asarray(rng.normal(size=arrays[n].shape).astype(arrays[n].dtype))
        for n in names
    }

    def output(floats: Any) -> Any:
        given = {**arrays, **floats}
        return subject.operation(**given, **drawn.options).attention_outputs

    floats = {n: arrays[n] for n in names}
    where = current_target().platform
    declared = subject.capabilities.honours_derivative(where, "forward_mode")
    try:
        _, found = jax.jit(lambda f, t: jax.jvp(output, (f,), (t,)))(floats, tangents)
    except UnsupportedError:
        if not declared:
            return Finding()
        raise
    if not declared:
        text = "forward mode is not declared, and does not raise"
        return Finding(text=text, quantity="jvp", accepted=True)
    d_output, _ = cotangents(subject.call, drawn)
    wanted = drawn.oracle_vjp(d_output=d_output)
    expected = sum(
        float((wanted[n] * np.asarray(tangents[n], "float64")).sum()) for n in names
    )
    got = float((np.asarray(found, "float64") * d_output).sum())
    return subject.measure("jvp", np.array([got]), np.array([expected]), stored=12)


def check_second_order(subject: Subject) -> Finding:
    """A derivative of a derivative is right where it is declared, else it raises."""
    drawn = subject.draw()
    names = [n for n in ("query",) if n in subject.capabilities.differentiable]
    if not names:
        return Finding()
    arrays = traced(drawn)
    d_output, _ = cotangents(subject.call, drawn)
    rng = np.random.default_rng(7)
    direction = rng.normal(size=drawn.arrays["query"].shape)

    def gradient(query: Any) -> Any:
        def output(query: Any) -> Any:
            given = {**arrays, "query": query}
            return subject.operation(**given, **drawn.options).attention_outputs

        return jax.vjp(output, query)[1](jnp.asarray(d_output))[0]

    def along(query: Any) -> Any:
        return (gradient(query) * jnp.asarray(direction.astype(query.dtype))).sum()

    declared = subject.capabilities.honours_derivative(
        current_target().platform, "second_order"
    )
    try:
        found = jax.jit(jax.grad(along))(arrays["query"])
    except UnsupportedError:
        if not declared:
            return Finding()
        raise
    if not declared:
        text = "second derivatives are not declared, and do not raise"
        return Finding(text=text, quantity="second derivative", accepted=True)
    # The Hessian is symmetric: its product with the direction, by central differences.
    step = 1e-4
    query = drawn.arrays["query"].astype("float64")
    ends = [
        dataclasses.replace(
            drawn, arrays={**drawn.arrays, "query": query + sign * step * direction}
        ).oracle_vjp(d_output=d_output)["query"]
        for sign in (1, -1)
    ]
    expected = (ends[0] - ends[1]) / (2 * step)
    return subject.measure("second derivative", found, expected, stored=24)
