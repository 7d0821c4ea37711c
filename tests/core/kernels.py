"""Operations of any declaration that compute by vanilla's kernel, and count traces."""

import inspect

import jax.numpy as jnp

from switchax import ATTENTION, AttentionOutput
from switchax.kinds.attention import visibility
from switchax_vanilla.kernel import attend

from .standins import stand_in

VISIBILITY = (
    "mask",
    "mask_pattern",
    "q_segment_ids",
    "kv_segment_ids",
    "q_lengths",
    "kv_lengths",
    "causal",
    "window",
    "q_offset",
)
OTHERS = (
    "bias",
    "logits_soft_cap",
    "softmax_aux",
    "dropout_prob",
    "dropout_key",
)
ALL = frozenset({"query", "key", "value", "bias", "softmax_aux", "lse", "weights"})


def kernel(name, features=(), calls=None, returns=None, **capabilities):
    """Returns an operation class with these features that is right.

    Args:
        name: Its name.
        features: The features it declares and takes.
        calls: A list; what each trace of the forward method was given is appended.
        returns: What it returns instead, from the result; or None.
        **capabilities: Other fields of `Capabilities`.
    """
    brought = {"query", "key", "value", *features}
    for feature in features:
        brought |= set(ATTENTION.features[feature].arguments)
    capabilities.setdefault("differentiable", ALL & brought)
    layouts = capabilities.get("layouts", ("bthd",))
    extra = [n for n in (*VISIBILITY, *OTHERS) if n in brought]
    extra += ["return_lse"] if "lse" in features else []
    extra += ["layout"] if len(layouts) > 1 else []

    def forward_native(self, **given):
        if calls is not None:
            calls.append(given)
        layout = given.get("layout", layouts[0])
        result = _compute(given, layout)
        return result if returns is None else returns(result)

    parameters = [
        inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for n in ("self", "query", "key", "value", "softmax_scale", *extra)
    ]
    forward_native.__signature__ = inspect.Signature(parameters)
    methods = {"forward_native": forward_native}
    return stand_in(name, methods=methods, features=set(features), **capabilities)


def _compute(given, layout):
    if layout == "thd":
        packed = ("query", "key", "value", "q_segment_ids", "kv_segment_ids")
        one = {n: given[n][None] for n in packed if given.get(n) is not None}
        return AttentionOutput(*(x[0] for x in _compute({**given, **one}, "bthd")))
    q, k, v = (_swap(given[name], layout) for name in ("query", "key", "value"))
    seen_by = {n: given[n] for n in VISIBILITY if n in given and given[n] is not None}
    result = attend(
        q,
        k,
        v,
        softmax_scale=given["softmax_scale"],
        visible=visibility(q_len=q.shape[1], kv_len=k.shape[1], **seen_by),
        **{n: given[n] for n in OTHERS if n in given},
    )
    output = _swap(result.output.astype(q.dtype), layout)
    return AttentionOutput(output, result.weights, result.lse)


def _swap(array, layout):
    return jnp.swapaxes(array, 1, 2) if layout == "bhtd" else array
