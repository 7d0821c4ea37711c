"""Attention calls to check operations with, drawn from one description each."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np

import switchax
from switchax.kinds.attention.oracle import attention_oracle, attention_oracle_vjp

INF, NAN = math.inf, math.nan

# The unit roundoff of what is stored and of what is accumulated (R8). From it:
#
# - Output and gradients are stored once, 1 unit; an operation may also store the
#   weights, and going backward their cotangents, in the operands' dtype, 1 unit each:
#   3 units of the largest entry.
# - A product errs by some units of what is accumulated: errors of n terms are random
#   and add up to sqrt(n) of them only while the terms are alike. A logit x errs by
#   units of x, which is a relative error of its weight. So 2 * (1 + largest logit)
#   units for each of the two products on the way to the result.
ROUNDING = {
    "float16": (2**-11, 2**-24),
    "bfloat16": (2**-8, 2**-24),
    "float32": (2**-24, 2**-24),
    "float64": (2**-53, 2**-53),
}


def tolerance(dtype, largest_logit, is_stored=True):
    """The error allowed, in units of the largest entry (or of 1, if that is less)."""
    stored, accumulated = ROUNDING[dtype]
    return 3 * stored * is_stored + 4 * accumulated * (1 + largest_logit)


def precise(dtype):
    """The dtype of accumulation (R8)."""
    return "float64" if dtype == "float64" else "float32"


@dataclasses.dataclass(frozen=True)
class Case:
    """One call, without its values."""

    batch: int = 2
    q_len: int = 7
    kv_len: int = 7
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int = 8
    dtype: str = "float32"
    layout: str = "bthd"
    bias: str = ""  # full, row, key, minus_inf
    mask: str = ""  # full, key, row
    segments: bool = False
    lengths: str = ""  # q, kv, both
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    offset: str = "zero"  # zero, negative, last, traced, batch
    soft_cap: float | None = None
    sinks: int | None = None  # 0 is [heads], n is [heads, n]
    dropout: float = 0.0
    scale: float | None = None
    factor: float = 1.0
    seed: int = 0

    def __str__(self):
        changed = (
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        )
        return ",".join(changed).replace(" ", "") or "plain"


@dataclasses.dataclass(frozen=True)
class Call:
    """Arrays by argument name, and the other arguments."""

    arrays: dict
    options: dict

    def without(self, *names):
        kept = {n: a for n, a in self.arrays.items() if n not in names}
        options = {n: o for n, o in self.options.items() if n not in names}
        return Call(kept, options)

    @property
    def differentiable(self):
        floats = ("query", "key", "value", "bias", "softmax_aux")
        return [name for name in floats if name in self.arrays]


def draw(case, dirty=True):
    """Draws the values of a case; what nothing can see is NaN and Inf if dirty."""
    rng = np.random.default_rng(case.seed)
    batch = 1 if case.layout == "thd" else case.batch
    full = (batch, case.heads, case.q_len, case.kv_len)
    arrays = _operands(rng, case, batch)
    arrays |= _logit_arrays(rng, case, full)
    arrays |= _visibility_arrays(rng, case, full)
    options = _options(case)
    offset = options.pop("q_offset", None)
    if isinstance(offset, np.ndarray):
        arrays["q_offset"] = offset
    elif offset is not None:
        options["q_offset"] = offset
    call = Call(arrays, options)
    if dirty and 0 not in full:
        _soil(case, call)
    return call


def _operands(rng, case, batch):
    arrays = {}
    for name, length, heads, dim in (
        ("query", case.q_len, case.heads, case.head_dim),
        ("key", case.kv_len, case.kv_heads, case.head_dim),
        ("value", case.kv_len, case.kv_heads, case.v_head_dim),
    ):
        array = case.factor * rng.normal(size=(batch, length, heads, dim))
        arrays[name] = to_layout(array, case.layout).astype(case.dtype)
    return arrays


def to_layout(array, layout):
    """From bthd."""
    if layout == "thd":
        return array[0]
    return array.swapaxes(1, 2) if layout == "bhtd" else array


def _logit_arrays(rng, case, full):
    arrays = {}
    _, heads, q_len, kv_len = full
    shapes = {"full": full, "row": (heads, q_len, 1), "key": (kv_len,)}
    if case.bias:
        bias = rng.normal(size=shapes.get(case.bias, full))
        if case.bias == "minus_inf":
            bias[rng.random(full) < 0.3] = -INF
            bias[:, :, : q_len // 2] = -INF
        arrays["bias"] = bias.astype(case.dtype)
    if case.mask:
        arrays["mask"] = rng.random(shapes[case.mask]) < 0.7
    if case.sinks is not None:
        shape = (heads, case.sinks) if case.sinks else (heads,)
        arrays["softmax_aux"] = rng.normal(size=shape).astype(precise(case.dtype))
    return arrays


def _visibility_arrays(rng, case, full):
    arrays = {}
    batch, _, q_len, kv_len = full
    if case.segments:
        for name, length in (("q_segment_ids", q_len), ("kv_segment_ids", kv_len)):
            ids = np.sort(rng.integers(-1, 2, size=(batch, length)), axis=1)
            ids = ids[:, ::-1] if case.seed % 2 else ids
            arrays[name] = (ids[0] if case.layout == "thd" else ids).astype("int32")
    for name, length in (("q", q_len), ("kv", kv_len)):
        if case.lengths in (name, "both"):
            some = [length - length // 3, 0, length + 3, length][:batch]
            arrays[f"{name}_lengths"] = np.array(some, "int32")
    if case.dropout:
        arrays["dropout_key"] = jax.random.key(case.seed)
    return arrays


def _options(case):
    options = {"layout": case.layout}
    for name, option in (
        ("causal", case.causal),
        ("window", case.window),
        ("softmax_scale", case.scale),
        ("logits_soft_cap", case.soft_cap),
        ("dropout_prob", case.dropout),
    ):
        if option not in (None, False, 0.0):
            options[name] = option
    if case.causal or case.window:
        last = case.kv_len - case.q_len
        batch = 1 if case.layout == "thd" else case.batch
        options["q_offset"] = {
            "zero": 0,
            "negative": -2,
            "last": last,
            "traced": np.array(last + 1, "int32"),
            "batch": np.array([last, -1, 2, 0][:batch], "int32"),
        }[case.offset]
    return options


def _soil(case, call):
    visible = visible_pairs(case, call)
    group = case.heads // case.kv_heads
    batch, _, q_len, kv_len = visible.shape
    seen = visible.any(axis=2).reshape(batch, case.kv_heads, group, kv_len).any(axis=2)
    unseen = to_layout(~seen.swapaxes(1, 2)[..., None], case.layout)
    for name, dirt in (("key", NAN), ("value", INF if case.seed % 2 else NAN)):
        array = call.arrays[name]
        call.arrays[name] = np.where(unseen, np.array(dirt, array.dtype), array)
    if "q_lengths" in call.arrays:
        past = np.arange(q_len) >= call.arrays["q_lengths"][:, None]
        past = to_layout(past[:, :, None, None], case.layout)
        query = call.arrays["query"]
        call.arrays["query"] = np.where(past, np.array(NAN, query.dtype), query)
    if case.bias == "full":
        bias = call.arrays["bias"]
        call.arrays["bias"] = np.where(visible, bias, np.array(NAN, bias.dtype))


def visible_pairs(case, call):
    """Where the oracle gives weight when all logits are 0, `[b, h, q, kv]`."""
    zeros = {n: np.zeros(call.arrays[n].shape) for n in ("query", "key", "value")}
    hidden_by = call.without("bias", "softmax_aux", "dropout_prob", *zeros)
    pairs = Call({**hidden_by.arrays, **zeros}, hidden_by.options)
    weights = oracle(attention_oracle, pairs).weights
    return weights[None] > 0 if case.layout == "thd" else weights > 0


def oracle(function, call, **more):
    arrays = {n: np.asarray(a) for n, a in call.arrays.items() if n != "dropout_key"}
    return function(**arrays, **call.options, **more)


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
    names = call.differentiable
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


def largest_logit(case, call):
    q, k = (call.arrays[name].astype("float64") for name in ("query", "key"))
    if 0 in q.shape or 0 in k.shape:
        return 0.0
    scale = case.scale or case.head_dim**-0.5
    sizes = (np.linalg.norm(a, axis=-1) for a in (q, k))
    return abs(scale) * math.prod(s[np.isfinite(s)].max(initial=0) for s in sizes)


def compare(name, got, expected, dtype, logit=0.0, is_stored=True):
    """Asserts that two arrays agree to rounding; -inf must be where it is expected."""
    got = np.asarray(got).astype("float64")
    assert got.shape == expected.shape, name
    np.testing.assert_array_equal(got == -INF, expected == -INF, err_msg=name)
    finite = expected != -INF
    got, expected = got[finite], expected[finite]
    assert np.isfinite(got).all(), f"{name}: {np.isnan(got).sum()} NaN"
    if not got.size:
        return
    error = np.abs(got - expected).max() / max(np.abs(expected).max(), 1.0)
    allowed = tolerance(dtype, logit, is_stored)
    assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"


def covering(factors, seed=0):
    """Cases in which every pair of values of two factors occurs, greedily.

    Args:
        factors: Name of the factor to its values, each a dict of fields of `Case`.
        seed: Of ties.

    Returns:
        Cases, each with a seed that leaves a pair visible, if there is one.
    """
    rng = np.random.default_rng(seed)
    names = list(factors)
    wanted = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }
    rows = []
    while wanted:
        first = min(wanted)
        best, best_new = None, set()
        for _ in range(60):
            row = {n: int(rng.integers(len(factors[n]))) for n in names}
            row |= dict(first)
            new = wanted & set(itertools.combinations(row.items(), 2))
            if len(new) > len(best_new):
                best, best_new = row, new
        wanted -= best_new
        fields = (factors[n][i] for n, i in best.items())
        rows.append(functools.reduce(dict.__or__, fields))
    return [
        _with_something_visible(Case(**row), seed + n) for n, row in enumerate(rows)
    ]


def _with_something_visible(case, seed):
    seeds = (dataclasses.replace(case, seed=seed + 1000 * n) for n in range(50))
    sees = (c for c in seeds if visible_pairs(c, draw(c, dirty=False)).any())
    return next(sees, dataclasses.replace(case, seed=seed))
