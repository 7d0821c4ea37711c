"""What is asked of one call: each check compares an operation with the oracle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from switchax.capabilities import Capabilities
from switchax.errors import UnsupportedError
from switchax.operation import BaseOperation
from switchax.target import current_target
from switchax.testing.differences import curvature, slope
from switchax.testing.running import jitted
from switchax.testing.suite import Finding, worst
from switchax.testing.tolerance import distance, farthest

from .calls import ArrayCall, Arrays, is_floating, moved

__all__ = ["CHECKS", "Subject"]

# Errors of n entries, each up to 1, meet a random direction of length 1: their sum has
# a deviation of at most 1 / sqrt(3), so this is five of them.
_SPREAD = 3.0
_DIRECTIONS = 4
# The largest of n normal numbers is rarely more than this many deviations.
_ENTRY = 8.0


@dataclasses.dataclass(frozen=True, eq=False)
class Subject:
    """An operation and a call, under check."""

    operation: BaseOperation
    call: ArrayCall
    roles: Mapping[str, str]
    programs: dict[Any, Any]
    alone: str = ""  # the one argument that is differentiated, if not all are

    @property
    def capabilities(self) -> Capabilities:
        """What the operation declares."""
        return type(self.operation).capabilities

    @property
    def differentiable(self) -> list[str]:
        """The arguments whose gradients are declared, or one of them alone."""
        declared = self.capabilities.differentiable
        arrays = self.call.arrays()
        names = [n for n, a in arrays.items() if is_floating(a) and n in declared]
        return [name for name in names if self.alone in ("", name)]

    def jitted(self, function: Callable[..., Any]) -> Any:
        """A method of this class under jit, kept for calls that differ in arrays."""
        options = sorted(self.call.options().items())
        of = (function.__name__, self.operation, repr(options), *self.differentiable)
        return self.programs.setdefault(of, jitted(function))

    def output(self, arrays: Arrays) -> Any:
        """What the operation returns."""
        return self.operation(**arrays, **self.call.options())

    def gradients(self, arrays: Arrays, cotangents: list[Any]) -> Any:
        """The outputs, and what is pulled back to each differentiable argument."""
        floats = {name: arrays[name] for name in self.differentiable}
        result, pull = jax.vjp(lambda f: self.output({**arrays, **f}), floats)
        leaves = map(jnp.asarray, cotangents)
        cotangent = jax.tree.unflatten(jax.tree.structure(result), leaves)
        return result, pull(cotangent)[0]

    def pulled_back(self, function: Callable[[Arrays], Any]) -> Callable[..., Any]:
        """The gradients of a function of arrays, for outputs of ones."""

        def gradients(arrays: Arrays) -> Any:
            floats = {name: arrays[name] for name in self.differentiable}
            outputs, pull = jax.vjp(lambda f: function({**arrays, **f}), floats)
            return pull(jax.tree.map(jnp.ones_like, outputs))

        return gradients

    def compare(self, what: str, got: Any, expected: Any, rule: str = "") -> Finding:
        """Compares outputs, one or a tree of arrays, with the oracle's."""
        found, wanted = jax.tree.leaves(got), jax.tree.leaves(expected)
        if len(found) != len(wanted):
            text = f"{what} is {len(found)} arrays, not {len(wanted)}"
            return Finding(math.inf, text, rule, what)
        limit = self.call.allowed()
        findings = []
        for number, pair in enumerate(zip(found, wanted, strict=True)):
            name = what if len(found) == 1 else f"{what} {number}"
            error, text = distance(*pair, limit)
            if text:
                findings.append(Finding(error, f"{name} {text}", rule, name))
                continue
            where = "" if error <= 1 else farthest(*pair)
            findings.append(Finding(error, "", rule, name, where=where))
        return worst(findings)

    def project(
        self, name: str, gradient: Any, cotangents: list[Any], call: ArrayCall
    ) -> Finding:
        """Holds one gradient, along random directions, against differences.

        Along a direction of length 1 a gradient of n entries has the size of one entry.
        So what may be off comes of what the differences are, however large an entry of
        the gradient that is held against them.
        """
        gradient, rule = np.asarray(gradient).astype("float64"), self.roles["gradient"]
        if not np.isfinite(gradient).all():
            text = f"d_{name} is not finite"
            return Finding(math.inf, text, rule, f"d_{name}")
        array = call.arrays()[name]
        if gradient.shape != array.shape:
            text = f"d_{name} has shape {gradient.shape}, not {array.shape}"
            return Finding(math.inf, text, rule, f"d_{name}")
        slopes, doubt, found = [], 0.0, []
        size = _norm_of_terms(cotangents, call.expected())
        for number in range(_DIRECTIONS):
            direction = _direction(call, name, number)

            def along(step: float, direction: Any = direction) -> float:
                moved = array.astype("float64") + step * direction
                return _product(cotangents, call.expected(**{name: moved}))

            expected, off = slope(along, size=size)
            slopes.append(float(expected))
            doubt = max(doubt, off)
            found.append(float((gradient * direction).sum()))
        entry = _ENTRY * math.sqrt(sum(x * x for x in slopes) / _DIRECTIONS)
        entry = min(entry, float(np.abs(gradient).max(initial=0)))
        limit = _SPREAD * call.allowed() * max(entry, 1.0) + doubt
        error = max(abs(a - b) for a, b in zip(found, slopes, strict=True)) / limit
        return Finding(error, rule=rule, quantity=f"d_{name}")


def _direction(call: ArrayCall, name: str, number: int = 0) -> Any:
    """A random direction of length 1 in the space of one argument."""
    rng = np.random.default_rng([call.seed, len(name), 7 + number])
    direction = rng.normal(size=call.arrays()[name].shape)
    return direction / max(float(np.linalg.norm(direction)), 1e-300)


def _cotangents(call: ArrayCall) -> list[Any]:
    rng = np.random.default_rng([call.seed, 3])
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(call.expected())]
    return [rng.normal(size=shape).astype(call.output_dtype) for shape in shapes]


def _product(cotangents: list[Any], outputs: Any) -> float:
    pairs = zip(cotangents, jax.tree.leaves(outputs), strict=True)
    return sum(float((c.astype("float64") * out).sum()) for c, out in pairs)


def _norm_of_terms(cotangents: list[Any], outputs: Any) -> float:
    """Returns the Euclidean norm of what `_product` adds up."""
    pairs = zip(cotangents, jax.tree.leaves(outputs), strict=True)
    return math.sqrt(
        sum(float(((c.astype("float64") * out) ** 2).sum()) for c, out in pairs)
    )


def _traced(arrays: Arrays) -> Arrays:
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def check_value(subject: Subject) -> Finding:
    """Output and dtype under jit; then the output under autodiff, and gradients."""
    call, expected = subject.call, subject.call.expected()
    arrays = _traced(call.arrays())
    found = subject.jitted(subject.output)(arrays)
    for leaf in jax.tree.leaves(found):
        if leaf.dtype != call.output_dtype:
            text = f"output is of dtype {leaf.dtype}, not {call.output_dtype}"
            return Finding(math.inf, text, subject.roles["dtype"], "dtype")
    finding = subject.compare("output", found, expected)
    if finding.is_wrong or not subject.differentiable:
        return finding
    cotangents = _cotangents(call)
    again, gradients = subject.jitted(subject.gradients)(arrays, cotangents)
    rule = subject.roles["gradient"]
    findings = [
        finding,
        subject.compare("output under autodiff", again, expected, rule),
    ]
    for name, gradient in gradients.items():
        if gradient.dtype != call.arrays()[name].dtype:
            text = f"d_{name} is of dtype {gradient.dtype}"
            return Finding(math.inf, text, rule, f"d_{name}")
        findings.append(subject.project(name, gradient, cotangents, call))
    return worst(findings)


def check_refused(subject: Subject) -> Finding:
    """Refused before a forward method starts, or adapted and right."""
    arrays = _traced(subject.call.arrays())
    try:
        found = jitted(subject.output)(arrays)
    except UnsupportedError:
        return Finding()
    finding = subject.compare("output", found, subject.call.expected())
    if finding.is_wrong:
        text = "accepts what it does not declare, and computes something else: "
        text += finding.text or f"output is off by {finding.error:.3g} times what "
        text += "" if finding.text else "rounding explains"
        return Finding(finding.error, text, quantity="output", accepted=True)
    return finding


def check_keywords(subject: Subject) -> Finding:
    """An unknown keyword is a TypeError that names it."""
    call = subject.call
    try:
        subject.operation(**call.arrays(), **call.options(), no_such_keyword=True)
    except TypeError as error:
        if "no_such_keyword" in str(error):
            return Finding()
        text = f"an unknown keyword raises a TypeError that does not name it: {error}"
        return Finding(text=text, quantity="keyword")
    return Finding(
        text="an unknown keyword is swallowed", quantity="keyword", accepted=True
    )


def check_underivable(subject: Subject) -> Finding:
    """The derivative of a floating argument that is not declared raises."""
    arrays = _traced(subject.call.arrays())
    declared = subject.differentiable
    for name, array in arrays.items():
        if name in declared or not is_floating(array):
            continue

        def loss(x: Any, name: str = name) -> Any:
            outputs = jax.tree.leaves(subject.output({**arrays, name: x}))
            return sum(output.astype("float32").sum() for output in outputs)

        try:
            jax.grad(loss)(array)
        except UnsupportedError:
            continue
        text = f"the derivative of {name} is not declared, and does not raise"
        return Finding(text=text, quantity=f"d_{name}", accepted=True)
    return Finding()


def check_transforms(subject: Subject) -> Finding:
    """No jit, vmap over any axes, and vmap of a gradient mean one call for each.

    So does the gradient of one argument alone.
    """
    calls: list[Any] = [subject.call, moved(subject.call, subject.call.dtype, 1)]
    draws = [call.arrays() for call in calls]
    one = _traced(draws[0])
    both = _traced({name: np.stack([d[name] for d in draws]) for name in one})
    floats = {name: array for name, array in both.items() if is_floating(array)}
    places = {
        name: index % array.ndim for index, (name, array) in enumerate(floats.items())
    }
    axes = dict.fromkeys(one) | places
    turned = {n: jnp.moveaxis(array, 0, places[n]) for n, array in floats.items()}
    shared = {name: draws[1][name] for name in floats}
    stacked = jax.tree.map(lambda *a: np.stack(a), *(c.expected() for c in calls))
    mixed = [calls[0].expected(), calls[0].expected(**shared)]
    findings = [
        subject.compare(
            "output outside of jit", subject.output(one), calls[0].expected()
        ),
        subject.compare(
            "output under vmap", jitted(jax.vmap(subject.output))(both), stacked
        ),
        subject.compare(
            "output under vmap of the floating arrays",
            jitted(jax.vmap(subject.output, in_axes=(axes,)))({**one, **turned}),
            jax.tree.map(lambda *a: np.stack(a), *mixed),
        ),
    ]
    if subject.differentiable:
        cotangents = _cotangents(calls[0])
        findings += _alone(subject, one, cotangents)
        mapped = jax.vmap(lambda arrays: subject.gradients(arrays, cotangents)[1])
        for name, gradients in jitted(mapped)(both).items():
            for call, gradient in zip(calls, gradients, strict=True):
                found = subject.project(name, gradient, cotangents, call)
                what = f"d_{name} under vmap"
                text = found.text.replace(f"d_{name}", what)
                findings.append(Finding(found.error, text, quantity=what))
    return worst(findings)


def _alone(subject: Subject, arrays: Arrays, cotangents: list[Any]) -> list[Finding]:
    """The gradient of each argument where no other is asked for."""
    findings = []
    for name in subject.differentiable if len(subject.differentiable) > 1 else ():
        only = dataclasses.replace(subject, alone=name)
        gradient = jitted(only.gradients)(arrays, cotangents)[1][name]
        found = subject.project(name, gradient, cotangents, subject.call)
        text = found.text.replace(f"d_{name}", f"d_{name} alone")
        findings.append(Finding(found.error, text, quantity=f"d_{name} alone"))
    return findings


def check_in_turn(subject: Subject) -> Finding:
    """A second value is not answered by what the first left behind."""
    calls: list[Any] = [subject.call, moved(subject.call, subject.call.dtype, 2)]
    findings = []
    for call in (*calls, calls[0]):
        found = subject.output(_traced(call.arrays()))
        what = "output after another call"
        findings.append(subject.compare(what, found, call.expected()))
    return worst(findings)


def check_mesh(subject: Subject) -> Finding:
    """On a mesh, outputs and gradients are those of one device."""
    call = subject.call
    mesh = jax.make_mesh((2,), ("dp",), (jax.sharding.AxisType.Auto,))
    arrays = _traced(call.arrays())
    cotangents = _cotangents(call)
    with jax.set_mesh(mesh):
        found = jitted(subject.output)(arrays)
        gradients = {}
        if subject.differentiable:
            gradients = jitted(subject.gradients)(arrays, cotangents)[1]
    findings = [subject.compare("output on a mesh", found, call.expected())]
    for name, gradient in gradients.items():
        findings.append(subject.project(name, gradient, cotangents, call))
    return worst(findings)


def check_forward_mode(subject: Subject) -> Finding:
    """A jvp is right where it is declared, else it raises."""

    def right(name: str) -> Finding:
        call, arrays = subject.call, subject.call.arrays()
        direction = _direction(call, name).astype(call.dtype)

        def along(x: Any, tangent: Any) -> Any:
            given = _traced({**arrays, name: x})
            return jax.jvp(
                lambda x: subject.output({**given, name: x}), (x,), (tangent,)
            )[1]

        found = jitted(along)(jnp.asarray(arrays[name]), jnp.asarray(direction))
        array, wide = arrays[name].astype("float64"), direction.astype("float64")
        cotangents = _cotangents(call)
        wanted, doubt = slope(
            lambda step: _product(
                cotangents, call.expected(**{name: array + step * wide})
            ),
            size=_norm_of_terms(cotangents, call.expected()),
        )
        got = _product(
            cotangents, jax.tree.map(lambda t: np.asarray(t, "float64"), found)
        )
        size = math.sqrt(
            sum(float((c.astype("float64") ** 2).sum()) for c in cotangents)
        )
        limit = _SPREAD * call.allowed() * max(size, 1.0) + doubt
        return Finding(abs(got - float(wanted)) / limit, quantity=f"jvp of {name}")

    return _where_declared(subject, "forward_mode", "forward mode", right)


def check_second_order(subject: Subject) -> Finding:
    """A derivative of a derivative is right where it is declared, else it raises."""

    def right(name: str) -> Finding:
        call, arrays = subject.call, _traced(subject.call.arrays())
        direction, cotangents = _direction(call, name), _cotangents(call)
        tangent = jnp.asarray(direction.astype(call.dtype))

        # The loss has a square, so that what is linear has a second derivative too.
        def along(x: Any) -> Any:
            given = {**arrays, name: x}
            outputs = jax.tree.leaves(subject.output(given))
            pairs = zip(cotangents, outputs, strict=True)
            pulled = [jnp.asarray(c) + out.astype(c.dtype) for c, out in pairs]
            gradient = subject.gradients(given, pulled)[1][name]
            return (gradient * tangent).sum()

        def loss(step: float) -> float:
            moved = {name: array + step * direction}
            outputs = jax.tree.leaves(call.expected(**moved))
            squares = sum(float((out**2).sum()) for out in outputs)
            return _product(cotangents, outputs) + squares / 2

        found = np.asarray(jitted(jax.grad(along))(arrays[name])).astype("float64")
        array = call.arrays()[name].astype("float64")
        # The terms of a loss may cancel, their rounding does not.
        middle = jax.tree.leaves(call.expected())
        size = sum(float((x**2).sum()) / 2 for x in middle)
        size += _product([abs(c) for c in cotangents], [abs(x) for x in middle])
        wanted, doubt = curvature(loss, size)
        largest = max(float(np.abs(found).max(initial=0)), 1.0)
        limit = 4 * _SPREAD * call.allowed() * largest + doubt
        error = abs(float((found * direction).sum()) - float(wanted)) / limit
        return Finding(error, quantity=f"second derivative of {name}")

    return _where_declared(subject, "second_order", "a second derivative", right)


def _where_declared(
    subject: Subject, which: str, what: str, right: Callable[[str], Finding]
) -> Finding:
    platform = current_target().platform
    declared = subject.capabilities.honours_derivative(platform, which)
    if not subject.differentiable:
        return Finding()
    try:
        findings = [right(name) for name in subject.differentiable]
    except UnsupportedError:
        if not declared:
            return Finding()
        raise
    if not declared:
        text = f"{what} is not declared, and does not raise"
        return Finding(text=text, quantity=what, accepted=True)
    return worst(findings)


CHECKS: dict[str, Callable[[Subject], Finding]] = {
    "value": check_value,
    "refused": check_refused,
    "keywords": check_keywords,
    "underivable": check_underivable,
    "transforms": check_transforms,
    "in turn": check_in_turn,
    "mesh": check_mesh,
    "forward mode": check_forward_mode,
    "second order": check_second_order,
}
