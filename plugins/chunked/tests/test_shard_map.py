"""Inside a shard_map that checks what varies, chunked is what it is outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from switchax_chunked import borrow_backward, decode
from switchax_chunked.attend import attend

pytestmark = pytest.mark.usefixtures("quick_compilation")

P = PartitionSpec
B, T, S, H, K, D = 2, 3, 9, 4, 2, 8


def drawn(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


LENGTHS = jnp.asarray([9, 4], jnp.int32)
# Of each call: what is static, and arrays with where they lie.
CALLS = {
    "causal": ({"causal": True, "q_offset": 6}, {}),
    "window": ({"window": (2, 1), "q_offset": 3}, {}),
    "lengths": ({}, {"kv_lengths": (LENGTHS, P("dp"))}),
    "bias": ({}, {"bias": (drawn(1, H, T, S, seed=3), P(None, "tp"))}),
    "sinks": ({}, {"softmax_aux": (drawn(H, seed=4), P("tp"))}),
}


@pytest.mark.parametrize("borrowed", [False, True], ids=["chunked", "borrowed"])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_those_of_one_device(name, borrowed):
    static, placed = CALLS[name]
    forward = borrow_backward(attend) if borrowed else attend
    given = {"q": drawn(B, T, H, D), "k": drawn(B, S, K, D, seed=1)}
    given |= {"v": drawn(B, S, K, D, seed=2), **{n: x for n, (x, _) in placed.items()}}
    specs = dict.fromkeys("qkv", P("dp", None, "tp"))
    specs |= {n: spec for n, (_, spec) in placed.items()}

    def run(given):
        arrays = dict(given)
        q, k, v = (arrays.pop(name) for name in "qkv")
        return forward(q, k, v, softmax_scale=0.4, **static, **arrays)

    mesh = jax.make_mesh((2, 2), ("dp", "tp"), (AxisType.Auto,) * 2)
    sharded = jax.shard_map(
        run,
        mesh=mesh,
        in_specs=(specs,),
        out_specs=(P("dp", None, "tp"), P("dp", "tp")),
    )
    floats = {n: x for n, x in given.items() if n != "kv_lengths"}

    def both(function):
        def outputs(floats):
            return function({n: floats.get(n, x) for n, x in given.items()})

        found, pull = jax.vjp(jax.jit(outputs), floats)
        return found, pull(found)

    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5),
        both(sharded),
        both(run),
    )


@pytest.mark.parametrize("mapped", [False, True], ids=["plain", "vmap"])
def test_a_few_rows_on_a_cache(monkeypatch, mapped):
    monkeypatch.setattr(decode, "has_matrix_units", lambda: True)
    shapes = ((B, T, H, D), (B, S, K, D), (B, S, K, D))
    given = [drawn(*s, seed=i).astype("bfloat16") for i, s in enumerate(shapes)]

    def run(q, k, v, lengths):
        return attend(q, k, v, softmax_scale=0.4, kv_lengths=lengths)[0]

    spec, of_q = P("dp", None, "tp"), P("dp", None, "tp")
    if mapped:
        run = jax.vmap(run, in_axes=(0, None, None, None))
        given[0], of_q = jnp.stack([given[0]] * 2), P(None, *of_q)
    mesh = jax.make_mesh((2, 2), ("dp", "tp"), (AxisType.Auto,) * 2)
    specs = (of_q, spec, spec, P("dp"))
    sharded = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=of_q)
    found, wanted = (jax.jit(f)(*given, LENGTHS) for f in (sharded, run))
    np.testing.assert_allclose(found, wanted, atol=2**-7)


def test_a_dropout_key_may_be_all_that_varies():
    x, key = drawn(B, T, H, D), jax.random.key(0)

    def run(x, key):
        key = jax.random.fold_in(key, jax.lax.axis_index("dp"))
        given = {"dropout_prob": 0.3, "dropout_key": key}
        return attend(x, x, x, softmax_scale=0.4, **given)[0]

    mesh = jax.make_mesh((2,), ("dp",), (AxisType.Auto,))
    sharded = jax.shard_map(run, mesh=mesh, in_specs=(P(), P()), out_specs=P("dp"))
    one, other = jnp.split(jax.jit(sharded)(x, key), 2)
    assert (one != other).any()
