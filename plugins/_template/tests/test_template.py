"""What the operation claims, held against the float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import switchax
from switchax.kinds.attention.oracle import attention_oracle, attention_oracle_vjp

LENGTHS = (1, 64, 70)
OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "q_offset": 3},
    "lengths": {"kv_lengths": jnp.array([0, 1])},
    "segments": {
        "q_segment_ids": jnp.array([[0, 0, 1, -1, 1], [2, 2, 2, 2, 2]]),
        "kv_segment_ids": jnp.arange(70).reshape(1, 70) // 35 + jnp.array([[0], [1]]),
    },
}


def operands(kv_len: int) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = [(2, 5, 4, 8), (2, kv_len, 2, 8), (2, kv_len, 2, 8)]
    return tuple(
        jax.random.normal(key, shape, jnp.float32)
        for key, shape in zip(keys, shapes, strict=True)
    )


CASES = [
    (name, kv_len)
    for name in OPTIONS
    for kv_len in ((70,) if name == "segments" else LENGTHS)  # its ids are 70
]


@pytest.mark.parametrize(("name", "kv_len"), CASES)
def test_agrees_with_the_oracle(name: str, kv_len: int) -> None:
    q, k, v = operands(kv_len)
    options = OPTIONS[name]

    def attend(q, k, v):
        return tuple(
            switchax.attention(
                q, k, v, operation="template", return_lse=True, **options
            )[::2]
        )

    (output, lse), vjp = jax.vjp(attend, q, k, v)
    expected = attention_oracle(q, k, v, **options)
    np.testing.assert_allclose(output, expected.output, atol=2e-6)
    np.testing.assert_allclose(lse, expected.lse, atol=2e-6)
    d_output, d_lse = jnp.cos(output), jnp.where(lse == -jnp.inf, 0, jnp.sin(lse))
    wanted = attention_oracle_vjp(q, k, v, d_output=d_output, d_lse=d_lse, **options)
    found = vjp((d_output, d_lse))
    for argument, gradient in zip(("query", "key", "value"), found, strict=True):
        np.testing.assert_allclose(gradient, wanted[argument], atol=1e-5)


def test_padding_may_be_dirty() -> None:
    q, k, v = operands(70)
    dirty = k.at[:, 33:].set(jnp.nan), v.at[:, 33:].set(jnp.inf)
    lengths = jnp.array([33, 2])

    def loss(q, k, v):
        output = switchax.attention(q, k, v, operation="template", kv_lengths=lengths)
        return output.sum()

    clean = jax.value_and_grad(loss, (0, 1, 2))(q, k, v)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.value_and_grad(loss, (0, 1, 2))(q, *dirty),
        clean,
    )


def test_refuses_what_it_does_not_declare() -> None:
    q, k, v = operands(64)
    with pytest.raises(switchax.UnsupportedError, match="logits_soft_cap"):
        switchax.attention(q, k, v, operation="template", logits_soft_cap=30.0)
