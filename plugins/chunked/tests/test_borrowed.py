"""A kernel without a backward pass gets the gradients of attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import switchax
from switchax_chunked import borrow_backward

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, S, H, K, D = 2, 9, 13, 4, 2, 8


def drawn(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


Q, KEYS, VALUES = (
    drawn(B, T, H, D),
    drawn(B, S, K, D, seed=1),
    drawn(B, S, K, 6, seed=2),
)
COTANGENT = drawn(B, T, H, 6, seed=9)
CALLS = {
    "plain": {},
    "causal": {"causal": True, "q_offset": S - T},
    "window": {"window": (3, 1), "q_offset": jnp.asarray([1, 4], jnp.int32)},
    "cap": {"logits_soft_cap": 2.0, "bias": drawn(1, H, T, 1, seed=3)},
    "mask": {"mask": jax.random.bernoulli(jax.random.key(4), 0.4, (B, 1, T, S))},
    "segments": {
        "q_segment_ids": jnp.asarray([[0] * 4 + [1] * 5, [-1] * 9], jnp.int32),
        "kv_segment_ids": jnp.asarray([[1] * 6 + [0] * 7, [-1] * 13], jnp.int32),
    },
    "sinks": {
        "softmax_aux": drawn(H, 2, seed=5),
        "kv_lengths": jnp.asarray([5, 0], jnp.int32),
        "q_lengths": jnp.asarray([9, 3], jnp.int32),
    },
    "one sink": {"softmax_aux": drawn(H, seed=5), "bias": drawn(B, 1, 1, S, seed=6)},
}


def vanilla(query, key, value, *, layout="bthd", **given):
    out = switchax.attention(
        query, key, value, **given, layout=layout, return_lse=True, operation="vanilla"
    )
    return out.attention_outputs, out.lse


def forward_only(query, key, value, **given):
    """vanilla, whose gradient is refused by JAX."""

    @jax.custom_jvp
    def run(*operands):
        return vanilla(*operands[:3], **given)

    @run.defjvp
    def rule(primals, tangents):
        raise AssertionError("the forward pass was differentiated")

    return run(query, key, value)


def gradients(function, call):
    floats = {n: call[n] for n in ("bias", "softmax_aux") if n in call}
    rest = {n: x for n, x in call.items() if n not in floats}

    def run(qkv, floats):
        output, lse = function(*qkv, softmax_scale=0.3, **floats, **rest)
        return output, jnp.where(lse == -jnp.inf, 0, lse)

    outputs, pull = jax.vjp(jax.jit(run), (Q, KEYS, VALUES), floats)
    cotangents = tuple(drawn(*x.shape, seed=7 + i) for i, x in enumerate(outputs))
    return outputs, pull(cotangents)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_gradients_are_those_of_vanilla(call):
    found = gradients(borrow_backward(forward_only), call)
    expected = gradients(vanilla, call)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-5),
        found,
        expected,
    )


def test_it_knows_the_other_layout_and_vmap():
    def run(layout, q, k, v):
        kernel = functools.partial(vanilla, layout=layout)
        attend = borrow_backward(kernel, layout=layout)
        return (attend(q, k, v, softmax_scale=0.3)[0] ** 2).sum()

    def swapped(x):
        return jnp.swapaxes(x, 1, 2)

    found = jax.grad(functools.partial(run, "bhtd"), argnums=(0, 1, 2))(
        *(swapped(x) for x in (Q, KEYS, VALUES))
    )
    one = jax.grad(functools.partial(run, "bthd"), argnums=(0, 1, 2))
    expected = one(Q, KEYS, VALUES)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(swapped(x), y, rtol=1e-5, atol=1e-5)
    many = jax.vmap(one)(*(jnp.stack([x, 2 * x]) for x in (Q, KEYS, VALUES)))
    np.testing.assert_allclose(many[1][0], expected[1], rtol=1e-5, atol=1e-5)


def test_an_output_that_is_rounded_is_computed_anew():
    rest = {"softmax_scale": 0.3, "softmax_aux": drawn(H, seed=5), "causal": True}
    rest["q_offset"] = S - T

    def rounded(*operands, **given):
        output, lse = vanilla(*operands, **given)
        return jnp.swapaxes(output, 1, 2).astype(jnp.bfloat16), lse

    def by_head(query, key, value, **given):
        turned = (jnp.swapaxes(x, 1, 2) for x in (query, key, value))
        return rounded(*turned, **given)

    def loss(function, *operands):
        return (function(*operands, **rest)[0].astype(jnp.float32) * COTANGENT).sum()

    def turned_loss(*operands):
        turned = (jnp.swapaxes(x, 1, 2) for x in operands)
        attend = borrow_backward(by_head, layout="bhtd")
        output, _ = attend(*turned, **rest)
        return (jnp.swapaxes(output, 1, 2).astype(jnp.float32) * COTANGENT).sum()

    found = jax.grad(turned_loss, argnums=(0, 1, 2))(Q, KEYS, VALUES)
    wanted = jax.grad(lambda *x: loss(vanilla, *x), argnums=(0, 1, 2))(Q, KEYS, VALUES)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-5)


def test_a_row_that_sees_nothing_may_be_nan():
    lengths = jnp.asarray([T, 4], jnp.int32)
    sinks = drawn(H, seed=5)

    def loss(q):
        attend = borrow_backward(vanilla)
        given = {"q_lengths": lengths, "softmax_aux": sinks, "softmax_scale": 0.3}
        return (attend(q, KEYS, VALUES, **given)[0] ** 2).sum()

    found = jax.grad(loss)(Q.at[1, 4:].set(jnp.nan))
    np.testing.assert_array_equal(found, jax.grad(loss)(Q))


def test_a_cotangent_of_a_row_that_sees_nothing_reaches_nothing():
    given = {"q_lengths": jnp.asarray([T, 4], jnp.int32), "softmax_scale": 0.3}
    given["mask"] = jnp.ones((1, 1, T, 1), bool).at[:, :, 2].set(False)

    def output(q, k, v, sinks):
        return borrow_backward(vanilla)(q, k, v, softmax_aux=sinks, **given)[0]

    _, pull = jax.vjp(output, Q, KEYS, VALUES, drawn(H, seed=5))
    dirty = COTANGENT.at[1, 4:].set(jnp.nan).at[:, 2].set(jnp.inf)
    clean = COTANGENT.at[1, 4:].set(0).at[:, 2].set(0)
    jax.tree.map(np.testing.assert_array_equal, pull(dirty), pull(clean))


@pytest.mark.parametrize("compiled", [False, True])
def test_numpy_and_none_are_taken_as_attention_takes_them(compiled):
    given = {
        "softmax_scale": 0.3,
        "q_lengths": np.asarray([T, 4], np.int32),
        "kv_lengths": np.asarray([5, S], np.int32),
        "causal": True,
        "q_offset": np.int64(S - T),
        "bias": None,
    }

    def loss(function, q):
        return (function(q, KEYS, VALUES, **given)[0] ** 2).sum()

    found, expected = (
        jax.grad(functools.partial(loss, f))
        for f in (borrow_backward(vanilla), vanilla)
    )
    found = jax.jit(found) if compiled else found
    np.testing.assert_allclose(found(Q), expected(Q), rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("side", ["q_segment_ids", "kv_segment_ids"])
def test_ids_of_one_side_are_an_error(side):
    ids = jnp.zeros((B, T if side.startswith("q") else S), jnp.int32)
    with pytest.raises(ValueError, match="_segment_ids together, got"):
        borrow_backward(vanilla)(Q, KEYS, VALUES, softmax_scale=1.0, **{side: ids})


def test_what_it_cannot_know_is_an_error():
    attend = borrow_backward(vanilla)
    with pytest.raises(TypeError, match="'dropout_prob' whose gradient is not known"):
        attend(Q, KEYS, VALUES, softmax_scale=1.0, dropout_prob=0.5)
    with pytest.raises(TypeError, match="expected softmax_scale"):
        attend(Q, KEYS, VALUES)
    with pytest.raises(ValueError, match="'bthd' or 'bhtd', got 'thd'"):
        borrow_backward(vanilla, layout="thd")


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("softmax_scale", "multiply query by it and pass 1.0"),
        ("logits_soft_cap", "the cap is part of the compiled program"),
        ("causal", "it decides what is compiled"),
        ("window", "its sides are static"),
    ],
)
def test_options_that_are_traced_are_an_error(name, said, transform):
    def run(option):
        given = {"softmax_scale": 1.0, name: option}
        if name == "window":
            given["window"] = (None, option)
        return borrow_backward(forward_only)(Q, KEYS, KEYS, **given)[0].sum()

    with pytest.raises(TypeError, match=f"^borrow_backward: expected {name}.*{said}"):
        transform(run)(jnp.ones(3))


@pytest.mark.parametrize("name", ["softmax_scale", "logits_soft_cap"])
def test_the_gradient_of_an_option_is_an_error(name):
    def run(option):
        given = {"softmax_scale": 1.0, name: option}
        return borrow_backward(forward_only)(Q, KEYS, VALUES, **given)[0].sum()

    with pytest.raises(TypeError, match=f"^borrow_backward: expected {name}"):
        jax.grad(run)(0.3)


EIGHT_BITS = np.int8(100), np.uint8(2)
OPTIONS = {
    "of numpy": {
        "softmax_scale": np.float64(0.3),
        "logits_soft_cap": np.asarray(2.0),
        "causal": np.bool_(True),
        "window": EIGHT_BITS,
        "q_offset": np.int16(180),
    },
    "of jax": {"softmax_scale": jnp.float32(0.3), "logits_soft_cap": jnp.bfloat16(2)},
    "whole": {"softmax_scale": np.int32(1), "window": [100, 2], "causal": True},
}


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_are_taken_as_numbers_of_python(options, dtype, x64):
    given = []
    q, k, v = (x.astype(dtype) for x in (Q, jnp.tile(KEYS, (1, 31, 1, 1)), VALUES))
    v = jnp.tile(v, (1, 31, 1, 1))

    def rounded(query, key, value, **options):
        given.append(options)
        output, lse = vanilla(query, key, value, **options)
        return output.astype(dtype), lse

    def slopes(options):
        def loss(q, k, v):
            output, lse = borrow_backward(rounded)(q, k, v, **options)
            return (output**2).sum(dtype=np.float32) + lse.sum(dtype=np.float32)

        return jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)

    options = {"q_offset": 180, "window": (100, 2), "softmax_scale": 0.3, **options}
    numbers = {"softmax_scale": float, "logits_soft_cap": float, "q_offset": int}
    plain = {name: numbers.get(name, bool)(x) for name, x in options.items()}
    plain["window"] = (100, 2)
    with jax.enable_x64(x64):
        found, expected = slopes(options), slopes(plain)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    for one in given:
        assert one == plain
        assert {type(x) for x in one.values()} <= {float, int, bool, tuple}
        assert {type(side) for side in one["window"]} == {int}


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ({"softmax_scale": "1"}, TypeError),
        ({"softmax_scale": np.asarray([0.3])}, TypeError),
        ({"softmax_scale": np.timedelta64(1, "ns")}, TypeError),
        ({"logits_soft_cap": True}, TypeError),
        ({"logits_soft_cap": -1.0}, ValueError),
        ({"causal": 1}, TypeError),
        ({"window": 3}, TypeError),
        ({"window": {2, 1}}, TypeError),
        ({"window": (True, 2)}, TypeError),
        ({"window": (None, 2**31 - 1)}, ValueError),
        ({"causal": True, "q_offset": -0.5}, TypeError),
        ({"kv_lengths": np.ones(B)}, TypeError),
        ({"mask": np.ones((T, S), int)}, TypeError),
        ({"bias": np.ones((T, S), int)}, TypeError),
    ],
)
def test_what_attention_refuses_is_an_error(option, error):
    name = [*option][-1]
    given = {"softmax_scale": 1.0, **option}
    with pytest.raises(error, match=f"^borrow_backward: expected {name}"):
        borrow_backward(forward_only)(Q, KEYS, VALUES, **given)


def test_an_offset_that_nothing_needs_and_axes_that_are_missing_are_taken():
    bias = drawn(T, S, seed=3)

    def found(function):
        def loss(bias):
            given = {"softmax_scale": 0.3, "bias": bias, "q_offset": jnp.int32(3)}
            given["window"] = (None, None)
            return (function(Q, KEYS, VALUES, **given)[0] ** 2).sum()

        return jax.jit(jax.grad(loss))(bias)

    one, other = found(borrow_backward(forward_only)), found(vanilla)
    np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_numbers_beyond_float32_are_the_largest_of_it(dtype):
    """A usual filling of masks, with x64: -inf would empty the row."""

    def kernel(query, key, value, *, bias, softmax_aux, **given):
        bias, sinks = (x.astype(jnp.float32) for x in (bias, softmax_aux))
        return vanilla(query, key, value, bias=bias, softmax_aux=sinks, **given)

    with jax.enable_x64(True):
        q, k, v = (x.astype(dtype) for x in (Q, KEYS, VALUES))
        lowest = jnp.finfo("float64").min
        # Row 0 sees one key: nothing is as low, or as high, as something else.
        bias = jnp.zeros((T, S)).at[0].set(lowest)
        sinks = jnp.full((H,), -jnp.inf).at[1].set(-lowest)

        def found(call):
            def run(q, k, v, bias, sinks):
                given = {"bias": bias, "softmax_aux": sinks, "softmax_scale": 0.3}
                return call(q, k, v, causal=True, q_offset=0, **given)[0]

            output, pull = jax.vjp(run, q, k, v, bias, sinks)
            return output, *pull(jnp.ones_like(output))

        for one, other in zip(
            found(borrow_backward(kernel)), found(vanilla), strict=True
        ):
            np.testing.assert_allclose(
                np.asarray(one, float), np.asarray(other, float), rtol=2e-2, atol=1e-5
            )


def still(*operands, **given):
    """A forward pass whose own derivative is wrong."""
    return jax.lax.stop_gradient(vanilla(*operands, **given))


@pytest.mark.parametrize("forward", [vanilla, still])
@pytest.mark.parametrize("outer", [jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("by", [0, 1], ids=["query", "cotangent"])
def test_a_second_derivative_is_refused(forward, outer, by):
    def slope(query, cotangent):
        def loss(query):
            output, _ = borrow_backward(forward)(query, KEYS, VALUES, softmax_scale=0.3)
            return (output * cotangent).sum()

        return jax.grad(loss)(query)

    slope(Q, COTANGENT)
    with pytest.raises(switchax.UnsupportedError, match="got a second derivative"):
        outer(slope, by)(Q, COTANGENT)


def test_a_row_whose_bias_hides_all_has_no_gradient_beside_that_of_sinks():
    bias = jnp.zeros((1, 1, T, S)).at[:, :, 1].set(-jnp.inf)
    sinks = drawn(H, 2, seed=5)

    def run(q, k, v, bias, sinks):
        call = borrow_backward(forward_only)
        return call(q, k, v, softmax_scale=0.3, bias=bias, softmax_aux=sinks)

    (output, lse), pull = jax.vjp(run, Q, KEYS, VALUES, bias, sinks)
    d_lse = jnp.zeros_like(lse).at[:, :, 1].set(jnp.inf)
    *of_keys, of_sinks = pull((jnp.ones_like(output), d_lse))
    for x in of_keys:
        assert np.isfinite(x).all()
    assert np.isinf(of_sinks).all()


@pytest.mark.parametrize("sinks", [(0, 2), (0,)])
def test_no_heads_have_sinks(sinks):
    attend = borrow_backward(vanilla)
    q, k = jnp.zeros((1, 3, 0, 4)), jnp.zeros((1, 5, 0, 4))

    def loss(q, sinks):
        return attend(q, k, k, softmax_scale=1.0, softmax_aux=sinks)[0].sum()

    found = jax.grad(loss, (0, 1))(q, jnp.zeros(sinks))
    assert [x.shape for x in found] == [q.shape, sinks]


@pytest.mark.parametrize(
    ("returned", "error", "said"),
    [
        (
            lambda output, lse: output,
            TypeError,
            r"\(output, lse\), got \w+\(2, 9, 4, 6\)",
        ),
        (lambda output, lse: (output, None, lse), TypeError, "got tuple of 3"),
        (
            lambda output, lse: (output, None),
            TypeError,
            "lse as an array of JAX, got a None",
        ),
        (
            lambda output, lse: (output, lse.astype("bfloat16")),
            TypeError,
            "lse in float32, got bfloat16",
        ),
        (
            lambda output, lse: (output.astype("int32"), lse),
            TypeError,
            "a floating output, got int32",
        ),
        (
            lambda output, lse: (output, lse.swapaxes(1, 2)),
            ValueError,
            r"lse of shape \(2, 4, 9\), got \(2, 9, 4\)",
        ),
        (
            lambda output, lse: (output, lse[..., None]),
            ValueError,
            r"lse of shape \(2, 4, 9\), got \(2, 4, 9, 1\)",
        ),
        (
            lambda output, lse: (output.swapaxes(1, 2), lse),
            ValueError,
            r"output of shape \(2, 9, 4, 6\), got .*; with layout 'bthd' query is",
        ),
    ],
)
def test_what_a_kernel_returns_is_checked(returned, error, said):
    def kernel(query, key, value, **given):
        return returned(*vanilla(query, key, value, **given))

    attend = borrow_backward(kernel)
    with pytest.raises(error, match=f"^borrow_backward: .*{said}"):
        attend(Q, KEYS, VALUES, softmax_scale=0.5)


def test_what_a_kernel_returns_in_the_other_layout_is_checked():
    def kernel(query, key, value, **given):
        return vanilla(*(x.swapaxes(1, 2) for x in (query, key, value)), **given)

    attend = borrow_backward(kernel, layout="bhtd")
    turned = (x.swapaxes(1, 2) for x in (Q, KEYS, VALUES))
    with pytest.raises(ValueError, match=r"output of shape \(2, 4, 9, 6\), got \(2, 9"):
        attend(*turned, softmax_scale=0.5)
