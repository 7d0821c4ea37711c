"""Transforms and meshes mean one call for each (R13)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from switchax.errors import UnsupportedError
from switchax.sharding import as_spec
from switchax.target import current_target
from switchax.testing.differences import slope
from switchax.testing.running import jitted
from switchax.testing.suite import Finding, worst
from switchax.testing.tolerance import allowed

from .calls import Drawn, draw, largest_logit
from .gradients import as_stacked, gradient_findings, result_findings
from .programs import traced
from .subject import (
    Subject,
    asking,
    cotangents,
    fields_of,
    of_oracle,
    pulled,
    results_of,
)

__all__ = [
    "check_forward_mode",
    "check_mapped",
    "check_mapped_dropout",
    "check_mapped_operands",
    "check_mesh",
    "check_second_order",
    "check_sequence_mesh",
    "check_shard_map",
    "check_transforms",
]

Arrays = dict[str, Any]

_OPERANDS = ("query", "key", "value")
_STEP = 2.0**-12  # of differences of gradients, in units of the operands


def check_transforms(subject: Subject) -> Finding:
    """vmap, vmap of grad, remat, scan and no jit mean one call for each (R13)."""
    drawn = _two(subject)
    names = subject.derived(drawn[0])
    fields, derived, given = _asked(subject, drawn)
    everything = _axes(drawn[0], drawn[0].arrays, varied=False)
    first, both = traced(drawn[0]), _stacked(drawn, everything)

    def results(arrays: Arrays, fields: Iterable[str] = fields) -> Any:
        return results_of(subject, drawn[0], arrays, *fields)

    def gradient(arrays: Arrays, use: Any = lambda function: function) -> Any:
        floats = {n: arrays[n] for n in names}
        return pulled(use(lambda f: results({**arrays, **f}, derived)), floats, given)

    scanned = jitted(lambda a: jax.lax.scan(lambda c, x: (c, results(x)), 0, a)[1])
    plain = as_stacked(results(first))
    findings = [
        *result_findings(subject, drawn[:1], plain, "outside of jit"),
        *result_findings(subject, drawn, scanned(both), "under scan"),
        *_mapped(subject, drawn, drawn[0].arrays),
        *_mapped(subject, drawn, ["query"]),
        *_mapped(subject, drawn, ["key"], varied=True),
        *_mapped(subject, drawn, ["value"], varied=True),
    ]
    if names and not worst(findings).is_wrong:
        try:
            mapped = jitted(jax.vmap(gradient))(both)
            remat = jitted(lambda a: gradient(a, jax.checkpoint))(first)
        except UnsupportedError as error:
            return subject.refused("derivatives under vmap and remat", error, "R13")
        findings += gradient_findings(subject, drawn, given, mapped, "under vmap")
        once = as_stacked(remat)
        findings += gradient_findings(subject, drawn[:1], given, once, "under remat")
    return worst(findings)


def check_mapped(subject: Subject) -> Finding:
    """Vmap over everything, and over all but query, key and value (R13).

    Over everything, the axis that is mapped is another of each argument, and gradients
    are asked for too.
    """
    drawn = _two(subject)
    first = drawn[0].arrays
    others = first.keys() - set(_OPERANDS)
    findings = _mapped(subject, drawn, first, varied=True)
    findings += _mapped(subject, drawn, others) if others else []
    if worst(findings).is_wrong:
        return worst(findings)
    return worst([*findings, *_mapped_gradients(subject, drawn, first, varied=True)])


def check_mapped_operands(subject: Subject) -> Finding:
    """Vmap over query, key and value, which share all else; gradients too (R13).

    And over query alone, where each example has its own gradient of the shared key.
    """
    drawn = _two(subject)
    findings = _mapped(subject, drawn, _OPERANDS)
    if worst(findings).is_wrong:
        return worst(findings)
    for names in (_OPERANDS, _OPERANDS[:1]):
        findings += _mapped_gradients(subject, drawn, names)
    return worst(findings)


def check_mapped_dropout(subject: Subject) -> Finding:
    """Vmap over keys of dropout drops for each what it drops by itself (R10, R13).

    Backward as well.
    """
    drawn = draw(subject.call, dirty=False)
    arrays, names = traced(drawn), subject.derived(drawn)
    keys = jax.random.split(jax.random.key(subject.call.seed), 2)
    given = cotangents(subject.call, drawn)

    def results(key: Any) -> Any:
        def output(floats: Any) -> Any:
            return results_of(
                subject, drawn, {**arrays, "dropout_key": key, **floats}, *given
            )

        floats = {n: arrays[n] for n in names}
        if not names:
            return output(floats), {}
        return pulled(output, floats, given)

    one = jitted(results)
    alone = jax.tree.map(lambda *x: np.stack(x), *(one(key) for key in keys))
    mapped = jitted(jax.vmap(results))(keys)
    findings = []
    for of, got, wanted in zip(("", "d_"), mapped, alone, strict=True):
        for name in wanted:
            what = "output" if not of else f"d_{name}"
            what += " under vmap of dropout_key"
            findings.append(subject.measure(what, got[name], wanted[name]))
    return worst(findings)


def _asked(
    subject: Subject, drawn: list[Drawn]
) -> tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]:
    """The outputs to ask for, those to derive, and the cotangents of these."""
    first, *others = drawn
    fields, derived = (fields_of(subject, first, derived=d) for d in (False, True))
    return fields, derived, cotangents(subject.call, first, derived, others)


def _two(subject: Subject) -> list[Drawn]:
    """Two calls that differ in their arrays only."""
    call = subject.call
    seeds = (call.seed, call.seed + 2)
    return [draw(dataclasses.replace(call, seed=s), dirty=False) for s in seeds]


def _axes(drawn: Drawn, names: Iterable[str], varied: bool) -> dict[str, int]:
    """The axis of each argument that is mapped over: the first, or another of each."""
    return {
        name: index % (1 + np.ndim(drawn.arrays[name])) if varied else 0
        for index, name in enumerate(sorted(names))
    }


def _stacked(drawn: list[Drawn], axes: Mapping[str, int]) -> Arrays:
    return {
        n: jnp.stack([jnp.asarray(d.arrays[n]) for d in drawn], axis)
        for n, axis in axes.items()
    }


def _mapped(
    subject: Subject, drawn: list[Drawn], names: Iterable[str], varied: bool = False
) -> list[Finding]:
    """Vmap over some arguments, the others being those of the first call."""
    first = drawn[0]
    fields = fields_of(subject, first, derived=False)

    def results(arrays: Arrays) -> Any:
        return results_of(subject, first, arrays, *fields)

    found = _under_vmap(results, drawn, names, varied)
    how = _how_mapped(first, names)
    return result_findings(subject, _mixed(drawn, names), found, how)


def _mapped_gradients(
    subject: Subject, drawn: list[Drawn], names: Iterable[str], varied: bool = False
) -> list[Finding]:
    """Likewise of every gradient that is declared."""
    first, mixed = drawn[0], _mixed(drawn, names)
    of = subject.derived(first)
    if not of:
        return []
    _, derived, given = _asked(subject, mixed)

    def gradient(arrays: Arrays) -> Any:
        rest = {n: a for n, a in arrays.items() if n not in of}

        def results(floats: Any) -> Any:
            return results_of(subject, first, {**rest, **floats}, *derived)

        return pulled(results, {n: arrays[n] for n in of}, given)

    try:
        found = _under_vmap(gradient, drawn, names, varied)
    except UnsupportedError as error:
        return [subject.refused("derivatives under vmap", error, "R13")]
    how = _how_mapped(first, names)
    return gradient_findings(subject, mixed, given, found, how)


def _under_vmap(
    function: Callable[[Arrays], Any],
    drawn: list[Drawn],
    names: Iterable[str],
    varied: bool,
) -> Any:
    mapped_axes = _axes(drawn[0], names, varied)
    axes = dict.fromkeys(drawn[0].arrays) | mapped_axes
    both = {**traced(drawn[0]), **_stacked(drawn, mapped_axes)}
    return jitted(jax.vmap(function, in_axes=(axes,)))(both)


def _mixed(drawn: list[Drawn], names: Iterable[str]) -> list[Drawn]:
    """The calls that are asked where some arguments are mapped over."""
    first = drawn[0]
    return [
        dataclasses.replace(first, arrays={**first.arrays, **kept})
        for kept in ({n: d.arrays[n] for n in names} for d in drawn)
    ]


def _how_mapped(drawn: Drawn, names: Iterable[str]) -> str:
    whole = set(names) == set(drawn.arrays)
    return "under vmap" + ("" if whole else f" of {', '.join(sorted(names))}")


def check_mesh(subject: Subject) -> Finding:
    """Split by batch and heads, values and gradients are those of one device."""
    return _on_a_mesh(subject, "dp", "tp")


def check_sequence_mesh(subject: Subject) -> Finding:
    """Split by batch and length likewise, or refused."""
    try:
        return _on_a_mesh(subject, "fsdp", "sp")
    except UnsupportedError:
        return Finding()


def _on_a_mesh(subject: Subject, *axes: str) -> Finding:
    drawn = subject.draw()
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), axes, kinds)
    names = subject.derived(drawn)
    _, derived, given = _asked(subject, [drawn])
    arrays = traced(drawn)

    def run(floats: Any) -> Any:
        def results(floats: Any) -> Any:
            return results_of(subject, drawn, {**arrays, **floats}, *derived)

        return pulled(results, floats, given)

    with jax.set_mesh(mesh):
        found, gradients = jitted(run)({n: arrays[n] for n in names})
    once = as_stacked((found, gradients))
    return worst(gradient_findings(subject, [drawn], given, once, "on a mesh"))


def check_shard_map(subject: Subject) -> Finding:
    """Within a `jax.shard_map` of the user's, each device computes its samples.

    Of calls whose arrays are query, key and value alone, and what an operation needs
    beside. Its own check of what varies over devices is off for opaque kernels: Pallas
    cannot be traced with it.
    """
    drawn = subject.draw()
    names = subject.derived(drawn)
    _, derived, given = _asked(subject, [drawn])
    arrays, call = traced(drawn), subject.call
    # Where samples cannot be split, each device computes all of it.
    is_split = call.layout != "thd" and call.batch % 2 == 0
    split, whole = as_spec(("dp",) if is_split else ()), as_spec(())
    # What has no samples: sinks, keys, an offset that all share.
    given_whole = {n for n, x in arrays.items() if not np.ndim(x)}
    given_whole |= {"softmax_aux", "dropout_key"}
    mesh = jax.make_mesh((2,), ("dp",), (jax.sharding.AxisType.Auto,))
    compute: Any = jax.shard_map(
        lambda arrays: results_of(subject, drawn, arrays, *derived),
        mesh=mesh,
        in_specs=({n: whole if n in given_whole else split for n in arrays},),
        out_specs=split,
        check_vma=not subject.capabilities.opaque,
    )

    def run(floats: Any) -> Any:
        return pulled(lambda f: compute({**arrays, **f}), floats, given)

    found, gradients = jitted(run)({n: arrays[n] for n in names})
    once = as_stacked((found, gradients))
    return worst(gradient_findings(subject, [drawn], given, once, "within shard_map"))


def check_forward_mode(subject: Subject) -> Finding:
    """Forward mode is right where it is declared, else it raises (R13)."""
    drawn = subject.draw()
    names = subject.derived(drawn)
    asking(subject, drawn)
    if not names:
        return Finding()
    arrays, tangents = traced(drawn), _directions(drawn, names)
    _, derived, given = _asked(subject, [drawn])

    def results(floats: Any) -> Any:
        return results_of(subject, drawn, {**arrays, **floats}, *derived)

    floats = {n: arrays[n] for n in names}
    turned = {n: jnp.asarray(t) for n, t in tangents.items()}
    declared = _declares(subject, "forward_mode")
    try:
        _, found = jitted(lambda f, t: jax.jvp(results, (f,), (t,)))(floats, turned)
    except UnsupportedError as error:
        return subject.refused("forward mode", error, "R13") if declared else Finding()
    if not declared:
        text = "forward mode is not declared, and does not raise"
        return Finding(text=text, quantity="jvp", accepted=True)
    wanted = drawn.oracle_vjp(**of_oracle(given))
    expected = sum(
        float((wanted[n] * tangents[n].astype("float64")).sum()) for n in names
    )
    # Of a row that sees nothing lse is -inf, and its cotangent 0.
    got = sum(
        float((np.where(a != 0, np.asarray(found[f], "float64"), 0) * a).sum())
        for f, a in given.items()
    )
    # Entries err independently of each other, so their sum does by the norm of what it
    # weighs them with.
    growth = largest_logit(subject.call, drawn)
    errors = [
        allowed(subject.call.dtype, growth, stored=12)
        * max(float(np.abs(np.asarray(found[f], "float64")[a != 0]).max(initial=0)), 1)
        * float(np.linalg.norm(a.astype("float64")))
        for f, a in given.items()
    ]
    return subject.measure(
        "jvp", np.array([got]), np.array([expected]), stored=12, slack=sum(errors)
    )


def check_second_order(subject: Subject) -> Finding:
    """A derivative of a derivative is right where it is declared, else it raises."""
    drawn = subject.draw()
    names = subject.derived(drawn)
    asking(subject, drawn)
    if not names:
        return Finding()
    arrays, directions = traced(drawn), _directions(drawn, names)
    _, _, given = _asked(subject, [drawn])

    def along(floats: Any) -> Any:
        def output(floats: Any) -> Any:
            return results_of(subject, drawn, {**arrays, **floats}, *given)

        gradients = pulled(output, floats, given)[1]
        return sum((gradients[n] * jnp.asarray(directions[n])).sum() for n in names)

    declared = _declares(subject, "second_order")
    try:
        found = jitted(jax.grad(along))({n: arrays[n] for n in names})
    except UnsupportedError as error:
        what = "second derivatives"
        return subject.refused(what, error, "R13") if declared else Finding()
    if not declared:
        text = "second derivatives are not declared, and do not raise"
        return Finding(text=text, quantity="second derivative", accepted=True)

    # The Hessian is symmetric: its product with the directions, by differences.
    def gradient_at(step: float) -> Arrays:
        moved = {
            n: drawn.arrays[n].astype("float64") + step * directions[n] for n in names
        }
        at = dataclasses.replace(drawn, arrays={**drawn.arrays, **moved})
        return at.oracle_vjp(**of_oracle(given))

    gradient_at = functools.cache(gradient_at)

    def right(name: str) -> Finding:
        wanted, doubt = slope(lambda step: gradient_at(step)[name], _STEP)
        what = f"second derivative by {name}"
        return subject.measure(what, found[name], wanted, stored=24, slack=doubt)

    return worst(map(right, names))


def _directions(drawn: Drawn, names: list[str]) -> Arrays:
    rng = np.random.default_rng(7)
    shapes = {n: (drawn.arrays[n].shape, drawn.arrays[n].dtype) for n in names}
    return {n: rng.normal(size=s).astype(d) for n, (s, d) in shapes.items()}


def _declares(subject: Subject, which: str) -> bool:
    platform = current_target().platform
    return subject.capabilities.honours_derivative(platform, which)
