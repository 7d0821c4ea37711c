"""An operation and a call under check, and what the checks share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from switchax.capabilities import Capabilities
from switchax.errors import UnsupportedError, first_line
from switchax.kinds.attention import AttentionOutput
from switchax.operation import BaseOperation
from switchax.testing.suite import Finding
from switchax.testing.tolerance import allowed, distance, farthest

from .calls import AttentionCall, Drawn, draw, largest_logit, longest
from .programs import Programs, traced

__all__ = [
    "Subject",
    "asking",
    "cotangents",
    "fields_of",
    "of_oracle",
    "outputs",
    "pulled",
    "results_of",
]


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
            if name in self.capabilities.features and not self.call.plain:
                found[f"return_{name}"] = True
        return found

    def draw(self) -> Drawn:
        """Draws the values of the call."""
        return draw(self.call, self.dirty)

    def derived(self, drawn: Drawn) -> list[str]:
        """The arguments of a call whose derivatives are declared."""
        return [n for n in drawn.floats if n in self.capabilities.differentiable]

    def refused(self, what: str, error: UnsupportedError, rule: str) -> Finding:
        """What is wrong where a derivative is declared and refused."""
        text = f"declares {what} and refuses it: {first_line(error)}"
        return Finding(text=text, rule=rule, quantity=what)

    def measure(
        self,
        name: str,
        got: Any,
        expected: Any,
        stored: int = 3,
        rule: str = "",
        slack: Any = None,
    ) -> Finding:
        """Compares one array with what the oracle says of it, but for some slack."""
        dtypes, drawn = [self.call.dtype], self.draw()
        growth = largest_logit(self.call, drawn)
        if name.startswith("d_bias"):  # it is stored as bias is, likewise of sinks
            dtypes.append(self.call.bias_dtype or self.call.dtype)
            # What a bias of one key gets are sums over rows that cancel: the cotangents
            # of a row's logits add up to 0. Their errors are those of d_output @ value.
            given = cotangents(self.call, drawn)["attention_outputs"]
            growth = max(growth, longest(given) * longest(drawn.arrays["value"]))
        elif name.startswith("d_softmax_aux") and self.call.bias_dtype:
            dtypes.append(self.call.bias_dtype)
        limit = max(allowed(dtype, growth, stored) for dtype in dtypes)
        error, text = distance(got, expected, limit, slack)
        if text:
            return Finding(error, f"{name} {text}", rule, name)
        where = "" if error <= 1 else farthest(got, expected, slack)
        return Finding(error, "", rule, name, where=where)


def cotangents(
    call: AttentionCall,
    drawn: Drawn,
    fields: Iterable[str] = ("attention_outputs",),
    others: Iterable[Drawn] = (),
) -> dict[str, Any]:
    """Draws cotangents of outputs by field; 0 where lse is -inf.

    Args:
        call: The call.
        drawn: Its values.
        fields: Of `AttentionOutput`.
        others: Calls that are given the same cotangents.
    """
    expected = drawn.without("dropout_prob", "softmax_aux").oracle()
    shapes = {
        "attention_outputs": expected.output.shape,
        "lse": expected.lse.shape,
        "attention_weights": expected.weights.shape,
    }
    precise = "float64" if call.dtype == "float64" else "float32"
    rng, found = np.random.default_rng(call.seed + 1), {}
    for field, shape in shapes.items():
        dtype = call.dtype if field == "attention_outputs" else precise
        array = rng.normal(size=shape).astype(dtype)
        if field in fields:
            found[field] = array
    if "lse" in found:
        for one in (drawn, *others):
            lse = one.without("dropout_prob").oracle().lse
            found["lse"] = np.where(np.isneginf(lse), 0, found["lse"])
    return found


def of_oracle(cotangents: Mapping[str, Any]) -> dict[str, Any]:
    """Returns cotangents as `attention_oracle_vjp` calls them."""
    names = {"attention_outputs": "d_output", "attention_weights": "d_weights"}
    return {names.get(field, f"d_{field}"): a for field, a in cotangents.items()}


def asking(subject: Subject, drawn: Drawn) -> AttentionOutput:
    """Runs a call, asking for what is declared; without it where that is refused."""
    try:
        return subject.programs.outputs(subject.operation, drawn, **subject.asked)
    except UnsupportedError:
        if not subject.asked:
            raise
        return subject.programs.outputs(subject.operation, drawn)


def outputs(subject: Subject, found: AttentionOutput, expected: Any) -> list[Finding]:
    """Compares the output, and lse and weights where they are there."""
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


def results_of(
    subject: Subject, drawn: Drawn, arrays: Mapping[str, Any], *fields: str
) -> dict[str, Any]:
    """Returns outputs of a call with other arrays, which may be traced.

    Args:
        subject: The operation.
        drawn: The call, of which only options count.
        arrays: Its arrays by argument.
        *fields: Of `AttentionOutput`, as `fields_of` returns them.
    """
    asked = {"return_lse": True} if "lse" in fields else {}
    asked |= {"return_weights": True} if "attention_weights" in fields else {}
    found = subject.operation(**arrays, **drawn.options, **asked)
    return {field: getattr(found, field) for field in fields}


def fields_of(subject: Subject, drawn: Drawn, derived: bool) -> tuple[str, ...]:
    """Returns the outputs that a call is asked for: lse and weights if honoured.

    Args:
        subject: The operation and the call.
        drawn: The call.
        derived: Whether they are to be derived.
    """
    capabilities = subject.capabilities
    known = capabilities.differentiable if derived else capabilities.features
    fields: tuple[str, ...] = ("attention_outputs",)
    for name, field in (("weights", "attention_weights"), ("lse", "lse")):
        if f"return_{name}" not in subject.asked or name not in known:
            continue
        more = (*fields, field)
        try:  # it may give them in some calls only
            jax.eval_shape(
                lambda a, more=more: results_of(subject, drawn, a, *more), traced(drawn)
            )
        except UnsupportedError:
            continue
        fields = more
    return fields


def pulled(
    function: Callable[[Any], Any], floats: Any, given: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Returns results by field, and gradients by their cotangents."""
    result, pull = jax.vjp(function, floats)
    return result, pull({name: jnp.asarray(array) for name, array in given.items()})[0]
