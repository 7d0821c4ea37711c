"""What an attention call returns, and how a kernel's result becomes it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from switchax.errors import RegistrationError
from switchax.kind import Arrays

from .adaptation import AttentionPlan, change_layout
from .request import AttentionRequest

__all__ = ["AttentionOutput", "answer_without_keys", "finish"]


class AttentionOutput(NamedTuple):
    """The result of an attention operation.

    Attributes:
        attention_outputs: `[batch, q_len, heads, v_head_dim]` in the call's layout
            and query's dtype.
        attention_weights: The probabilities that multiply value, dropout included,
            `[batch, heads, q_len, kv_len]` (`[heads, q_len, kv_len]` in thd), in
            float32 (float64 for float64); None unless asked for.
        lse: The natural log of the sum of exp of the logits, sinks included,
            `[batch, heads, q_len]` (`[heads, tokens]` in thd), in float32 (float64
            for float64); None unless asked for.
    """

    attention_outputs: Any
    attention_weights: Any = None
    lse: Any = None


def finish(
    result: Any, request: AttentionRequest, plan: AttentionPlan
) -> dict[str, Any]:
    """Undoes the plan on a forward method's result.

    Args:
        result: The output; or `(output, lse)`; or an `AttentionOutput`.
        request: The request as the user made it.
        plan: The plan that was applied.

    Returns:
        The fields of `AttentionOutput` by name.

    Raises:
        RegistrationError: If the method did not return what its features promise.
    """
    output, weights, lse = _parts(result)
    for name, asked, array in (
        ("lse", request.return_lse, lse),
        ("weights", request.return_weights, weights),
    ):
        if asked and array is None:
            raise RegistrationError(
                f"attention: expected {name} from an operation that declares it, got "
                "None; return AttentionOutput(output, weights, lse) or (output, lse)"
            )
        if array is not None and not hasattr(array, "shape"):
            raise RegistrationError(
                f"attention: expected {name} to be an array or None, got {array!r}; "
                "return AttentionOutput(output, weights, lse) or (output, lse)"
            )
    adapted = plan.request
    assert isinstance(adapted, AttentionRequest)  # narrows the type
    _check_result(adapted, output, weights, lse)
    if plan.padding:
        length = adapted.layout.index("t")
        output = output[(slice(None),) * length + (slice(request.q_len),)]
        output = output[..., : request.v_head_dim]
    output = change_layout(output, adapted.layout, request.layout)
    outputs: dict[str, Any] = {
        "attention_outputs": output.astype(request.output_dtype),
        "attention_weights": None,
        "lse": None,
    }
    drop_batch = request.layout == "thd" and adapted.layout != "thd"
    if request.return_lse:
        lse = lse[..., : request.q_len]
        outputs["lse"] = lse[0] if drop_batch else lse
    if request.return_weights:
        weights = weights[..., : request.q_len, : request.kv_len]
        outputs["attention_weights"] = weights[0] if drop_batch else weights
    return outputs


def _check_result(
    request: AttentionRequest, output: Any, weights: Any, lse: Any
) -> None:
    """Raises unless a forward method's arrays are of the shapes it was asked for.

    Args:
        request: The request as the method saw it.
        output: What it returned as output, in the call's dtype or a wider one.
        weights: Its probabilities, or None.
        lse: Its lse, or None.
    """
    r = request
    axes = {"b": r.batch, "t": r.q_len, "h": r.heads, "d": r.v_head_dim}
    batch = () if r.layout == "thd" else (r.batch,)
    precise = np.dtype(np.float64 if r.dtype == "float64" else np.float32)
    expected: list[tuple[str, Any, tuple[int, ...], Any]] = [
        ("output", output, tuple(axes[axis] for axis in r.layout), None)
    ]
    if weights is not None:
        shape = (*batch, r.heads, r.q_len, r.kv_len)
        expected.append(("weights", weights, shape, precise))
    if lse is not None:
        expected.append(("lse", lse, (*batch, r.heads, r.q_len), precise))
    for name, array, shape, dtype in expected:
        found = getattr(array, "shape", None), getattr(array, "dtype", None)
        if isinstance(array, jax.ShapeDtypeStruct):
            found = None, None
        floating = found[1] is not None and jnp.issubdtype(found[1], jnp.floating)
        if found[0] != shape or not floating or (dtype and found[1] != dtype):
            rule = f"{name} of shape {shape} and {dtype or 'a floating dtype'}"
            got = f"shape {found[0]} and dtype {found[1]}"
            if found[0] is None:
                got = type(array).__name__
            pair = "; a pair is an output and its lse" if name == "lse" else ""
            raise _fault(rule, got + pair)
    held, wished = (jnp.finfo(x) for x in (output.dtype, r.dtype))  # type: ignore[no-untyped-call]
    if held.nmant < wished.nmant or held.maxexp < wished.maxexp:
        rule = f"an output that holds {r.dtype}"
        raise _fault(rule, f"dtype {output.dtype}, which rounds it")


def _fault(rule: str, got: str) -> RegistrationError:
    return RegistrationError(
        f"attention: expected {rule} from the forward method, got {got}; "
        "it is a fault of the operation"
    )


def _parts(result: Any) -> tuple[Any, Any, Any]:
    if isinstance(result, AttentionOutput):
        return result
    if isinstance(result, tuple) and len(result) == 2:
        return result[0], None, result[1]
    return result, None, None


def answer_without_keys(request: AttentionRequest, arrays: Arrays) -> dict[str, Any]:
    """The result where no row has a key to see (R1, R6): no kernel is needed.

    Args:
        request: The request as the user made it.
        arrays: Those of the call. Nothing but softmax_aux has a value that counts;
            inside a `shard_map` the answer varies over its axes as they do.

    Returns:
        The fields of `AttentionOutput` by name.
    """
    r, softmax_aux = request, arrays.get("softmax_aux")
    precise = np.float64 if r.dtype == "float64" else np.float32
    lse = jnp.full((r.heads,), -jnp.inf, precise)
    if softmax_aux is not None and softmax_aux.size:
        sinks = softmax_aux.astype(precise).reshape(r.heads, -1)
        has_some = jnp.any(sinks != -jnp.inf, axis=1)
        # Within as well: the derivative of a logsumexp of nothing is NaN.
        lse = jax.nn.logsumexp(jnp.where(has_some[:, None], sinks, 0), axis=1)
        lse = jnp.where(has_some, lse, -jnp.inf)
    batch = () if r.layout == "thd" else (r.batch,)
    shape = {"b": r.batch, "t": r.q_len, "h": r.heads, "d": r.v_head_dim}
    answer = {
        "attention_outputs": jnp.zeros(
            [shape[axis] for axis in r.layout], r.output_dtype
        ),
        "attention_weights": jnp.zeros((*batch, r.heads, r.q_len, r.kv_len), precise)
        if r.return_weights
        else None,
        "lse": jnp.broadcast_to(lse[:, None], (*batch, r.heads, r.q_len))
        if r.return_lse
        else None,
    }
    return {name: _varying_as(arrays, x) for name, x in answer.items()}


def _varying_as(arrays: Arrays, x: Any) -> Any:
    """Returns x, by its type varying over the mesh axes over which any array does."""
    if x is None:
        return None
    types = [jax.typeof(a).manual_axis_type for a in (*arrays.values(), x)]
    known = types.pop().varying
    lacking = tuple(sorted(frozenset[str]().union(*(t.varying for t in types)) - known))
    return jax.lax.pcast(x, lacking, to="varying") if lacking else x
