"""A suite for kinds that map arrays to arrays, made of the kind's own calls.

A kind of one's own derives `ArrayCall`, which draws the values of a call, and
`ArraySuite`, which lists calls by rule. From these and the kind's float64 oracle come
the cases: what is declared must be right, under autodiff too, and the rest refused.

    @dataclasses.dataclass(frozen=True)
    class ScaleCall(ArrayCall):
        kind = SCALE
        dtype: str = "float32"
        seed: int = 0
        length: int = 5

        def arrays(self):
            x = np.random.default_rng(self.seed).normal(size=self.length)
            return {"x": x.astype(self.dtype)}

    class ScaleSuite(ArraySuite):
        rules = {"S1": "x is doubled", "S2": "gradients", "S3": "refusals", ...}
        roles = {"gradient": "S2", "refusal": "S3", ...}

        def calls(self, level):
            yield "S1", ScaleCall()
            yield "S1", ScaleCall(length=129)
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from switchax.capabilities import Capabilities
from switchax.errors import UnsupportedError
from switchax.kind import OperationKind
from switchax.operation import BaseOperation, defined_methods
from switchax.target import Target, current_target

from .attention.tolerance import allowed, distance
from .lowered import lower_for
from .suite import Case, Finding, Suite, fields_that_differ

__all__ = ["ROLES", "ArrayCall", "ArrayCase", "ArraySuite", "curvature", "slope"]

ROLES = ("dtype", "precision", "gradient", "refusal", "transforms")

# Of central differences in float64: with the step halved once and extrapolated, what
# is cut off is of order step**4, and rounding is some 2**-50 / step.
_STEP = 2.0**-8
# Errors of n entries, each up to 1, meet a random direction of length 1: their sum has
# a deviation of at most 1 / sqrt(3), so this is five of them.
_SPREAD = 3.0
_DTYPES = ("float32", "bfloat16", "float16", "float64")  # the first is asked most

Arrays = dict[str, Any]


class ArrayCall(abc.ABC):
    """One call of a kind without its values; derive a frozen dataclass.

    Attributes:
        kind: The kind, whose `oracle` takes what a call takes.
        smaller: For a field, values from the simplest on; a failing call is made
            smaller by those before its own.
        stored: How many times something is rounded to `dtype` on the way.
        dtype: Of the floating arrays.
        seed: Of the values.
    """

    kind: ClassVar[OperationKind]
    smaller: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    stored: ClassVar[int] = 1
    dtype: str
    seed: int

    @abc.abstractmethod
    def arrays(self) -> Arrays:
        """Draws the array arguments, numpy, by name; a seed changes no shape."""

    def options(self) -> dict[str, Any]:
        """Returns the other arguments, whatever the seed; none by default."""
        return {}

    @property
    def growth(self) -> float:
        """The largest number whose rounding error is one of the result; 0 by default.

        Such as a logit that goes through exp, or an angle that goes through cos: an
        error of some units of it is one of some units of the result.
        """
        return 0.0

    @property
    def output_dtype(self) -> str:
        """Dtype of the outputs; that of the call by default."""
        return self.dtype

    @property
    def features(self) -> frozenset[str]:
        """The features that the call uses, by the kind."""
        with _wide_types(self.dtype):
            shapes = {
                name: jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]
                for name, array in self.arrays().items()
            }
            return self.kind.request(**shapes, **self.options()).features

    def expected(self, **changed: Any) -> Any:
        """Returns what the oracle says of the call, in float64.

        Args:
            **changed: Arrays that take the place of those drawn.
        """
        arrays = {**self.arrays(), **changed}
        wide = {n: a.astype("float64") if _floats(a) else a for n, a in arrays.items()}
        return self.kind.oracle(**wide, **self.options())

    def allowed(self) -> float:
        """Returns the error allowed, in units of the largest entry (or 1, if less)."""
        return allowed(self.dtype, self.growth, self.stored)

    def simpler(self) -> Iterator[ArrayCall]:
        """Yields calls with one field nearer to the simplest, by `smaller`."""
        call: Any = self
        for name, values in self.smaller.items():
            now = getattr(self, name)
            end = values.index(now) if now in values else len(values)
            for value in values[:end]:
                yield dataclasses.replace(call, **{name: value})

    def __str__(self) -> str:
        changed = fields_that_differ(self).items()
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in changed)})"


@dataclasses.dataclass(frozen=True)
class ArrayCase(Case):
    """One call, and what is asked of it.

    Attributes:
        rule: The rule that it is about.
        call: The call.
        check: "value", "refused", "keywords", "underivable", "transforms",
            "forward mode" or "second order".
        roles: The rules of what every kind is asked; see `ArraySuite`.
        programs: Jitted functions, shared by the cases of one run.
    """

    rule: str
    call: ArrayCall
    check: str = "value"
    roles: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(ROLES, ""), compare=False, repr=False
    )
    programs: dict[Any, Any] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def title(self) -> str:  # type: ignore[override]
        """The check and the call."""
        return f"{self.check}, {self.call}"

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """Dtype of the call."""
        return self.call.dtype

    @property
    def claims(self) -> frozenset[str]:  # type: ignore[override]
        """The call's features, where they are declared."""
        return frozenset() if self.check == "refused" else self.call.features

    def run(self, operation: BaseOperation) -> Finding:
        """Runs the check."""
        with _wide_types(self.dtype):
            subject = _Subject(operation, self.call, self.roles, self.programs)
            return _CHECKS[self.check](subject)

    def lower(self, operation: BaseOperation, target: Target) -> Finding:
        """Compiles the call and its gradient; what needs values is passed over."""
        if self.check not in ("value", "refused"):
            return Finding()
        arguments = {**self.call.arrays(), **self.call.options()}
        with _wide_types(self.dtype):
            try:
                lower_for(operation, arguments, target)
            except UnsupportedError:
                if self.check == "refused":
                    return Finding()
                raise
            subject = _Subject(operation, self.call, self.roles, self.programs)
            if subject.differentiable and self.check == "value":
                lower_for(operation, arguments, target, subject.pulled_back)
        return Finding()

    def simpler(self) -> Iterator[Case]:
        """Yields cases of simpler calls."""
        for call in self.call.simpler():
            yield dataclasses.replace(self, call=call)

    def snippet(self, name: str) -> str:
        """Returns Python that shows both results, or runs the case again."""
        call = type(self.call)
        lines = [
            "import numpy as np",
            "from switchax import OperationRegistry",
            "from switchax.testing.arrays import ArrayCase",
            f"from {call.__module__} import {call.__qualname__}",
            "",
            f"call = {self.call}",
            f"operation = OperationRegistry.create({name!r})",
        ]
        if self.check == "value":
            lines += [
                "found = operation(**call.arrays(), **call.options())",
                "print(abs(np.asarray(found, 'float64') - call.expected()).max())",
            ]
            del lines[2]
        else:
            case = f"ArrayCase({self.rule!r}, call, {self.check!r})"
            lines += [f"print({case}.run(operation))"]
            del lines[0]
        return "\n".join(lines)


class ArraySuite(Suite):
    """The cases of a kind that maps arrays to arrays, from a list of calls.

    A call that uses only what an operation declares must be right: output, dtype,
    gradients. Any other must be refused before a forward method starts. Each dtype
    is held likewise, and transforms, unknown keywords and undeclared derivatives.

    Attributes:
        rules: One line for each rule.
        roles: For each of `ROLES`, the rule of the kind that it falls under.
    """

    roles: ClassVar[Mapping[str, str]]

    @abc.abstractmethod
    def calls(self, level: str) -> Iterable[tuple[str, ArrayCall]]:
        """Yields calls with the rule that each is about, the simplest first.

        The first uses no feature. For each feature of the kind there should be one
        that uses no other. Those of the rule of "precision" are asked in every dtype,
        and at level "full" all.

        Args:
            level: "quick" or "full".
        """

    def cases(
        self, operation: type[BaseOperation], platform: str, level: str, seed: int
    ) -> Iterator[ArrayCase]:
        """Yields the cases; see `Suite.cases`."""
        yield from self._sharing(self._cases(operation.capabilities, level, seed))

    def _cases(
        self, capabilities: Capabilities, level: str, seed: int
    ) -> Iterator[ArrayCase]:
        declared = [dtype for dtype in _DTYPES if dtype in capabilities.dtypes]
        calls = [
            (rule, _moved(call, declared[0], seed)) for rule, call in self.calls(level)
        ]
        first = calls[0][1]
        for rule, call in calls:
            if call.features <= capabilities.features:
                yield self._case(rule, call)
        for dtype in declared[1:]:
            for rule, call in calls:
                asked = level == "full" or rule == self.roles["precision"]
                other = _moved(call, dtype)
                if (asked or call is first) and call.features <= capabilities.features:
                    yield self._case(self.roles["precision"], other)
        yield from self._refusals(capabilities, calls)
        for role, check in (
            ("refusal", "keywords"),
            ("gradient", "underivable"),
            ("transforms", "transforms"),
            ("transforms", "forward mode"),
            ("transforms", "second order"),
        ):
            yield self._case(self.roles[role], first, check)

    def _refusals(
        self, capabilities: Capabilities, calls: list[tuple[str, ArrayCall]]
    ) -> Iterator[ArrayCase]:
        role, first = self.roles["refusal"], calls[0][1]
        for _, call in calls:
            if len(call.features - capabilities.features) == 1:
                yield self._case(role, call, "refused")
        for dtype in _DTYPES:
            if dtype not in capabilities.dtypes:
                yield self._case(role, _moved(first, dtype), "refused")

    def _case(self, rule: str, call: ArrayCall, check: str = "value") -> ArrayCase:
        return ArrayCase(rule, call, check, self.roles)

    def _sharing(self, cases: Iterable[ArrayCase]) -> Iterator[ArrayCase]:
        programs: dict[Any, Any] = {}
        for case in cases:
            yield dataclasses.replace(case, programs=programs)

    def not_tested(
        self, operation: type[BaseOperation], platform: str
    ) -> Mapping[str, str]:
        """The platforms that are not here, and the features that no call uses."""
        elsewhere = operation.capabilities.platforms - {platform}
        used = {name for _, call in self.calls("full") for name in call.features}
        return {
            **{f"platform {name}": f"this is {platform}" for name in sorted(elsewhere)},
            **{
                f"feature {name}": "no call of the suite uses it"
                for name in sorted(operation.kind.features.keys() - used)
            },
        }


def _moved(call: Any, dtype: str, seed: int = 0) -> Any:
    """Returns the call in a dtype, with other values for another seed."""
    return dataclasses.replace(call, dtype=dtype, seed=call.seed + 2 * seed)


def _wide_types(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """JAX has float64 only where it is enabled."""
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def _floats(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def slope(along: Callable[[float], Any]) -> tuple[Any, float]:
    """Returns the derivative of a float64 function at 0, and how far off it may be.

    By central differences of two steps and Richardson's extrapolation.

    Args:
        along: From a number to an array or number.

    References:
        Lewis Fry Richardson, "The approximate arithmetical solution by finite
        differences of physical problems", 1911, section 2.1.
    """

    def difference(step: float) -> Any:
        return (np.asarray(along(step)) - along(-step)) / (2 * step)

    return _extrapolated(difference, np.abs(along(0.0)).max(initial=1) / _STEP)


def curvature(along: Callable[[float], Any]) -> tuple[Any, float]:
    """Returns the second derivative likewise; see `slope`."""
    middle = np.asarray(along(0.0))

    def difference(step: float) -> Any:
        return (along(step) - 2 * middle + along(-step)) / step**2

    return _extrapolated(difference, np.abs(middle).max(initial=1) / _STEP**2)


def _extrapolated(
    difference: Callable[[float], Any], rounding: float
) -> tuple[Any, float]:
    coarse, fine = difference(_STEP), difference(_STEP / 2)
    value = (4 * fine - coarse) / 3
    doubt = float(np.abs(value - fine).max(initial=0)) + 2.0**-48 * float(rounding)
    return value, doubt


@dataclasses.dataclass(frozen=True, eq=False)
class _Subject:
    """An operation and a call, under check."""

    operation: BaseOperation
    call: ArrayCall
    roles: Mapping[str, str]
    programs: dict[Any, Any]

    @property
    def capabilities(self) -> Capabilities:
        return type(self.operation).capabilities

    @property
    def differentiable(self) -> list[str]:
        """The arguments whose gradients are declared."""
        declared = self.capabilities.differentiable
        arrays = self.call.arrays()
        return [n for n, a in arrays.items() if _floats(a) and n in declared]

    def jitted(self, function: Callable[..., Any]) -> Any:
        """A method of this class under jit, kept for calls that differ in arrays."""
        options = sorted(self.call.options().items())
        of = (function.__name__, self.operation, repr(options), *self.differentiable)
        return self.programs.setdefault(of, jax.jit(function))

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
            findings.append(
                Finding(error, f"{name} {text}" if text else "", rule, name)
            )
        return _worst(findings)

    def project(
        self, name: str, gradient: Any, cotangents: list[Any], call: ArrayCall
    ) -> Finding:
        """Holds one gradient, along a random direction, against differences."""
        gradient, rule = np.asarray(gradient).astype("float64"), self.roles["gradient"]
        if not np.isfinite(gradient).all():
            text = f"d_{name} is not finite"
            return Finding(math.inf, text, rule, f"d_{name}")
        array, direction = call.arrays()[name], _direction(call, name)
        if gradient.shape != array.shape:
            text = f"d_{name} has shape {gradient.shape}, not {array.shape}"
            return Finding(math.inf, text, rule, f"d_{name}")

        def along(step: float) -> float:
            moved = array.astype("float64") + step * direction
            return _product(cotangents, call.expected(**{name: moved}))

        expected, doubt = slope(along)
        largest = max(float(np.abs(gradient).max(initial=0)), 1.0)
        limit = _SPREAD * call.allowed() * largest + doubt
        error = abs(float((gradient * direction).sum()) - float(expected)) / limit
        return Finding(error, rule=rule, quantity=f"d_{name}")


def _worst(findings: list[Finding]) -> Finding:
    """Returns the first that is wrong, else that of the largest error."""
    wrong = [f for f in findings if f.text or not f.error <= 1]
    return wrong[0] if wrong else max(findings, key=lambda f: f.error)


def _direction(call: ArrayCall, name: str) -> Any:
    """A random direction of length 1 in the space of one argument."""
    rng = np.random.default_rng([call.seed, len(name), 7])
    direction = rng.normal(size=call.arrays()[name].shape)
    return direction / max(float(np.linalg.norm(direction)), 1e-300)


def _cotangents(call: ArrayCall) -> list[Any]:
    rng = np.random.default_rng([call.seed, 3])
    shapes = [np.shape(leaf) for leaf in jax.tree.leaves(call.expected())]
    return [rng.normal(size=shape).astype(call.output_dtype) for shape in shapes]


def _product(cotangents: list[Any], outputs: Any) -> float:
    pairs = zip(cotangents, jax.tree.leaves(outputs), strict=True)
    return sum(float((c.astype("float64") * out).sum()) for c, out in pairs)


def _traced(arrays: Arrays) -> Arrays:
    return {name: jnp.asarray(array) for name, array in arrays.items()}


def _check_value(subject: _Subject) -> Finding:
    """Output and dtype under jit; then the output under autodiff, and gradients."""
    call, expected = subject.call, subject.call.expected()
    arrays = _traced(call.arrays())
    found = subject.jitted(subject.output)(arrays)
    for leaf in jax.tree.leaves(found):
        if leaf.dtype != call.output_dtype:
            text = f"output is of dtype {leaf.dtype}, not {call.output_dtype}"
            return Finding(math.inf, text, subject.roles["dtype"], "dtype")
    finding = subject.compare("output", found, expected)
    if finding.text or not finding.error <= 1 or not subject.differentiable:
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
    return _worst(findings)


def _check_refused(subject: _Subject) -> Finding:
    """Refused before a forward method starts, or adapted and right."""
    started: list[str] = []
    watched = _watched(type(subject.operation), started)
    call = subject.call
    arrays = _traced(call.arrays())
    try:
        found = jax.jit(lambda a: watched()(**a, **call.options()))(arrays)
    except UnsupportedError:
        if not started:
            return Finding()
        text = f"refuses only after {started[0]} has started"
        return Finding(text=text, quantity="refusal")
    finding = subject.compare("output", found, call.expected())
    if finding.text or not finding.error <= 1:
        text = "accepts what it does not declare, and computes something else: "
        text += finding.text or f"output is off by {finding.error:.3g} times what "
        text += "" if finding.text else "rounding explains"
        return Finding(finding.error, text, quantity="output", accepted=True)
    return finding


def _watched(cls: type[BaseOperation], started: list[str]) -> type[BaseOperation]:
    """Returns a subclass that notes which forward method was started."""

    def noting(method: str) -> Callable[..., Any]:
        original = getattr(cls, method)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            started.append(method)
            return original(self, *args, **kwargs)

        signature: Any = inspect.signature(original)
        forward.__signature__ = signature  # type: ignore[attr-defined]
        return forward

    return type(
        cls.__name__, (cls,), {name: noting(name) for name in defined_methods(cls)}
    )


def _check_keywords(subject: _Subject) -> Finding:
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


def _check_underivable(subject: _Subject) -> Finding:
    """The derivative of a floating argument that is not declared raises."""
    arrays = _traced(subject.call.arrays())
    declared = subject.differentiable
    for name, array in arrays.items():
        if name in declared or not _floats(array):
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


def _check_transforms(subject: _Subject) -> Finding:
    """No jit, vmap, and vmap of a gradient mean one call for each."""
    calls: list[Any] = [subject.call, _moved(subject.call, subject.call.dtype, 1)]
    draws = [call.arrays() for call in calls]
    one = _traced(draws[0])
    both = _traced({name: np.stack([d[name] for d in draws]) for name in one})
    floats = {name: array for name, array in both.items() if _floats(array)}
    axes = {name: 0 if name in floats else None for name in one}
    shared = {name: draws[1][name] for name in floats}
    stacked = jax.tree.map(lambda *a: np.stack(a), *(c.expected() for c in calls))
    mixed = [calls[0].expected(), calls[0].expected(**shared)]
    findings = [
        subject.compare(
            "output outside of jit", subject.output(one), calls[0].expected()
        ),
        subject.compare(
            "output under vmap", jax.jit(jax.vmap(subject.output))(both), stacked
        ),
        subject.compare(
            "output under vmap of the floating arrays",
            jax.jit(jax.vmap(subject.output, in_axes=(axes,)))({**one, **floats}),
            jax.tree.map(lambda *a: np.stack(a), *mixed),
        ),
    ]
    if subject.differentiable:
        cotangents = _cotangents(calls[0])
        mapped = jax.vmap(lambda arrays: subject.gradients(arrays, cotangents)[1])
        for name, gradients in jax.jit(mapped)(both).items():
            for call, gradient in zip(calls, gradients, strict=True):
                found = subject.project(name, gradient, cotangents, call)
                what = f"d_{name} under vmap"
                text = found.text.replace(f"d_{name}", what)
                findings.append(Finding(found.error, text, quantity=what))
    return _worst(findings)


def _check_forward_mode(subject: _Subject) -> Finding:
    """A jvp is right where it is declared, else it raises."""

    def right(name: str) -> Finding:
        call, arrays = subject.call, subject.call.arrays()
        direction = _direction(call, name).astype(call.dtype)

        def along(x: Any, tangent: Any) -> Any:
            given = _traced({**arrays, name: x})
            return jax.jvp(
                lambda x: subject.output({**given, name: x}), (x,), (tangent,)
            )[1]

        found = jax.jit(along)(jnp.asarray(arrays[name]), jnp.asarray(direction))
        array, wide = arrays[name].astype("float64"), direction.astype("float64")
        cotangents = _cotangents(call)
        wanted, doubt = slope(
            lambda step: _product(
                cotangents, call.expected(**{name: array + step * wide})
            )
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


def _check_second_order(subject: _Subject) -> Finding:
    """A derivative of a derivative is right where it is declared, else it raises."""

    def right(name: str) -> Finding:
        call, arrays = subject.call, _traced(subject.call.arrays())
        direction, cotangents = _direction(call, name), _cotangents(call)
        tangent = jnp.asarray(direction.astype(call.dtype))

        def along(x: Any) -> Any:
            gradient = subject.gradients({**arrays, name: x}, cotangents)[1][name]
            return (gradient * tangent).sum()

        found = np.asarray(jax.jit(jax.grad(along))(arrays[name])).astype("float64")
        array = call.arrays()[name].astype("float64")
        wanted, doubt = curvature(
            lambda step: _product(
                cotangents, call.expected(**{name: array + step * direction})
            )
        )
        largest = max(float(np.abs(found).max(initial=0)), 1.0)
        limit = 4 * _SPREAD * call.allowed() * largest + doubt
        error = abs(float((found * direction).sum()) - float(wanted)) / limit
        return Finding(error, quantity=f"second derivative of {name}")

    return _where_declared(subject, "second_order", "a second derivative", right)


def _where_declared(
    subject: _Subject, which: str, what: str, right: Callable[[str], Finding]
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
    return _worst(findings)


_CHECKS: dict[str, Callable[[_Subject], Finding]] = {
    "value": _check_value,
    "refused": _check_refused,
    "keywords": _check_keywords,
    "underivable": _check_underivable,
    "transforms": _check_transforms,
    "forward mode": _check_forward_mode,
    "second order": _check_second_order,
}
