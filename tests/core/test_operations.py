"""What conformance does not ask of vanilla and sdpa: float64, strictness, casts."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import switchax
from switchax import OperationMetadata, OperationRegistry
from switchax.kinds.attention.oracle import attention_oracle

from . import attention_cases as cases
from .attention_cases import Case

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("quick_compilation")]

NEWER = pytest.mark.skipif(
    jax.__version_info__ >= (0, 11), reason="sdpa refuses bfloat16 on a CPU"
)
IN_BFLOAT16 = pytest.mark.parametrize(
    "name", ["vanilla", pytest.param("sdpa", marks=NEWER)]
)
PADDED = {"q_len": 5, "kv_len": 9}  # causal at offset 0 leaves keys that none sees
CAUSAL = {"causal": True, **PADDED}


def named(name):
    return functools.partial(switchax.attention, operation=name)


def instance(name):
    return OperationRegistry.create(name)


@pytest.mark.parametrize(
    "case",
    [
        Case(dtype="float64", bias="full", soft_cap=2.0, sinks=2, **CAUSAL),
        Case(dtype="float64", segments=True, lengths="both", dropout=0.3),
        Case(
            dtype="float64", mask="full", window=(2, 1), offset="batch", layout="bhtd"
        ),
    ],
    ids=str,
)
def test_vanilla_is_right_in_float64(case):
    with jax.enable_x64(True):
        cases.check(case, named("vanilla"))


@pytest.mark.parametrize(
    "case",
    [
        Case(mask="row", bias="minus_inf"),
        Case(lengths="q", kv_heads=1, **CAUSAL),
        Case(window=(1, 0), layout="bhtd"),
    ],
    ids=str,
)
def test_lse_of_sdpa_is_right(case):
    call = cases.draw(case)
    got, _ = cases.evaluate(named("sdpa"), call, None, return_lse=True)
    expected = cases.oracle(attention_oracle, call)
    logit = cases.largest_logit(case, call)
    cases.compare("output", got.attention_outputs, expected.output, "float32", logit)
    cases.compare("lse", got.lse, expected.lse, "float32", logit, False)
    assert got.lse.dtype == jnp.float32


@pytest.mark.parametrize("name", ["vanilla", "sdpa"])
@pytest.mark.parametrize("layout", ["bthd", "thd"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 0},
        {"q_len": 0},
        {"kv_len": 0},
        {"heads": 0, "kv_heads": 0},
        {"heads": 0},
        {"head_dim": 0, "v_head_dim": 0},
        {"q_len": 0, "kv_len": 0},
    ],
    ids=str,
)
def test_axes_of_length_zero_are_legal(sizes, layout, name):
    case = Case(**sizes, causal=True, layout=layout, bias="full")
    if name == "sdpa":
        cases.check(case, named(name), lse=False, weights=False, d_lse=False)
    else:
        cases.check(dataclasses.replace(case, sinks=0), named(name))
        cases.check(dataclasses.replace(case, sinks=2), named(name), dirty=False)


def test_vanilla_takes_a_value_without_columns():
    cases.check(Case(v_head_dim=0), named("vanilla"))


def test_lse_without_keys_is_that_of_the_sinks():
    call = cases.draw(Case(kv_len=0, sinks=2))
    got = named("vanilla")(**call.arrays, return_lse=True)
    sinks = call.arrays["softmax_aux"]
    expected = np.log(np.exp(sinks).sum(axis=1))[None, :, None]
    np.testing.assert_allclose(got.lse, expected + np.zeros((2, 1, 7)), rtol=1e-6)


@IN_BFLOAT16
def test_gradient_of_a_broadcast_bias_is_summed_in_float32(name):
    # Seen in the program: a CPU sums bfloat16 in float32 whatever it is told.
    call = cases.draw(Case(bias="key", mask="full", dtype="bfloat16"))
    rest = call.without("bias")

    def loss(bias):
        return named(name)(**rest.arrays, **rest.options, bias=bias).sum()

    with jax.numpy_dtype_promotion("standard"):
        program = str(jax.make_jaxpr(jax.grad(loss))(jnp.asarray(call.arrays["bias"])))
    assert re.search(r"f32\[.*\] = reduce_sum", program)
    assert not re.search(r"bf16\[.*\] = reduce_sum", program)


@pytest.mark.parametrize("name", ["vanilla", "sdpa"])
def test_value_under_value_and_grad_is_the_plain_value(name):
    call = cases.draw(Case(bias="full", **CAUSAL))

    def loss(floats):
        rest = {n: a for n, a in call.arrays.items() if n not in floats}
        return named(name)(**floats, **rest, **call.options).sum()

    floats = {n: jnp.asarray(call.arrays[n]) for n in call.floats}
    value, _ = jax.value_and_grad(loss)(floats)
    assert value == loss(floats)


def drop(call, seed=0, **more):
    key = jax.random.key(seed)
    asked = {"return_lse": True, "return_weights": True}
    arrays = {**call.arrays, "dropout_key": key}
    return named("vanilla")(**arrays, **call.options, **asked, **more)


def test_dropout_repeats_for_a_key_rescales_and_leaves_lse():
    call = cases.draw(Case(q_len=64, kv_len=64))
    plain, dropped = drop(call), drop(call, dropout_prob=0.25)
    again, other = drop(call, dropout_prob=0.25), drop(call, 1, dropout_prob=0.25)
    np.testing.assert_array_equal(dropped.attention_outputs, again.attention_outputs)
    assert (dropped.attention_weights != other.attention_weights).mean() > 0.2
    np.testing.assert_array_equal(dropped.lse, plain.lse)
    kept = np.asarray(dropped.attention_weights) > 0
    weights = np.asarray(dropped.attention_weights)[kept]
    expected = np.asarray(plain.attention_weights)[kept] / 0.75
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    # 2 * 4 * 64 * 64 draws: a standard deviation of 0.0024
    assert abs(kept.mean() - 0.75) < 0.01
    bhtd = drop(cases.draw(Case(q_len=64, kv_len=64, layout="bhtd")), dropout_prob=0.25)
    np.testing.assert_array_equal(np.asarray(bhtd.attention_weights) > 0, kept)


def test_a_dropout_of_zero_needs_no_key_and_ignores_one():
    call = cases.draw(Case())
    plain = named("vanilla")(**call.arrays)
    np.testing.assert_array_equal(drop(call, dropout_prob=0.0).attention_outputs, plain)


@pytest.mark.usefixtures("standard_promotion")
@IN_BFLOAT16
def test_runtime_dtype_casts_and_the_output_has_the_dtype_of_query(name):
    call = cases.draw(Case())
    arrays = {n: jnp.asarray(a) for n, a in call.arrays.items()}
    metadata = OperationMetadata(runtime_dtype="bfloat16")
    mixed = {**arrays, "key": arrays["key"].astype("bfloat16")}
    got = named(name)(**mixed, metadata=metadata)
    halves = {n: a.astype("bfloat16") for n, a in arrays.items()}
    expected = named(name)(**halves)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got.astype("bfloat16"), expected)
    called = OperationRegistry.create(name, metadata)(**mixed)
    np.testing.assert_array_equal(called.attention_outputs, got)


@pytest.mark.parametrize("name", ["vanilla", "sdpa"])
def test_a_float64_bias_or_sink_stays_finite_beside_float32(name):
    with jax.enable_x64(True):
        x = (
            jnp.ones((1, 3, 1, 8), jnp.float32)
            * jnp.arange(3.0, dtype="float32")[None, :, None, None]
        )
        bias = jnp.full((3, 3), jnp.finfo(jnp.float64).min)
        found = switchax.attention(x, x, x, bias=bias, operation=name)
        np.testing.assert_allclose(found, 1.0, atol=1e-6)
        if name == "vanilla":
            sinks = jnp.full((1,), jnp.finfo(jnp.float64).max)
            found = switchax.attention(x, x, x, softmax_aux=sinks, operation=name)
            assert not found.any()


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int8", "uint64"])
@pytest.mark.parametrize("name", ["vanilla", "sdpa"])
def test_offsets_of_any_integer_dtype_are_positions(name, dtype):
    with jax.enable_x64(True):
        x = jnp.ones((1, 2, 1, 4), "float32")
        offset = jnp.asarray(1, dtype)
        found = named(name)(x, x, x, causal=True, q_offset=offset)
        assert (found == named(name)(x, x, x, causal=True, q_offset=1)).all()


@pytest.mark.parametrize("number", [1e300, -1e300])
@pytest.mark.parametrize("make", [np.array, np.float64])
@pytest.mark.parametrize("name", ["vanilla", "sdpa"])
def test_a_number_of_numpy_beyond_float32_is_finite(name, make, number):
    x = jnp.ones((1, 2, 1, 2))
    value = jnp.arange(4.0).reshape(1, 2, 1, 2)
    found = named(name)(x, x, value, bias=make(number))
    np.testing.assert_allclose(found, jnp.broadcast_to(jnp.array([1.0, 2]), x.shape))


@pytest.mark.parametrize("number", [1e39, -1e300])
@pytest.mark.parametrize("name", ["vanilla", "sdpa"])
def test_a_bias_beyond_float32_has_a_gradient(name, number):
    with jax.enable_x64(True):
        x = jnp.ones((1, 3, 1, 4), "float32")
        value = jnp.arange(3, dtype="float32").reshape(1, 3, 1, 1) * x

        def loss(bias):
            return named(name)(x, x, value, bias=bias)[0, 1].sum()

        bias = jnp.full((3, 3), number, "float64")
        found = jax.grad(loss)(bias)
        np.testing.assert_allclose(found[1], [-4 / 3, 0, 4 / 3], atol=1e-6)
