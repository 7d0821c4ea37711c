"""What is vanilla's own; the contract as a whole is tested for every operation."""

import jax
import jax.numpy as jnp
import numpy as np

import switchax
from switchax_vanilla.kernel import attend


def operands() -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(key, (1, 5, 2, 8), jnp.float32) for key in keys)


def test_declares_every_feature_and_platform():
    capabilities = switchax.OperationRegistry.get("vanilla").capabilities
    assert capabilities.features == set(switchax.ATTENTION.features)
    assert capabilities.platforms == {"cpu", "cuda", "rocm", "tpu", "tt"}
    assert "float64" in capabilities.dtypes


def test_cotangents_of_rows_that_see_nothing_do_not_spread():
    q, k, v = operands()
    visible = (jnp.arange(5) < 3).reshape(1, 1, 5, 1)

    def output(q, k, v):
        return attend(q, k, v, softmax_scale=1.0, visible=visible).output

    value, vjp = jax.vjp(output, q, k, v)
    is_seen = (jnp.arange(5) < 3).reshape(1, 5, 1, 1)
    cotangent = jnp.where(is_seen, 1.0, jnp.nan)
    for gradient in vjp(jnp.broadcast_to(cotangent, value.shape)):
        assert np.isfinite(gradient).all()


def test_float16_is_computed_in_float32():
    q, k, v = (x.astype(jnp.float16) for x in operands())
    result = attend(q * 60, k * 60, v, softmax_scale=1.0)  # beyond float16 in q @ k
    assert result.output.dtype == result.lse.dtype == jnp.float32
    assert np.isfinite(result.lse).all()
