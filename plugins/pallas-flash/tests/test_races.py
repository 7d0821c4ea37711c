"""Copies of a kernel's windows against each other, by the TPU interpreter.

Two cores share the parallel axes of a grid; what is not written yet reads as NaN.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from switchax_pallas_flash import PallasFlashConfig, backward
from switchax_pallas_flash.attend import attend

pytestmark = pytest.mark.further  # minutes: every access is watched

SIZES = {
    "block_q": 128,
    "block_kv": 256,
    "block_kv_compute": 128,
    "block_kv_backward": 128,
    "block_q_backward": 256,
    "block_q_compute_backward": 128,
}
CALLS = {
    "causal": {"causal": True},
    "lengths": {"kv_lengths": jnp.array([300, 0], jnp.int32), "window": (200, 0)},
    "bias": {
        "bias": jnp.zeros((1, 2, 300, 300)),
        "mask": jnp.ones((2, 1, 300, 1), bool),
    },
}


def gradients(interpret, **call):
    query, key, value = (
        jax.random.normal(jax.random.key(n), (2, heads, 300, 32))
        for n, heads in enumerate((2, 1, 1))
    )

    def loss(operands):
        given = {**call, **operands, "softmax_scale": 0.2}
        config = PallasFlashConfig(**SIZES)
        output, lse = attend(**given, config=config, interpret=interpret)
        return (output**2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

    operands = {"q": query, "k": key, "v": value}
    if "bias" in call:
        operands["bias"] = call["bias"]
    return jax.value_and_grad(loss)(operands)


def detecting():
    return pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)


@pytest.mark.parametrize("name", CALLS)
def test_no_kernel_races_nor_reads_what_is_not_written(name):
    found = gradients(detecting(), **CALLS[name])
    expected = gradients(True, **CALLS[name])
    for got, want in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_kernel_that_adds_up_in_any_order_is_seen_to_race(monkeypatch):
    launch = backward.launch

    def in_any_order(*given, parallel, **options):
        return launch(*given, parallel=parallel + 1, **options)

    monkeypatch.setattr(backward, "launch", in_any_order)
    with pytest.raises(Exception, match=r"RACE DETECTED|Revisited block"):
        gradients(detecting(), causal=True)
