"""What JAX's transformations make of an attention call (R11, R13)."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import Mesh, PartitionSpec

import switchax
from switchax import DegradedChoiceWarning, UnsupportedError
from switchax.kinds.attention.oracle import attention_oracle, attention_oracle_vjp

from . import attention_cases as cases
from .attention_cases import Call, Case
from .kernels import kernel
from .standins import registration, stand_in

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("quick_compilation")]

both = pytest.mark.parametrize("name", ["vanilla", "sdpa"])


def named(name, **options):
    return functools.partial(switchax.attention, operation=name, **options)


def close(got, expected, tolerance=3e-6):
    np.testing.assert_allclose(got, expected, atol=tolerance, rtol=tolerance)


def stack(calls):
    return {n: np.stack([c.arrays[n] for c in calls]) for n in calls[0].arrays}


@both
@pytest.mark.parametrize(
    ("case", "mapped"),
    [
        (Case(), ["query"]),
        (Case(), ["query", "key", "value"]),
        (Case(mask="full"), ["mask"]),
        (Case(lengths="kv"), ["query", "kv_lengths"]),
        (Case(causal=True, offset="traced"), ["q_offset"]),
        (Case(causal=True, offset="batch", bias="key"), ["q_offset", "bias"]),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, list) else str(x),
)
def test_vmap_means_one_call_for_each_and_so_does_its_gradient(name, case, mapped):
    calls = [cases.draw(case, dirty=False), cases.draw(case, dirty=False)]
    rng = np.random.default_rng(5)
    for array in mapped:
        other = calls[1].arrays[array]
        other = rng.permuted(other, axis=-1) if other.ndim else other + 2
        calls[1].arrays[array] = other
    # Mapped along the last axis, for those that have others.
    axes = {
        n: np.ndim(calls[0].arrays[n]) if n in mapped else None for n in calls[0].arrays
    }
    arrays = {
        n: np.stack([c.arrays[n] for c in calls], axis)
        if axis is not None
        else calls[0].arrays[n]
        for n, axis in axes.items()
    }
    d_output = rng.normal(size=calls[0].arrays["query"].shape).astype("float32")

    def run(arrays):
        def outputs(floats):
            return named(name)(**{**arrays, **floats}, **calls[0].options)

        floats = {n: arrays[n] for n in ("query", "key", "value")}
        output, pull_back = jax.vjp(outputs, floats)
        return output, pull_back(jnp.asarray(d_output))[0]

    got, gradients = jax.jit(jax.vmap(run, in_axes=(axes,)))(arrays)
    for n, call in enumerate(calls):
        expected = cases.oracle(attention_oracle, call)
        grads = cases.oracle(attention_oracle_vjp, call, d_output=d_output)
        close(got[n], expected.output)
        for array, gradient in gradients.items():
            close(gradient[n], grads[array])


def layers(attend, wrap=lambda f: f):
    """Three equal layers by scan, after each of which the loss is taken."""

    def loss(floats, rest):
        @wrap
        def layer(x, _):
            x = x + attend(x, floats["key"], floats["value"], **rest)
            return x, x.sum()

        _, sums = jax.lax.scan(layer, floats["query"], None, length=3)
        return (sums * jnp.arange(1.0, 4.0)).sum()

    return loss


def unrolled(attend):
    def loss(floats, rest):
        x, total = floats["query"], 0.0
        for n in range(3):
            x = x + attend(x, floats["key"], floats["value"], **rest)
            total += (n + 1) * x.sum()
        return total

    return loss


def split(call, *more):
    arrays = {n: jnp.asarray(a) for n, a in call.arrays.items()}
    floats = {n: arrays.pop(n) for n in ("query", "key", "value", *more)}
    return floats, arrays


@both
def test_scan_and_remat_give_the_gradient_of_the_layers_one_by_one(name):
    case = Case(causal=True, mask="key", seed=1)
    floats, rest = split(cases.draw(case, dirty=False))
    attend = named(name, causal=True)
    value, expected = jax.value_and_grad(unrolled(attend))(floats, rest)
    for wrap in (lambda f: f, jax.checkpoint):
        loss = jax.jit(jax.value_and_grad(layers(attend, wrap)))
        got_value, got = loss(floats, rest)
        close(got_value, value, 1e-5)
        jax.tree.map(functools.partial(close, tolerance=2e-5), got, expected)


def differences(function, call, direction, step=1e-5):
    """The derivative along a direction, by central differences in float64."""
    ahead, behind = (
        {n: call.arrays[n] + sign * step * t for n, t in direction.items()}
        for sign in (1, -1)
    )
    results = (
        function(Call({**call.arrays, **moved}, call.options))
        for moved in (ahead, behind)
    )
    return jax.tree.map(lambda a, b: (a - b) / (2 * step), *results)


DERIVATIVES = [
    Case(),
    Case(bias="full", mask="full", causal=True, kv_heads=4),
]


def drawn_for_derivatives(case):
    call = cases.draw(case, dirty=False)
    rng = np.random.default_rng(3)
    direction = {n: rng.normal(size=call.arrays[n].shape) for n in call.floats}
    floats = {n: jnp.asarray(call.arrays[n]) for n in call.floats}
    rest = {n: a for n, a in call.arrays.items() if n not in floats}
    tangents = {n: jnp.asarray(t, "float32") for n, t in direction.items()}
    d_output = rng.normal(size=call.arrays["query"].shape)
    return call, direction, floats, rest, tangents, d_output


@both
@pytest.mark.parametrize("case", DERIVATIVES, ids=str)
def test_forward_mode_is_right_where_declared(name, case):
    call, direction, floats, rest, tangents, _ = drawn_for_derivatives(case)

    @jax.jit
    def tangent(floats, tangents):
        def output(floats):
            return named(name)(**floats, **rest, **call.options)

        return jax.jvp(output, (floats,), (tangents,))[1]

    expected = differences(
        lambda c: cases.oracle(attention_oracle, c).output, call, direction
    )
    close(tangent(floats, tangents), expected, 1e-5)


@both
@pytest.mark.parametrize("case", DERIVATIVES, ids=str)
def test_second_derivatives_are_right_where_declared(name, case):
    call, direction, floats, rest, tangents, d_output = drawn_for_derivatives(case)

    def loss(floats):
        output = named(name)(**floats, **rest, **call.options)
        return (output * jnp.asarray(d_output, "float32")).sum()

    def along(floats):
        products = jax.tree.map(
            lambda g, t: (g * t).sum(), jax.grad(loss)(floats), tangents
        )
        return sum(products.values())

    expected = differences(
        lambda c: cases.oracle(attention_oracle_vjp, c, d_output=d_output),
        call,
        direction,
    )
    reverse = jax.jit(jax.grad(along))(floats)
    forward = jax.jit(
        lambda floats: jax.jvp(jax.grad(loss), (floats,), (tangents,))[1]
    )(floats)
    for n in floats:
        close(reverse[n], expected[n], 3e-5)
        close(forward[n], expected[n], 3e-5)


@both
def test_shard_map_over_batch_is_right(name):
    case = Case(batch=8, causal=True, mask="full", heads=2, kv_heads=1)
    call = cases.draw(case)
    ct, _ = cases.cotangents(case, call)
    floats, rest = split(call)
    mesh = Mesh(np.array(jax.devices("cpu")), "x")
    assert mesh.size == 8

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=PartitionSpec("x"),
        out_specs=PartitionSpec("x"),
    )
    def run(floats, rest, ct):
        def output(floats):
            return named(name)(**floats, **rest, **call.options)

        output, pull_back = jax.vjp(output, floats)
        return output, pull_back(ct)[0]

    got, gradients = run(floats, rest, jnp.asarray(ct))
    close(got, cases.oracle(attention_oracle, call).output)
    grads = cases.oracle(attention_oracle_vjp, call, d_output=ct)
    for n in floats:
        close(gradients[n], grads[n])


# What is not declared raises.


@pytest.fixture(scope="module")
def limited():
    """Declares reverse mode alone, no derivative of bias, none of lse."""
    with registration() as register:
        features = {"bias", "causal", "lse"}
        differentiable = {"query", "key", "value"}
        register(kernel("limited", features, differentiable=differentiable))
        yield named("limited", causal=True)


@pytest.fixture(scope="module")
def drawn():
    return split(cases.draw(Case(bias="full", kv_heads=4), dirty=False), "bias")[0]


def loss_of(attend):
    def loss(floats):
        return (attend(**floats) ** 2).sum()

    return loss


def no_bias(floats):
    return {n: a for n, a in floats.items() if n != "bias"}


def test_forward_mode_is_refused_where_not_declared(limited, drawn):
    floats = no_bias(drawn)
    with pytest.raises(UnsupportedError, match=r"^limited: expected .*forward"):
        jax.jvp(loss_of(limited), (floats,), (floats,))
    with pytest.raises(UnsupportedError, match=r"^limited: expected .*forward"):
        jax.jit(jax.jacfwd(loss_of(limited)))(floats)


TWICE = {
    "hessian": jax.hessian,
    "jacrev": lambda f: jax.jacrev(jax.grad(f)),
    "jit": lambda f: jax.jit(jax.grad(lambda x: jax.grad(f)(x)["query"].sum())),
    "inner_jit": lambda f: jax.grad(lambda x: jax.jit(jax.grad(f))(x)["key"].sum()),
    "remat": lambda f: jax.grad(lambda x: jax.checkpoint(jax.grad(f))(x)["key"].sum()),
}


@pytest.mark.parametrize("transform", TWICE)
def test_second_derivatives_are_refused_where_not_declared(limited, drawn, transform):
    with pytest.raises(UnsupportedError, match=r"^limited: expected .*derivative"):
        TWICE[transform](loss_of(limited))(no_bias(drawn))


def wrapped(transform, attend):
    """A loss of floats, with attention under a transformation."""
    if transform == "scan":

        def scanned(floats):
            def layer(carry, _):
                x, bias = carry
                more = {"bias": bias} if "bias" in floats else {}
                return (attend(x, floats["key"], floats["value"], **more), bias), None

            carry = floats["query"], floats.get("bias", jnp.float32(0))
            return jax.lax.scan(layer, carry, None, length=2)[0][0].sum()

        return scanned
    loss = loss_of(attend)
    return {"plain": loss, "jit": jax.jit(loss), "remat": jax.checkpoint(loss)}[
        transform
    ]


TRANSFORMS = pytest.mark.parametrize("transform", ["plain", "jit", "remat", "scan"])


@TRANSFORMS
def test_reverse_mode_stays_allowed(limited, drawn, transform):
    with registration() as register:
        register(
            kernel("free", {"bias", "causal"}, forward_mode=True, second_order=True)
        )
        expected = jax.grad(wrapped(transform, named("free", causal=True)))(
            no_bias(drawn)
        )
    loss = wrapped(transform, limited)
    got = jax.grad(loss)(no_bias(drawn))
    jax.tree.map(close, got, expected)
    many = jax.tree.map(lambda a: jnp.stack([a, a]), no_bias(drawn))
    got = jax.vmap(jax.grad(loss))(many)
    jax.tree.map(close, got, jax.tree.map(lambda a: jnp.stack([a, a]), expected))


@TRANSFORMS
def test_an_undeclared_derivative_raises(limited, drawn, transform):
    loss = wrapped(transform, limited)
    with pytest.raises(UnsupportedError, match=r"^limited: .*got one of bias"):
        jax.grad(loss)(drawn)
    with pytest.raises(UnsupportedError, match=r"^limited: .*got one of bias"):
        jax.jit(jax.vmap(jax.grad(loss)))(jax.tree.map(lambda a: a[None], drawn))


@TRANSFORMS
def test_an_undeclared_argument_may_stay_undifferentiated(limited, drawn, transform):
    loss = wrapped(transform, limited)

    def of_the_others(others, bias):
        value = loss({**others, "bias": bias})
        return value, bias

    others = no_bias(drawn)
    gradient = jax.jit(jax.grad(of_the_others, has_aux=True))
    assert set(gradient(others, drawn["bias"])[0]) == set(others)
    stopped = jax.grad(lambda f: loss({**f, "bias": jax.lax.stop_gradient(f["bias"])}))
    assert not stopped(drawn)["bias"].any()


def test_lse_under_differentiation_is_refused_where_not_declared(limited, drawn):
    def lse_aside(floats):
        output = limited(**floats, return_lse=True)
        return output.attention_outputs.sum(), output.lse

    with pytest.raises(UnsupportedError, match=r"^limited: .*got one of lse"):
        jax.grad(lse_aside, has_aux=True)(no_bias(drawn))
    assert jnp.isfinite(lse_aside(drawn)[1]).all()

    def lse_of_sdpa(query):
        return named("sdpa")(query, query, query, return_lse=True).lse.sum()

    with pytest.raises(UnsupportedError, match=r"^sdpa: .*got one of lse"):
        jax.grad(lse_of_sdpa)(drawn["query"])


def test_forward_mode_of_a_custom_vjp_is_refused_by_name(drawn):
    @jax.custom_vjp
    def copy(x):
        return x

    copy.defvjp(lambda x: (x, None), lambda _, d: (d,))

    def forward(self, query, key, value, *, softmax_scale):
        return copy(query)

    differentiable = {"query", "key", "value"}
    methods = {"forward_native": forward}
    q = drawn["query"]
    with registration() as register:
        register(stand_in("reverse", methods=methods, differentiable=differentiable))
        attend = functools.partial(named("reverse"), key=q, value=q)
        for wrap in (lambda f: f, jax.jit):
            says = r"^reverse: expected .*got forward mode"
            with pytest.raises(UnsupportedError, match=says):
                jax.jvp(wrap(attend), (q,), (q,))
            with pytest.raises(UnsupportedError, match=says):
                wrap(lambda x: jax.jvp(attend, (x,), (x,)))(q)
            with pytest.raises(UnsupportedError, match=says):
                wrap(jax.jacfwd(attend))(q)
        assert jax.grad(lambda x: attend(x).sum())(q).shape == q.shape


# Symbolic sizes, of jax.export.


def exported(operation, shapes, **options):
    arrays = {n: jax.ShapeDtypeStruct(s, "float32") for n, s in shapes.items()}
    return export.export(jax.jit(named(operation, **options)))(**arrays)


@pytest.mark.parametrize("operation", ["auto", "vanilla"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True, "q_offset": 0},
        {"window": (2, 1), "q_offset": 1},
        {"causal": True, "q_offset": np.int32(1), "kv_lengths": np.array([2, 3])},
    ],
    ids=lambda o: "-".join(o),
)
def test_a_program_of_symbolic_lengths_means_the_same(operation, options):
    q_len, kv_len = export.symbolic_shape("t, s")
    kv = (2, kv_len, 2, 8)
    says = contextlib.nullcontext()
    if operation == "auto":  # by another than it would take of numbers
        says = pytest.warns(DegradedChoiceWarning, match="export with numbers")
    shapes = {"query": (2, q_len, 4, 8), "key": kv, "value": kv}
    with says:
        program = exported(operation, shapes, **options)
    rng = np.random.default_rng(0)
    for rows, keys in ((1, 3), (5, 4)):
        q = rng.normal(size=(2, rows, 4, 8)).astype("float32")
        k, v = rng.normal(size=(2, 2, keys, 2, 8)).astype("float32")
        expected = named("vanilla", **options)(q, k, v)
        close(program.call(query=q, key=k, value=v), expected)


def test_visibility_of_symbolic_lengths_folds_into_a_mask():
    n = export.symbolic_shape("n")[0]
    x = jax.ShapeDtypeStruct((2, n, 4, 8), "float32")
    ids = jax.ShapeDtypeStruct((2, n), "int32")
    call = {"query": x, "key": x, "value": x}
    answer = switchax.explain(**call, q_segment_ids=ids, kv_segment_ids=ids)
    assert answer.chosen == "sdpa:sdpa"
    program = export.export(jax.jit(named("sdpa")))(
        **call, q_segment_ids=ids, kv_segment_ids=ids
    )
    q = np.ones((2, 3, 4, 8), "float32")
    numbers = np.array([[0, 0, 1]] * 2, "int32")
    got = program.call(
        query=q, key=q, value=q, q_segment_ids=numbers, kv_segment_ids=numbers
    )
    close(got, q)


def test_what_a_symbol_may_break_is_refused_before_the_kernel():
    n = export.symbolic_shape("n")[0]
    shapes = dict.fromkeys(("query", "key", "value"), (2, n, 4, 8))
    says = r"^sdpa: expected q_len a number, got q_len=n; .*'vanilla'"
    with pytest.raises(UnsupportedError, match=says):
        exported("sdpa", shapes, causal=True)
    with registration() as register:
        register(kernel("tiled", {"kv_lengths"}, multiples={"kv_len": 128}))
        register(kernel("small", limits={"kv_len": 128}))
        with pytest.raises(UnsupportedError, match=r"kv_len a multiple of 128, got .*"):
            exported("tiled", shapes)
        with pytest.raises(UnsupportedError, match=r"kv_len at most 128, got kv_len=n"):
            exported("small", shapes)
    shapes = dict.fromkeys(("query", "key", "value"), (2, 3, 4, n))
    with pytest.raises(ValueError, match="softmax_scale where head_dim is symbolic"):
        exported("vanilla", shapes)
    assert exported("vanilla", shapes, softmax_scale=1.0).out_avals[0].shape[3] == n


def test_an_undeclared_second_derivative_is_refused_before_the_kernel_sees_it():
    """A forward pass that launches a kernel has no derivative of its own."""

    def launch(x):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(lambda x: x, shape, x, vmap_method="sequential")

    @jax.custom_vjp
    def run(x):
        return launch(x)

    run.defvjp(lambda x: (launch(x), None), lambda _, cotangent: (2 * cotangent,))

    def forward_native(self, query, key, value, *, softmax_scale):
        return run(query)

    methods = {"forward_native": forward_native}
    with registration() as register:
        register(stand_in("launches", methods=methods, differentiable={"query"}))

        x = jnp.ones((1, 2, 1, 4))

        def gradient(q):
            return jax.grad(lambda q: named("launches")(q, x, x).sum())(q).sum()

        assert gradient(x) == 16
        with pytest.raises(UnsupportedError, match="got a second derivative"):
            jax.grad(gradient)(x)
