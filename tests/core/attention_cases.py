"""Attention calls of the conformance kit, asked more of than it asks of others."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import switchax
from switchax.kinds.attention.oracle import attention_oracle, attention_oracle_vjp
from switchax.testing.attention import AttentionCall, Drawn, draw
from switchax.testing.attention.calls import largest_logit
from switchax.testing.tolerance import allowed, distance

__all__ = [
    "Call",
    "Case",
    "check",
    "compare",
    "cotangents",
    "draw",
    "evaluate",
    "largest_logit",
    "oracle",
]

INF, NAN = float("inf"), float("nan")
Call = Drawn
Case = functools.partial(AttentionCall, kv_heads=2)


def precise(dtype):
    """The dtype of accumulation (R8)."""
    return "float64" if dtype == "float64" else "float32"


def oracle(function, call, **more):
    """Asks `attention_oracle` or `attention_oracle_vjp`."""
    asked = {attention_oracle: call.oracle, attention_oracle_vjp: call.oracle_vjp}
    return asked[function](**more)


def cotangents(case, call):
    """For output and lse; NaN in rows that see nothing."""
    rng = np.random.default_rng(case.seed + 1)
    expected = oracle(attention_oracle, call.without("dropout_prob", "softmax_aux"))
    d_output = rng.normal(size=expected.output.shape).astype(case.dtype)
    is_empty = expected.lse == -INF
    d_lse = rng.normal(size=expected.lse.shape).astype(precise(case.dtype))
    if case.sinks is None:
        d_lse[is_empty] = NAN
    rows = is_empty if case.layout == "bhtd" else is_empty.swapaxes(-1, -2)
    d_output[rows] = NAN
    return d_output, d_lse


def evaluate(attend, call, d_output, d_lse=None, d_names=(), **asked):
    """Outputs, and gradients to d_names, from one compiled program.

    Args:
        attend: Takes the arguments of attention.
        call: Its arguments; arrays are traced.
        d_output: Cotangent of the output.
        d_lse: Cotangent of lse, or None for zeros.
        d_names: Arguments to differentiate.
        **asked: `return_lse`, `return_weights`.
    """
    arrays = {n: jnp.asarray(a) for n, a in call.arrays.items()}
    rest = {n: a for n, a in arrays.items() if n not in d_names}

    @jax.jit
    def run(floats, rest, d_output, d_lse):
        def outputs(floats):
            result = attend(**floats, **rest, **call.options, **asked)
            if not isinstance(result, switchax.AttentionOutput):
                return switchax.AttentionOutput(result)
            return result

        if not d_names:
            return outputs(floats), {}
        result, pull_back = jax.vjp(outputs, floats)
        zeros = jax.tree.map(jnp.zeros_like, result)
        ct = zeros._replace(attention_outputs=d_output)
        if d_lse is not None:
            ct = ct._replace(lse=d_lse)
        return result, pull_back(ct)[0]

    floats = {name: arrays[name] for name in d_names}
    return run(floats, rest, d_output, d_lse)


def check(case, attend, *, lse=True, weights=True, d_lse=True, dirty=True):
    """Compares an operation with the oracle: outputs and every gradient.

    Args:
        case: The case.
        attend: Takes the arguments of attention.
        lse: Whether lse is compared.
        weights: Whether weights are compared; dropout needs them.
        d_lse: Whether lse takes a cotangent.
        dirty: Whether what nothing can see is NaN and Inf.
    """
    call = draw(case, dirty)
    ct_output, ct_lse = cotangents(case, call)
    ct_lse = ct_lse if d_lse else None
    asked = {"return_lse": lse, "return_weights": weights}
    names = call.floats
    got, gradients = evaluate(attend, call, ct_output, ct_lse, names, **asked)
    more = {}
    if case.dropout:
        more["dropout_keep"] = np.asarray(got.attention_weights) > 0
    expected = oracle(attention_oracle, call, **more)
    grads = oracle(attention_oracle_vjp, call, d_output=ct_output, d_lse=ct_lse, **more)
    logit = largest_logit(case, call)
    assert got.attention_outputs.dtype == case.dtype
    compare("output", got.attention_outputs, expected.output, case.dtype, logit)
    if lse:
        compare("lse", got.lse, expected.lse, case.dtype, logit, False)
    if weights:
        compare(
            "weights", got.attention_weights, expected.weights, case.dtype, logit, False
        )
    for name in names:
        assert gradients[name].dtype == call.arrays[name].dtype
        compare(f"d_{name}", gradients[name], grads[name], case.dtype, logit)


def compare(name, got, expected, dtype, logit=0.0, is_stored=True):
    """Asserts that two arrays agree to rounding; -inf must be where it is expected."""
    error, text = distance(got, expected, allowed(dtype, logit, 3 * is_stored))
    assert not text, f"{name} {text}"
    assert error <= 1, f"{name}: {error:.2f} times what is allowed"
