"""What is asked of one call: each check compares an operation with the oracle."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from switchax.capabilities import Capabilities
from switchax.errors import UnsupportedError
from switchax.kinds.attention import AttentionOutput
from switchax.operation import BaseOperation, defined_methods
from switchax.testing.suite import Finding

from .calls import AttentionCall, Drawn, draw
from .programs import Programs, on_host, traced
from .tolerance import allowed, distance, largest_logit

__all__ = ["CHECKS", "Subject"]


@dataclasses.dataclass(frozen=True)
class Subject:
    """An operation and a call, under check.

    Attributes:
        operation: The operation.
        call: The call.
        rule: The rule that the case is about.
        programs: Where compiled programs are kept.
        dirty: Whether what nothing can see is NaN or Inf.
    """

    operation: BaseOperation
    call: AttentionCall
    rule: str
    programs: Programs
    dirty: bool = False

    @property
    def capabilities(self) -> Capabilities:
        """What the operation declares."""
        return type(self.operation).capabilities

    @property
    def asked(self) -> dict[str, bool]:
        """The further outputs that can be asked for; lse in some calls only."""
        found = {}
        for name in ("lse", "weights"):
            if name in self.capabilities.features:
                found[f"return_{name}"] = True
        return found

    def draw(self) -> Drawn:
        """Draws the values of the call."""
        return draw(self.call, self.dirty)

    def measure(
        self, name: str, got: Any, expected: Any, stored: int = 3, rule: str = ""
    ) -> Finding:
        """Compares one array with what the oracle says of it."""
        limit = allowed(self.call.dtype, largest_logit(self.call, self.draw()), stored)
        error, text = distance(got, expected, limit)
        return Finding(error, f"{name} {text}" if text else "", rule, name)


def worst(findings: list[Finding]) -> Finding:
    """Returns the first that is wrong, else that of the largest error."""
    wrong = [f for f in findings if is_wrong(f)]
    return wrong[0] if wrong else max(findings, key=lambda f: f.error)


def cotangents(call: AttentionCall, drawn: Drawn) -> tuple[Any, Any]:
    """Draws cotangents of output and lse; 0 for the lse of rows that see nothing."""
    rng = np.random.default_rng(call.seed + 1)
    expected = drawn.without("dropout_prob", "softmax_aux").oracle()
    d_output = rng.normal(size=expected.output.shape).astype(call.dtype)
    precise = "float64" if call.dtype == "float64" else "float32"
    d_lse = rng.normal(size=expected.lse.shape).astype(precise)
    return d_output, np.where(np.isneginf(expected.lse), d_lse * 0, d_lse)


def check_value(subject: Subject) -> Finding:
    """Output, lse and weights; then the value under autodiff, and each gradient."""
    drawn = subject.draw()
    expected = drawn.oracle()
    found = asking(subject, drawn)
    findings = _outputs(subject, found, expected)
    if is_wrong(worst(findings)):
        return _blamed_on_lengths(subject, worst(findings))
    return worst([*findings, *_gradients(subject, drawn, found, expected)])


def is_wrong(finding: Finding) -> bool:
    """Whether a finding is a failure; an error that is NaN is one."""
    return bool(finding.text) or not finding.error <= 1


def _blamed_on_lengths(subject: Subject, finding: Finding) -> Finding:
    """Names R1 where logits are right as soon as the lengths fill whole blocks."""
    call = subject.call
    if subject.rule != "R2" or finding.rule:
        return finding
    lengths = {n: -(-getattr(call, n) // BLOCK) * BLOCK for n in ("q_len", "kv_len")}
    whole = dataclasses.replace(subject, call=dataclasses.replace(call, **lengths))
    drawn = whole.draw()
    if is_wrong(worst(_outputs(whole, asking(whole, drawn), drawn.oracle()))):
        return finding
    return dataclasses.replace(finding, rule="R1")


# Kernels work on blocks of a power of two, of this size at most.
BLOCK = 128


def asking(subject: Subject, drawn: Drawn) -> AttentionOutput:
    """Runs a call, asking for what is declared; without it where that is refused."""
    try:
        return subject.programs.outputs(subject.operation, drawn, **subject.asked)
    except UnsupportedError:
        if not subject.asked:
            raise
        return subject.programs.outputs(subject.operation, drawn)


def _outputs(subject: Subject, found: AttentionOutput, expected: Any) -> list[Finding]:
    call = subject.call
    output = found.attention_outputs
    if output.dtype != call.dtype:
        text = f"output is of dtype {output.dtype}, not of query's, {call.dtype}"
        return [Finding(text=text, rule="R1", quantity="output")]
    findings = [subject.measure("output", output, expected.output)]
    kept = subject.rule in ("R6", "R7")
    if found.lse is not None:
        rule = "R9" if call.sinks is not None else "R8"
        rule = "" if kept else rule
        findings.append(subject.measure("lse", found.lse, expected.lse, 0, rule))
    if found.attention_weights is not None:
        weights = found.attention_weights
        findings.append(subject.measure("weights", weights, expected.weights, 0))
    return findings


def _gradients(
    subject: Subject, drawn: Drawn, plain: AttentionOutput, expected: Any
) -> list[Finding]:
    capabilities, call = subject.capabilities, subject.call
    names = [n for n in drawn.floats if n in capabilities.differentiable]
    if not names or 0 in drawn.arrays["query"].shape:
        return []
    kept = "" if subject.rule in ("R6", "R7", "R9") else "R11"
    d_output, d_lse = cotangents(call, drawn)
    with_lse = plain.lse is not None and "lse" in capabilities.differentiable
    asked = {"return_lse": True} if with_lse else {}
    d_lse = d_lse if with_lse else None
    found, gradients = subject.programs.gradients(
        subject.operation, drawn, names, d_output, d_lse, **asked
    )
    wanted = drawn.oracle_vjp(d_output=d_output, d_lse=d_lse)
    rule = "R11" if subject.rule not in ("R6", "R7") else ""
    findings = [
        subject.measure(
            "output under autodiff", found.attention_outputs, expected.output, rule=rule
        )
    ]
    for name in names:
        gradient = gradients[name]
        if gradient.dtype != drawn.arrays[name].dtype:
            text = f"d_{name} is of dtype {gradient.dtype}"
            return [Finding(text=text, rule="R11", quantity=f"d_{name}")]
        findings.append(subject.measure(f"d_{name}", gradient, wanted[name], rule=kept))
    return findings


def check_accumulation(subject: Subject) -> Finding:
    """A long sum of numbers that are alike, to two roundings."""
    drawn = subject.draw()
    found = asking(subject, drawn)
    expected = drawn.oracle().output
    return subject.measure("output", found.attention_outputs, expected, stored=2)


def check_lse(subject: Subject) -> Finding:
    """The lse alone, where it can be asked for: natural, in float32, with sinks."""
    drawn = subject.draw()
    found = subject.programs.outputs(subject.operation, drawn, return_lse=True)
    return subject.measure("lse", found.lse, drawn.oracle().lse, 0)


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
        plain = asking(subject, other)
        got = np.abs(
            plain.attention_outputs.astype("float64")
            - found.attention_outputs.astype("float64")
        ).max()
        if not got > expected / 2:
            text = f"{feature} changes the output by {got:.2g}, not by {expected:.2g}"
            return Finding(math.inf, text, quantity=feature)
    return Finding()


NEUTRAL: dict[str, dict[str, Any]] = {
    "bias": {"bias": ""},
    "mask": {"mask": ""},
    "segment_ids": {"segments": ""},
    "kv_lengths": {"lengths": ""},
    "q_lengths": {"lengths": ""},
    "causal": {"causal": False},
    "window": {"window": None},
    "q_offset": {"offset": "zero"},
    "q_offset_per_batch": {"offset": "zero"},
    "logits_soft_cap": {"soft_cap": None},
    "softmax_aux": {"sinks": None},
}


def check_dropout(subject: Subject) -> Finding:
    """Drops by key after the softmax, rescales, repeats, and leaves lse alone (R10).

    value is the identity, so that the output is the probabilities.
    """
    call = subject.call
    drawn = draw(call, dirty=False)
    eye = np.eye(call.kv_len, call.head_dim, dtype=call.dtype)
    value = np.broadcast_to(eye[None, :, None], drawn.arrays["value"].shape)
    drawn.arrays["value"] = np.ascontiguousarray(value)
    share = call.dropout
    programs, operation = subject.programs, subject.operation

    def weights(seed: int) -> Any:
        drawn.arrays["dropout_key"] = jax.random.key(seed)
        return programs.outputs(operation, drawn).attention_outputs.astype("float64")

    first, again, other = weights(0), weights(0), weights(1)
    if not np.array_equal(first, again):
        return Finding(text="the same key drops others", quantity="dropout")
    if np.array_equal(first == 0, other == 0):
        return Finding(text="another key drops the same", quantity="dropout")
    kept = first > 0
    rate, deviation = 1 - kept.mean(), math.sqrt(share * (1 - share) / kept.size)
    if abs(rate - share) > 6 * deviation:
        text = f"drops {rate:.3f} of the probabilities, not {share}"
        return Finding(text=text, quantity="dropout")
    plain = drawn.without("dropout_prob").oracle().output
    expected = np.where(kept, plain / (1 - share), 0.0)
    findings = [subject.measure("kept probabilities", first, expected)]
    drawn.arrays["dropout_key"] = jax.random.key(0)
    keep = np.swapaxes(kept, 1, 2)  # [batch, heads, q_len, kv_len]
    names = [n for n in drawn.floats if n in subject.capabilities.differentiable]
    if names:
        d_output, _ = cotangents(call, drawn)
        _, found = programs.gradients(operation, drawn, names, d_output)
        wanted = drawn.oracle_vjp(d_output=d_output, dropout_keep=keep)
        findings += [
            subject.measure(f"d_{name}", found[name], wanted[name]) for name in names
        ]
    if "lse" in subject.capabilities.features:
        found_lse = programs.outputs(operation, drawn, return_lse=True).lse
        expected_lse = drawn.without("dropout_prob").oracle().lse
        findings.append(subject.measure("lse", found_lse, expected_lse, 0))
    return worst(findings)


def check_refused(subject: Subject) -> Finding:
    """A call that is not declared is refused before any kernel, or adapted right."""
    started: list[str] = []
    watched = _watched(type(subject.operation), started)
    drawn = subject.draw()
    asked = {"return_lse": True} if subject.rule == "lse" else {}
    try:
        found = on_host(
            jax.jit(lambda a: watched()(**a, **drawn.options, **asked))(traced(drawn))
        )
    except UnsupportedError:
        if started:
            text = f"refuses only after {started[0]} has started"
            return Finding(text=text, rule="R12", quantity="refusal")
        return Finding(rule="R12")
    finding = worst(_outputs(subject, found, drawn.oracle()))
    if is_wrong(finding):
        text = "accepts what it does not declare, and computes something else: "
        text += finding.text or f"output is off by {finding.error:.3g}"
        return Finding(finding.error, text, "R12", "output", accepted=True)
    return dataclasses.replace(finding, rule="R12")


def _watched(cls: type[BaseOperation], started: list[str]) -> type[BaseOperation]:
    """Returns a subclass that notes which forward method was started."""

    def noting(method: str) -> Callable[..., Any]:
        original = getattr(cls, method)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            started.append(method)
            return original(self, *args, **kwargs)

        forward.__signature__ = _signature(original)  # type: ignore[attr-defined]
        return forward

    methods = {name: noting(name) for name in defined_methods(cls)}
    return type(cls.__name__, (cls,), methods)


def _signature(function: Callable[..., Any]) -> Any:
    import inspect

    return inspect.signature(function)


def check_underivable(subject: Subject) -> Finding:
    """The derivative of an argument that is not declared raises (R11)."""
    drawn = subject.draw()
    arrays = traced(drawn)
    declared = subject.capabilities.differentiable
    names = [n for n in drawn.floats if n not in declared]

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
        if "scale" in change and is_wrong(finding):
            stale = dataclasses.replace(drawn, options=draw(before).options).oracle()
            if is_wrong(one.measure("", found, stale.output)):
                finding = dataclasses.replace(finding, rule="R2", quantity="output")
        findings.append(finding)
        before = other
    return worst(findings)


def check_mesh(subject: Subject) -> Finding:
    """Split over a mesh by batch, the values and gradients are those of one device."""
    call, drawn = subject.call, subject.draw()
    devices = min(2, jax.device_count())
    mesh = jax.make_mesh((devices,), ("dp",), (jax.sharding.AxisType.Auto,))
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
    where = _platform()
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

    declared = subject.capabilities.honours_derivative(_platform(), "second_order")
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


def _platform() -> str:
    from switchax.target import current_target

    return current_target().platform


CHECKS: dict[str, Callable[[Subject], Finding]] = {
    "value": check_value,
    "accumulation": check_accumulation,
    "lse": check_lse,
    "effect": check_effect,
    "dropout": check_dropout,
    "refused": check_refused,
    "underivable": check_underivable,
    "keywords": check_keywords,
    "transforms": check_transforms,
    "in turn": check_in_turn,
    "mesh": check_mesh,
    "forward mode": check_forward_mode,
    "second order": check_second_order,
}
