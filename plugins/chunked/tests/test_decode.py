"""A few rows on a bfloat16 cache: products over all heads agree with the tiles."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchax_chunked import borrow_backward, decode
from switchax_chunked.attend import attend
from switchax_chunked.tiling import ChunkedConfig
from switchax_chunked.visible import Hidden

pytestmark = pytest.mark.usefixtures("quick_compilation")

B, T, S, H, K, D = 2, 3, 40, 4, 2, 32
IDS = {
    "q_segment_ids": jnp.asarray([[0, 0, 1], [2, -1, 2]], jnp.int32),
    "kv_segment_ids": jnp.asarray([[0] * 20 + [1] * 20, [2] * 33 + [-1] * 7]),
}
CALLS = {
    "plain": {},
    "causal": {"causal": True, "q_offset": jnp.asarray([30, 37], jnp.int32)},
    "window": {"window": (30, 0), "q_offset": 37},
    "mask": {"mask": jax.random.bernoulli(jax.random.key(3), 0.7, (B, H, T, S))},
    "rows": {"q_lengths": jnp.asarray([2, 3], jnp.int32)},
    "lengths": {"kv_lengths": jnp.asarray([40, 31], jnp.int32)},
    "segments": IDS,
    "bias": {
        "bias": jax.random.normal(jax.random.key(4), (1, H, 1, S)),
        "logits_soft_cap": 2.0,
    },
    "sinks": {"softmax_aux": jax.random.normal(jax.random.key(5), (H, 2))},
}


def drawn(*shape, seed=0, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def operands(kv_heads=K):
    shapes = ((B, T, H, D), (B, S, kv_heads, D), (B, S, kv_heads, 24))
    return [drawn(*shape, seed=seed) for seed, shape in enumerate(shapes)]


@functools.cache
def compiled(name, kv_heads, has_units):
    """Compile a call, on a machine that has matrix units or has none."""
    call = CALLS[name]
    run = jax.jit(lambda q, k, v: attend(q, k, v, softmax_scale=0.4, **call))
    with (
        mock.patch.object(decode, "has_matrix_units", return_value=has_units),
        mock.patch.object(decode, "_by_products", wraps=decode._by_products) as used,
    ):
        program = run.lower(*operands(kv_heads)).compile()
    assert used.called == has_units
    return program


def agree(given, name, kv_heads=K):
    products, tiles = (compiled(name, kv_heads, x)(*given) for x in (True, False))
    # Weights are rounded to bfloat16, by half of 2**-8 each.
    np.testing.assert_allclose(products[0], tiles[0], rtol=0, atol=2**-9 * 3)
    np.testing.assert_allclose(products[1], tiles[1], rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", CALLS)
def test_products_agree_with_tiles(name):
    agree(operands(), name)


@pytest.mark.parametrize("kv_heads", [1, 4])
def test_one_kv_head_and_one_for_each_head(kv_heads):
    agree(operands(kv_heads), "causal", kv_heads)


SPOILT = {
    "a key of one head": (1, (0, 5, 1, 2)),
    "a key that is past its length": (1, (1, 35, 0, 0)),
    "a value of one head": (2, (0, 5, 1, 2)),
    "a value that is past its length": (2, (1, 35, 0, 0)),
    "a row": (0, (1, 0, 3, 0)),
}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("which", "place"), SPOILT.values(), ids=SPOILT)
def test_what_is_not_finite_reaches_who_sees_it(which, place, value):
    given = operands()
    given[which] = given[which].at[place].set(value)
    agree(given, "lengths")


def test_a_cache_that_is_mostly_empty_is_read_by_tiles(monkeypatch):
    right = decode._by_products

    def wrong(*args):
        (output, lse), _ = right(*args)
        return (output + 100, lse), jnp.asarray(True)

    monkeypatch.setattr(decode, "_by_products", wrong)
    monkeypatch.setattr(decode, "has_matrix_units", lambda: True)

    @jax.jit
    def run(lengths):
        given = {"kv_lengths": lengths, "config": ChunkedConfig(block_kv=8)}
        return attend(*operands(), softmax_scale=0.4, **given)[0]

    assert run(jnp.full(B, S, jnp.int32)).min() > 50
    assert run(jnp.asarray([1, 0], jnp.int32)).max() < 50


def test_gradients_follow(monkeypatch):
    q, k, v = operands()

    def loss(q, k, v):
        output, lse = attend(q, k, v, softmax_scale=0.4, **CALLS["causal"])
        return (output * jnp.cos(output)).sum() + lse.sum()

    found = []
    for has_units in (True, False):
        monkeypatch.setattr(decode, "has_matrix_units", lambda x=has_units: x)
        found.append(jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v))
    for x, y in zip(*found, strict=True):
        x, y = (np.asarray(a, np.float32) for a in (x, y))
        np.testing.assert_allclose(x, y, rtol=2**-6, atol=2**-6)


def test_vmap_asks_both_and_takes_the_right_one(monkeypatch):
    monkeypatch.setattr(decode, "has_matrix_units", lambda: True)
    q, k, v = (jnp.stack([x, -x]) for x in operands())
    k = k.at[1, 0, 5, 1, 2].set(jnp.nan)

    def run(q, k, v):
        return attend(q, k, v, softmax_scale=0.4)[0]

    found = jax.jit(jax.vmap(run))(q, k, v)
    for n in range(2):
        np.testing.assert_allclose(found[n], run(q[n], k[n], v[n]), atol=2**-7)


@pytest.mark.parametrize(
    ("kv_len", "width", "panels"),
    [(8192, 1024, 1), (32768, 1024, 4), (32771, 1024, 1), (24576, 1024, 3)],
)
def test_values_are_cut_into_equal_panels(kv_len, width, panels):
    assert decode._panels(kv_len, width) == panels


def test_panels_add_up(monkeypatch):
    monkeypatch.setattr(decode, "PANEL", 100)
    monkeypatch.setattr(decode, "has_matrix_units", lambda: True)
    output, _ = attend(*operands(), softmax_scale=0.4)
    expected, _ = compiled("plain", K, False)(*operands())
    np.testing.assert_allclose(output, expected, rtol=0, atol=2**-9 * 3)


def test_other_dtypes_and_many_rows_are_left_to_tiles(monkeypatch):
    monkeypatch.setattr(decode, "has_matrix_units", lambda: True)
    q, k, v = operands()
    as_operands = decode.Operands(q[:, :, None], k, v, None)
    assert decode.suits(as_operands, Hidden(), None)
    assert not decode.suits(as_operands, Hidden(), jax.random.key(0))
    wide = as_operands._replace(v=v.astype(jnp.float32))
    assert not decode.suits(wide, Hidden(), None)
    many = jnp.zeros((1, 16, 1, 16, D), jnp.bfloat16)
    assert not decode.suits(as_operands._replace(q=many), Hidden(), None)


@pytest.mark.parametrize(
    ("rows", "kv_len", "more", "suits"),
    [
        (1, 8192, {}, True),  # 8 heads, two arrays of 4 bytes: as 16 + 16 of 2 bytes
        (2, 8192, {}, False),
        (1, 8192, {"mask": jnp.ones((4, 1, 1, 8192), bool)}, False),
        (1, 8192, {"bias": jnp.ones((4, 1, 1, 8192))}, False),
        (1, 15, {}, False),
    ],
)
def test_what_is_written_is_no_larger_than_the_cache(
    monkeypatch, rows, kv_len, more, suits
):
    monkeypatch.setattr(decode, "has_matrix_units", lambda: True)
    used = mock.Mock(wraps=decode._by_products)
    monkeypatch.setattr(decode, "_by_products", used)
    k = jnp.zeros((4, kv_len, 1, 16), jnp.bfloat16)
    q = jnp.zeros((4, rows, 8, 16), jnp.bfloat16)
    run = jax.jit(lambda q, k: attend(q, k, k, softmax_scale=0.4, **more)[0])
    held = run.lower(q, k).compile().memory_analysis().temp_size_in_bytes
    assert used.called == suits
    if kv_len > 1000:
        assert held <= 1.1 * (k.nbytes + k.nbytes)


def test_a_gradient_starts_from_weights_that_are_not_rounded(monkeypatch):
    monkeypatch.setattr(decode, "has_matrix_units", lambda: True)
    q, k, v = operands()
    k = k + jnp.asarray(32, k.dtype)  # so that the derivative of query is a difference
    wanted = [jnp.asarray(x, jnp.float32) for x in (q, k, v)]

    def loss(q, k, v):
        return attend(q, k, v, softmax_scale=0.4)[0].sum()

    def borrowed(q, k, v):
        def kernel(*operands, **given):
            output, lse = attend(*operands, **given)
            return output.astype(jnp.bfloat16), lse

        output, _ = borrow_backward(kernel)(q, k, v, softmax_scale=0.4)
        return output.astype(jnp.float32).sum()

    right = np.asarray(jax.grad(loss)(*wanted))
    for run in (loss, borrowed):
        found = np.asarray(jax.grad(run)(q, k, v), np.float32)
        assert np.abs(found - right).max() <= 2**-7 * np.abs(right).max()
