"""What is chunked's own: it agrees with vanilla, and visits what is seen alone."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import switchax
from switchax import OperationMetadata, UnsupportedError
from switchax.kinds.attention.oracle import attention_oracle
from switchax_chunked.attend import attend
from switchax_chunked.tiling import ChunkedConfig, Tiling, tiling_for
from switchax_chunked.visible import Hidden, bounds, key_lists, row_lists

pytestmark = pytest.mark.usefixtures("quick_compilation")

BLOCKS = ChunkedConfig(block_q=4, block_kv=8)
B, T, S, H, K, D = 2, 11, 21, 4, 2, 8


def drawn(*shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32)


OPERANDS = {
    "query": drawn(B, T, H, D),
    "key": drawn(B, S, K, D, seed=1),
    "value": drawn(B, S, K, 6, seed=2),
}
IDS = {
    "q_segment_ids": jnp.asarray([[0] * 5 + [1] * 6, [-1] * 3 + [2] * 8], jnp.int32),
    "kv_segment_ids": jnp.asarray([[0] * 9 + [1] * 12, [2] * 15 + [-1] * 6], jnp.int32),
}
LENGTHS = {
    "q_lengths": jnp.asarray([7, 11], jnp.int32),
    "kv_lengths": jnp.asarray([13, 0], jnp.int32),
}
CALLS = {
    "plain": {},
    "causal": {"causal": True, "q_offset": S - T},
    "window": {"window": (5, 1), "q_offset": jnp.asarray([3, 9], jnp.int32)},
    "far": {"window": (5, 0), "q_offset": 5 * 10**8},
    "mask": {"mask": jax.random.bernoulli(jax.random.key(3), 0.5, (B, H, T, S))},
    "segments": IDS,
    "lengths": {**LENGTHS, "causal": True, "q_offset": jnp.int32(2)},
    "bias": {"bias": drawn(1, H, 1, S, seed=4), "logits_soft_cap": 2.0},
    "sinks": {"softmax_aux": drawn(H, 2, seed=5), "bias": drawn(B, 1, T, S, seed=6)},
}


def gradients(name, call, metadata=None):
    """Output, lse and all gradients, for a cotangent of each."""
    floats = ("bias", "softmax_aux")
    given = {**OPERANDS, **{n: x for n, x in call.items() if n in floats}}
    rest = {n: x for n, x in call.items() if n not in floats}

    def run(given):
        out = switchax.attention(
            **given, **rest, return_lse=True, operation=name, metadata=metadata
        )
        return out.attention_outputs, jnp.where(out.lse == -jnp.inf, 0, out.lse)

    outputs, pull = jax.vjp(jax.jit(run), given)
    cotangents = tuple(drawn(*x.shape, seed=7 + i) for i, x in enumerate(outputs))
    return outputs, pull(cotangents)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_agrees_with_vanilla_over_blocks_that_do_not_divide(call):
    metadata = OperationMetadata(operation_configs={"chunked": BLOCKS})
    found = gradients("chunked", call, metadata)
    expected = gradients("vanilla", call)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-5),
        found,
        expected,
    )


NARROW = {
    "static": {"window": (4, 1), "q_offset": 7},
    "beyond": {"window": (4, 0), "q_offset": 1000},
    "before": {"window": (4, 0), "q_offset": -30},
    "traced": {
        "window": (3, 2),
        "q_offset": jnp.asarray([12, -9], jnp.int32),
        "q_lengths": jnp.asarray([31, 40], jnp.int32),
        "kv_lengths": jnp.asarray([45, 20], jnp.int32),
    },
    "causal": {
        "window": (6, None),
        "causal": True,
        "q_offset": 10,
        "mask": jax.random.bernoulli(jax.random.key(8), 0.6, (1, 1, 40, 50)),
    },
}


@pytest.mark.parametrize("call", NARROW.values(), ids=NARROW)
def test_narrow_windows_start_their_blocks_anywhere(call):
    operands = {
        "query": drawn(2, 40, 2, D),
        "key": drawn(2, 50, 1, D, seed=1),
        "value": drawn(2, 50, 1, D, seed=2),
    }
    metadata = OperationMetadata(operation_configs={"chunked": BLOCKS})

    def run(name):
        def outputs(operands):
            given = {"operation": name, "metadata": metadata, "return_lse": True}
            out = switchax.attention(**operands, **call, **given)
            return out.attention_outputs, jnp.where(out.lse == -jnp.inf, 0, out.lse)

        found, pull = jax.vjp(jax.jit(outputs), operands)
        return found, pull(tuple(drawn(*x.shape, seed=3) for x in found))

    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-5),
        run("chunked"),
        run("vanilla"),
    )


def test_float64_agrees_where_indices_could_be_of_64_bits():
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        arrays = {n: rng.normal(size=x.shape) for n, x in OPERANDS.items()}
        call = {"causal": True, "q_offset": 3, "return_lse": True}
        metadata = OperationMetadata(operation_configs={"chunked": BLOCKS})

        def run(name, arrays):
            given = {**call, "operation": name, "metadata": metadata}
            out = switchax.attention(**arrays, **given)
            return (out.attention_outputs**2).sum() + out.lse.sum()

        found, expected = (
            jax.value_and_grad(lambda x, name=name: run(name, x))(arrays)
            for name in ("chunked", "vanilla")
        )
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12),
            found,
            expected,
        )


def test_what_nothing_sees_may_be_nan_forward_and_backward():
    dirty = {
        "query": OPERANDS["query"].at[0, 7:].set(jnp.nan),
        "key": OPERANDS["key"].at[0, 13:].set(jnp.nan).at[1].set(jnp.inf),
        "value": OPERANDS["value"].at[0, 13:].set(jnp.nan).at[1].set(jnp.nan),
    }

    def loss(given):
        out = switchax.attention(**given, **LENGTHS, operation="chunked")
        return (out**2).sum()

    found, expected = (jax.grad(loss)(given) for given in (dirty, OPERANDS))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


FILLED = {
    "causal": {},
    "window": {"window": (3, None), "q_offset": jnp.zeros((), jnp.int32)},
    "mask": {"mask": jnp.ones((1, 1, 1, S), bool)},
    "lengths": {"kv_lengths": jnp.asarray([S, S], jnp.int32)},
    "rows": {"q_lengths": jnp.asarray([1000, T], jnp.int32)},
    "ids": {
        "q_segment_ids": jnp.zeros((B, T), jnp.int32),
        "kv_segment_ids": jnp.zeros((B, S), jnp.int32),
    },
}


@pytest.mark.parametrize("rows", [T, 6], ids=["", "decode"])
@pytest.mark.parametrize("name", FILLED)
def test_rows_that_fill_a_block_see_nothing(name, rows):
    call = {"causal": True, "q_offset": 0, **FILLED[name]}
    metadata = OperationMetadata(operation_configs={"chunked": BLOCKS})
    if "q_segment_ids" in call:
        call["q_segment_ids"] = call["q_segment_ids"][:, :rows]

    def loss(given):
        given = {**given, "query": given["query"][:, :rows]}
        out = switchax.attention(
            **given, **call, operation="chunked", metadata=metadata
        )
        return (out**2).sum(), out

    dirty = {
        name: x.at[:, rows:].set(jnp.nan) if name != "query" else x
        for name, x in OPERANDS.items()
    }
    found, expected = (
        jax.grad(loss, has_aux=True)(given) for given in (dirty, OPERANDS)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (0, 0)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_head_dims_of_0_are_those_of_vanilla(sizes, dtype):
    size, v_size = sizes
    shapes = {"query": (1, 5, 4, size), "key": (1, 9, 2, size)}
    shapes |= {"value": (1, 9, 2, v_size)}
    given = {n: jnp.ones(s, dtype) for n, s in shapes.items()}

    def run(name):
        def outputs(given):
            given = {**given, "return_lse": True}
            return switchax.attention(**given, operation=name)[::2]

        found, pull = jax.vjp(outputs, given)
        return found, pull(jax.tree.map(jnp.ones_like, found))

    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(
            x.astype("float32"), y.astype("float32"), rtol=1e-2
        ),
        run("chunked"),
        run("vanilla"),
    )


def test_a_group_of_several_tiles_has_gradients_under_x64():
    blocks = ChunkedConfig(block_q=4, block_kv=8, block_heads=1)
    metadata = OperationMetadata(operation_configs={"chunked": blocks})

    def loss(given, name):
        out = switchax.attention(**given, operation=name, metadata=metadata)
        return (out**2).sum()

    with jax.enable_x64(True):
        found, expected = (
            jax.grad(loss)(OPERANDS, name) for name in ("chunked", "vanilla")
        )
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-5),
        found,
        expected,
    )


def test_a_cotangent_of_a_row_that_sees_nothing_reaches_no_sink():
    sinks = drawn(H, seed=5)

    def output(sinks):
        given = {"softmax_aux": sinks, **LENGTHS}
        return switchax.attention(**OPERANDS, **given, operation="chunked")

    d_output = drawn(B, T, H, 6, seed=9)
    dirty = d_output.at[0, 7:].set(jnp.nan).at[1].set(jnp.nan)
    clean = d_output.at[0, 7:].set(0).at[1].set(0)
    _, pull = jax.vjp(output, sinks)
    np.testing.assert_array_equal(pull(dirty)[0], pull(clean)[0])
    assert jnp.isfinite(pull(dirty)[0]).all()


TILING = Tiling(kv_heads=1, group=1, q=4, kv=4)


def visits(q_len, kv_len, **hides):
    """How many tiles are visited, for each sample; from both sides."""
    hidden = Hidden(**{n: x for n, x in hides.items() if x is not None})
    rows = row_lists(hidden, TILING, q_len, kv_len).count.sum(axis=1)
    keys = key_lists(hidden, TILING, q_len, kv_len).count.sum(axis=1)
    np.testing.assert_array_equal(rows, keys)
    return rows.tolist()


def test_tiles_that_nobody_sees_are_not_visited():
    def positions(**given):
        first, last = bounds(16, 16, given.get("causal", False), given["window"], 0)
        return visits(16, 16, first=first, last=last)

    assert visits(16, 16) == [16]
    assert positions(causal=True, window=None) == [10]
    assert positions(window=(4, 0)) == [7]
    assert positions(window=(5, 0)) == [9]
    assert positions(window=(0, 1)) == [7]
    lengths = jnp.asarray([5, 0, 99], jnp.int32)
    assert visits(16, 16, kv_lengths=lengths) == [8, 0, 16]
    assert visits(16, 16, q_lengths=lengths) == [8, 0, 16]
    packed = jnp.arange(16, dtype=jnp.int32)[None] // 8
    assert visits(16, 16, q_ids=packed, kv_ids=packed) == [8]
    assert visits(16, 16, q_ids=-1 - packed, kv_ids=-1 - packed) == [0]
    mask = jnp.zeros((1, 1, 1, 16, 16), bool).at[..., 0, 15].set(True)
    assert visits(16, 16, mask=mask) == [1]


def test_memory_is_linear_in_the_lengths():
    x = jax.ShapeDtypeStruct((1, 4096, 1, 64), jnp.float32)

    def loss(q, k, v):
        return attend(q, k, v, softmax_scale=0.1, causal=True)[0].sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    assert temporary < 16 * 3 * 4096 * 64 * 4 < 4096 * 4096 * 4


def test_a_tile_takes_heads_that_divide_and_grows_with_the_cache():
    assert tiling_for(4096, 4096, 6, 1) == Tiling(3, 1, 512, 1024)
    assert tiling_for(4096, 4096, 1, 7) == Tiling(1, 1, 512, 1024)
    assert tiling_for(4096, 4096, 1, 1) == Tiling(1, 1, 2048, 1024)
    assert tiling_for(4096, 4096, 8, 1, cache=2**20) == Tiling(2, 1, 512, 1024)
    assert tiling_for(4096, 4096, 8, 1, is_banded=True) == Tiling(2, 1, 512, 512)
    assert tiling_for(512, 512, 8, 1, is_banded=True) == Tiling(8, 1, 128, 256)
    assert tiling_for(4096, 4096, 8, 1, reach=256) == Tiling(8, 1, 128, 256)
    assert tiling_for(1300, 1300, 4, 1) == Tiling(4, 1, 440, 656)
    assert tiling_for(3, 5, 8, 4) == Tiling(8, 4, 3, 5)
    assert tiling_for(100, 100, 1, 1, config=ChunkedConfig(7, 9)) == (1, 1, 7, 9)
    assert tiling_for(64, 64, 4, 2, config=ChunkedConfig(block_heads=2))[:2] == (1, 2)


@pytest.mark.parametrize(
    ("wrong", "error"), [({"block_q": 0}, ValueError), ({"block_kv": 1.0}, TypeError)]
)
def test_blocks_are_numbers_from_1_on(wrong, error):
    with pytest.raises(error, match="a power of two such as 256 fits caches"):
        ChunkedConfig(**wrong)
    with pytest.raises(error):
        dataclasses.replace(BLOCKS, **wrong)


def test_weights_are_refused():
    with pytest.raises(UnsupportedError, match="weights unused"):
        switchax.attention(**OPERANDS, return_weights=True, operation="chunked")


def test_auto_takes_it_where_it_was_measured_alone():
    assert switchax.explain(**OPERANDS).chosen == "chunked:chunked"
    assert switchax.explain(**OPERANDS, target="tpu:v5e").chosen != "chunked:chunked"
    assert switchax.explain(**OPERANDS, target="cuda:h100").chosen != "chunked:chunked"


@pytest.mark.parametrize(
    ("head_dim", "options"),
    [(1, {}), (1, {"causal": True}), (8, {"logits_soft_cap": 1e15})],
)
def test_logits_of_1e9_choose_the_largest_key(head_dim, options):
    q, k, v = (drawn(1, 3, 2, head_dim, seed=i) for i in range(3))
    q, k = q * 2e5, k * 2e5

    def run(q, k, v):
        return attend(q, k, v, softmax_scale=0.3, **options)

    outputs, pull = jax.vjp(jax.jit(run), q, k, v)
    want = attention_oracle(q, k, v, softmax_scale=0.3, **options)
    np.testing.assert_allclose(outputs[0], want.output, rtol=1e-6)
    np.testing.assert_allclose(outputs[1], want.lse, rtol=1e-6)
    assert all(jnp.isfinite(x).all() for x in pull(outputs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("which", ["logits", "bias"])
def test_a_logit_of_inf_is_no_answer(which, dtype):
    q, v = jnp.ones((1, 1, 1, 4)), jnp.arange(8.0).reshape(1, 8, 1, 1)
    k = (-jnp.ones((1, 8, 1, 4))).at[0, 3].set(1)
    bias = None
    if which == "logits":
        q, k = q * 1e20, k * 1e20
    else:
        bias = jnp.zeros((1, 1, 1, 8)).at[..., jnp.array([2, 5])].set(jnp.inf)

    def run(v):
        given = [x.astype(dtype) for x in (q, k, v)]
        return attend(*given, softmax_scale=0.5, bias=bias)

    (output, lse), pull = jax.vjp(jax.jit(run), v)
    assert jnp.isnan(output).all()
    assert not jnp.isfinite(lse).any()
    assert jnp.isnan(pull((output, lse))[0]).all()


def test_weights_of_the_backward_pass_are_right_to_1_percent_at_1e5():
    q, k = jnp.full((1, 1, 1, 4), 500.0), jnp.full((1, 2, 1, 4), 100.0)
    v = jnp.asarray([1.0, 3.0]).reshape(1, 2, 1, 1)

    def run(v):
        return attend(q, k, v, softmax_scale=0.5)[0].sum()

    np.testing.assert_allclose(jax.jit(jax.grad(run))(v).ravel(), 0.5, rtol=0.01)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_mapped_dropout_drops_the_same_in_both_passes(implementation):
    key = jax.random.key(7, impl=implementation)
    lengths = jnp.asarray([[13, 0], [21, 5], [8, 21]], jnp.int32)
    values, weights = drawn(3, B, S, K, 6, seed=8), drawn(3, B, T, H, 6, seed=9)

    def two_sums(value, weight, lengths):  # of what is linear in value
        def run(value):
            return switchax.attention(
                **{**OPERANDS, "value": value},
                kv_lengths=lengths,
                dropout_prob=0.4,
                dropout_key=key,
                operation="chunked",
                metadata=OperationMetadata(operation_configs={"chunked": BLOCKS}),
            )

        output, pull = jax.vjp(run, value)
        return (output * weight).sum(), (pull(weight)[0] * value).sum()

    forward, backward = jax.jit(jax.vmap(two_sums))(values, weights, lengths)
    np.testing.assert_allclose(forward, backward, rtol=1e-4)


def test_the_least_lengths_beside_a_window_end():
    lengths = jnp.asarray([-(2**31)], jnp.int32)
    x = drawn(1, 40, 1, D)
    found = jax.jit(
        lambda lengths: switchax.attention(
            *(x, x, x),
            causal=True,
            window=(3, 0),
            kv_lengths=lengths,
            operation="chunked",
        )
    )(lengths)
    assert not found.any()
