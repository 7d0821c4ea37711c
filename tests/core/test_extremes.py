"""Numbers at the ends of their ranges: none is lost in silence."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import switchax
from switchax.kinds.attention.oracle import attention_oracle

X = jax.random.normal(jax.random.key(0), (1, 4, 1, 32), jnp.float32)


class OfItsOwn:
    """What makes itself an array for JAX."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


@pytest.mark.parametrize(
    ("operation", "options"),
    [
        ("vanilla", {}),
        ("vanilla", {"causal": True}),
        ("vanilla", {"logits_soft_cap": 3e12}),
        ("sdpa", {}),
        ("sdpa", {"causal": True}),
    ],
)
def test_logits_whose_floats_lie_far_apart_still_choose_the_largest(operation, options):
    q = X * 1e7  # 32 ** -0.5 is no power of two: XLA would round the logits twice
    want = attention_oracle(q, q, X, **options)
    out = switchax.attention(q, q, X, operation=operation, return_lse=True, **options)
    np.testing.assert_allclose(out.attention_outputs, want.output, rtol=1e-6)
    np.testing.assert_allclose(out.lse, want.lse, rtol=1e-6)


def draws_of(*shape, scale):
    return [
        jax.random.normal(jax.random.key(seed), shape) * size
        for seed, size in enumerate(scale)
    ]


@pytest.mark.parametrize(
    ("operation", "head_dim", "options"),
    [
        ("vanilla", 1, {}),
        ("vanilla", 1, {"causal": True}),
        ("vanilla", 8, {"logits_soft_cap": 1e15}),
        ("sdpa", 1, {}),
        ("sdpa", 1, {"causal": True}),
    ],
)
def test_a_product_fused_into_the_maximum_s_subtraction_changes_nothing(
    operation, head_dim, options
):
    q, k, v = draws_of(1, 3, 2, head_dim, scale=(2e5, 2e5, 1))

    def attend(q, k, v):
        return switchax.attention(q, k, v, operation=operation, **options)

    want = attention_oracle(q, k, v, **options)
    np.testing.assert_allclose(attend(q, k, v), want.output, rtol=1e-6)
    # Each row has one key: gradients of logits are 0, and never of the size of logits.
    gradients = jax.grad(lambda *x: attend(*x).sum(), (0, 1, 2))(q, k, v)
    for gradient in gradients[:2]:
        np.testing.assert_allclose(gradient, jnp.zeros_like(gradient), atol=1)
    assert jnp.isfinite(gradients[2]).all()


@pytest.mark.parametrize("operation", ["vanilla", "sdpa"])
def test_a_wide_bias_of_numpy_empties_no_row(operation):
    bias = np.zeros((4, 4))
    bias[0] = np.finfo(np.float64).min
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy would warn where JAX narrows it
        out = switchax.attention(X, X, X, bias=bias, operation=operation)
    np.testing.assert_allclose(out[0, 0], X.mean((0, 1)), rtol=1e-5)


def test_wide_sinks_of_numpy_take_everything():
    aux = np.array([1e300])
    out = switchax.attention(X, X, X, softmax_aux=aux, operation="vanilla")
    assert not out.any()


def test_integers_that_make_themselves_arrays_never_wrap():
    ids = np.zeros((1, 4), np.int64)
    with pytest.raises(ValueError, match="q_segment_ids within int32"):
        switchax.attention(
            X, X, X, q_segment_ids=OfItsOwn(ids + 2**32), kv_segment_ids=ids
        )
    out = switchax.attention(X, X, X, kv_lengths=OfItsOwn(np.array([2**32])))
    np.testing.assert_array_equal(out, switchax.attention(X, X, X))
    offset = OfItsOwn(np.array([2**32 - 5]))
    out = switchax.attention(X, X, X, causal=True, q_offset=offset)
    np.testing.assert_allclose(out, switchax.attention(X, X, X), rtol=1e-6)


def test_cotangents_of_weights_that_nothing_sees_do_not_spread():
    def entropy(q):
        out = switchax.attention(
            q, X, X, causal=True, return_weights=True, operation="vanilla"
        )
        # Its derivative at 0 is infinite.
        return jax.scipy.special.entr(out.attention_weights).sum()

    gradient = jax.grad(entropy)(X)
    assert np.isfinite(gradient).all()
    assert gradient[:, 1:].any()


def test_sinks_of_nothing_have_no_gradient_where_there_is_no_key():
    def total(aux):
        none = X[:, :0]
        out = switchax.attention(
            X, none, none, softmax_aux=aux, return_lse=True, operation="vanilla"
        )
        return jnp.where(jnp.isfinite(out.lse), out.lse, 0).sum()

    assert jax.grad(total)(jnp.array([-jnp.inf])) == 0
    assert jax.grad(total)(jnp.array([2.0])) == 4


@pytest.mark.parametrize("operation", ["vanilla", "sdpa"])
@pytest.mark.parametrize(
    ("q", "k", "scale"), [(1e9, 1e-37, 1e30), (1e-12, 1e38, 2.5e-27), (2.0, 3.0, -0.7)]
)
def test_a_scale_far_from_1_brings_no_operand_out_of_range(operation, q, k, scale):
    q = np.full((1, 1, 1, 4), q, "float32")
    k = np.full((1, 2, 1, 4), k, "float32") * np.array([1, 2], "float32")[:, None, None]
    v = np.arange(8, dtype="float32").reshape(1, 2, 1, 4)
    want = attention_oracle(q, k, v, softmax_scale=scale)
    out = switchax.attention(q, k, v, softmax_scale=scale, operation=operation)
    np.testing.assert_allclose(out, want.output, rtol=1e-4)
