"""Values and gradients against the oracle, the kernels being interpreted.

`switchax conform pallas_flash` asks far more; these are what kernels do by blocks.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchax import (
    OperationMetadata,
    OperationRegistry,
    UnsupportedError,
    attention,
    explain,
)
from switchax.testing.attention import AttentionCall, AttentionCase
from switchax_pallas_flash import PallasFlashConfig
from switchax_pallas_flash.attend import attend
from switchax_pallas_flash.blocks import TABLE, blocks_for

SMALL = {
    "block_q": 128,
    "block_kv_compute": 128,
    "block_q_compute_backward": 128,
    "block_kv_backward": 128,
}
ALONE = {**SMALL, "block_kv": 128, "block_q_backward": 128}


def sizes(**config):
    return OperationMetadata(
        operation_configs={"pallas_flash": PallasFlashConfig(**config)}
    )


LONG = {"q_len": 300, "kv_len": 300, "batch": 1, "heads": 2, "kv_heads": 1}
CALLS = [
    ("R3", {"causal": True, **LONG}),
    ("R5", {"window": (130, 3), **LONG}),
    ("R4", {"causal": True, "offset": "batch", "q_len": 5, "kv_len": 300}),
    ("R6", {"lengths": "both", "q_len": 9, "kv_len": 300, "batch": 5}),
    ("R3", {"segments": "descending", **LONG}),
    ("R3", {"mask": "blocks", "bias": "full", **LONG}),
    ("R2", {"bias": "padding", "soft_cap": 0.8, "kv_len": 300, "sinks": 2}),
    ("R2", {"bias": "row", "causal": True, **LONG}),
    ("R2", {"bias": "heads", "soft_cap": 0.8}),
    ("R2", {"bias": "each", "q_len": 200}),
    ("R2", {"bias": "full", "q_len": 1, "kv_len": 1, "kv_heads": 1}),
    ("R2", {"bias": "full", "scale": 1.0}),
    ("R2", {"soft_cap": 0.8, "scale": -1.0}),
    ("R6", {"mask": "row"}),
    ("R2", {"scale": -0.7, "kv_heads": 2}),
    ("R2", {"scale": 0.0, "v_head_dim": 24}),
    ("R1", {"head_dim": 0, "v_head_dim": 8, "bias": "full"}),
    ("R8", {"dtype": "bfloat16", "causal": True, "sinks": 0, **LONG}),
]


def agrees(rule, call, config):
    operation = OperationRegistry.create("pallas_flash", sizes(**config))
    finding = AttentionCase(rule, AttentionCall(**call), dirty=True).run(operation)
    assert not finding.is_wrong, str(finding)


@pytest.mark.parametrize(("rule", "call"), CALLS, ids=range(len(CALLS)))
def test_blocks_of_all_sorts_agree_with_the_oracle(rule, call):
    agrees(rule, call, SMALL)


@pytest.mark.parametrize(("rule", "call"), CALLS[:6:2], ids=range(3))
def test_chunks_that_are_copied_one_by_one_do_too(rule, call):
    agrees(rule, call, ALONE)


BEYOND = {**SMALL, "block_kv": 256, "block_q_backward": 256}


FAR = {**BEYOND, "block_q_backward": 512, "block_q_compute_backward": 512}


@pytest.mark.parametrize("call", [CALLS[0], CALLS[4], CALLS[5]], ids=range(3))
def test_what_is_copied_at_once_may_reach_beyond_the_last_block(call):
    agrees(*call, BEYOND)


@pytest.mark.parametrize("bias", ["", "full", "row", "key"])
def test_rows_that_the_forward_pass_does_not_write_reach_no_gradient(bias):
    agrees("R11", {"bias": bias, **LONG, "q_len": 129}, FAR)
    agrees("R11", {"bias": bias, **LONG, "q_len": 64}, {"block_q_backward": 384})


@pytest.mark.parametrize("unroll", [1, 2])
@pytest.mark.parametrize("kv_len", [100, 200, 600, 700, 1030])
def test_chunks_by_pairs_and_one_by_one_are_the_same(kv_len, unroll, monkeypatch):
    """Of one to eight chunks that are copied at once, all or some of them whole."""
    entry = TABLE["v5e", "float32 128"]
    entry = entry._replace(forward=entry.forward._replace(unroll=unroll, chunks=8))
    monkeypatch.setitem(TABLE, ("v5e", "float32 128"), entry)
    rows = np.random.default_rng(0).normal(size=(1, 1, 130, 16)).astype("float32")
    keys = np.random.default_rng(1).normal(size=(1, 1, kv_len, 16)).astype("float32")
    offset = kv_len - 130
    config = PallasFlashConfig(**SMALL)

    def total(of):
        def loss(q, k, v):
            output, lse = of(q, k, v)
            return (output**2).sum() + jnp.where(lse > -jnp.inf, lse, 0).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(rows, keys, keys)

    def ours(q, k, v):
        given = {"softmax_scale": 0.25, "causal": True, "q_offset": offset}
        return attend(q, k, v, config=config, generation="v5e", interpret=True, **given)

    def plain(q, k, v):
        x = 0.25 * jnp.einsum("bhqd,bhkd->bhqk", q, k)
        row, key = np.arange(130)[:, None] + offset, np.arange(kv_len)
        x = jnp.where(key <= row, x, -jnp.inf)
        lse = jax.nn.logsumexp(x, axis=3)
        p = jnp.where(
            jnp.isneginf(x), 0, jnp.exp(x - jnp.maximum(lse, -1e30)[..., None])
        )
        return jnp.einsum("bhqk,bhkd->bhqd", p, v), lse

    with jax.default_matmul_precision("highest"):
        for found, expected in zip(
            *map(jax.tree.leaves, (total(ours), total(plain))), strict=True
        ):
            np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("length", [1, 128, 300, 513, 1025, 4755, 8192, 8700, 10_000])
@pytest.mark.parametrize("entry", TABLE, ids=" ".join)
def test_tiles_of_the_table_divide_what_they_are_given(entry, length):
    forward, backward, rows, keys = blocks_for(*entry, length, length, 0, None)
    for sizes, block, others in (
        (forward, backward.block, keys),
        (backward, forward.block, rows),
    ):
        assert others % sizes.span == 0
        unit = math.lcm(block, sizes.chunk)
        whole = unit * -(-length // unit)
        assert whole <= others <= 1.2 * whole
        assert sizes.block % sizes.lanes == 0 or sizes is backward
        assert 0 in (sizes.chunk % sizes.piece, sizes.block % sizes.piece)
    assert rows % forward.block == keys % backward.block == 0


def test_a_bias_of_every_row_and_key_is_copied_in_smaller_parts():
    entry = "v6e", "bfloat16 128"
    plain, *_ = blocks_for(*entry, 8192, 8192, 0, None)
    biased, *_ = blocks_for(*entry, 8192, 8192, 4, None)
    assert 1 <= biased.chunks < plain.chunks


@pytest.mark.parametrize("chunks", [7, 16, 17, 31, 64])
def test_any_number_of_chunks_is_copied_in_spans_that_are_alike(chunks):
    forward, *_ = blocks_for("v6e", "bfloat16 128", 8192, 512 * chunks, 0, None)
    assert forward.chunk == 512
    assert min(chunks, 8) <= forward.chunks <= 16


def test_where_all_rows_are_one_block_keys_are_copied_in_smaller_parts():
    few, *_ = blocks_for("v6e", "bfloat16 128", 64, 8192, 0, None)
    many, *_ = blocks_for("v6e", "bfloat16 128", 8192, 8192, 0, None)
    assert few.chunks < many.chunks


def traced(config, generation="v6e", length=8192, batch=1, **call):
    """Trace both passes for a TPU that is not here."""
    x = jax.ShapeDtypeStruct((batch, 2, length, 128), "float32")

    def loss(q, k, v):
        given = {"softmax_scale": 1.0, "causal": True, **call}
        given |= {"config": PallasFlashConfig(**config), "generation": generation}
        return attend(q, k, v, **given)[0].sum()

    return jax.eval_shape(jax.grad(loss, (0, 1, 2)), x, x, x)


def test_what_fits_no_memory_is_refused_with_numbers_before_it_is_compiled():
    traced({})
    with pytest.raises(UnsupportedError, match=r"MiB \(allowed: 128 MiB on v6e\)"):
        traced({"block_q": 8192, "block_kv_compute": 8192})
    with pytest.raises(UnsupportedError, match=r"vector memory of .*_backward=.*v5p"):
        traced({}, "v5p", length=65536)
    lengths = jnp.ones(64, jnp.int32)
    small = {"block_q": 128, "block_kv": 128}
    with pytest.raises(UnsupportedError, match=r"scalar memory .*1 MiB on v6e"):
        traced(small, batch=64, kv_lengths=lengths)


@pytest.mark.parametrize(
    ("generation", "fits", "too_many"),
    [
        ("v5e", 100_000, 110_000),
        ("v5p", 42_000, 50_000),
        ("v6e", 100_000, 110_000),
        ("7x", 42_000, 50_000),
    ],
)
def test_as_many_rows_fit_as_the_readme_says(generation, fits, too_many):
    traced({}, generation, length=fits)
    with pytest.raises(UnsupportedError, match=r"vector memory.*fewer rows"):
        traced({}, generation, length=too_many)


@pytest.mark.parametrize("size", [0, 100, 129])
def test_a_config_checks_itself(size):
    with pytest.raises(ValueError, match=f"multiple of 128 from 128 on.*{size}"):
        PallasFlashConfig(block_q=size)
    with pytest.raises(TypeError, match="int or None"):
        PallasFlashConfig(block_kv=float(size))


def test_what_is_copied_is_a_multiple_of_what_is_computed():
    with pytest.raises(ValueError, match="block_kv=640 and block_kv_compute=512"):
        PallasFlashConfig(block_kv=640, block_kv_compute=512)


def test_a_config_is_honoured():
    config = PallasFlashConfig(
        block_q=256,
        block_kv=768,
        block_kv_backward=384,
        block_q_backward=1280,
        block_q_compute_backward=640,
    )
    entry = "v6e", "bfloat16 128"
    forward, backward, rows, keys = blocks_for(*entry, 5000, 3000, 0, config)
    assert (forward.block, forward.span) == (256, 768)
    assert (backward.block, backward.span, backward.chunk) == (384, 1280, 640)
    assert rows % 256 == rows % 1280 == keys % 768 == keys % 384 == 0


@pytest.mark.parametrize(
    ("dtype", "head_dim", "call", "said"),
    [
        ("float64", 64, {}, "float64"),
        ("bfloat16", 512, {}, "256"),
        ("bfloat16", 64, {"dropout_prob": 0.5}, "dropout"),
        ("bfloat16", 64, {"target": "tpu:v4"}, "v5e, v5p, v6e, 7x"),
    ],
)
def test_what_it_cannot_do_is_refused_for_a_tpu_that_is_not_here(
    dtype, head_dim, call, said
):
    with jax.enable_x64(dtype == "float64"):
        x = jax.ShapeDtypeStruct((1, 128, 2, head_dim), jnp.dtype(dtype))
        if "dropout_prob" in call:
            call = {**call, "dropout_key": jax.eval_shape(lambda: jax.random.key(0))}
        call = {"target": "tpu:v6e", **call}
        answer = explain(query=x, key=x, value=x, operation="pallas_flash", **call)
    assert answer.chosen is None
    assert said in str(answer)


def test_a_program_for_a_tpu_that_nobody_names_is_refused():
    metadata = OperationMetadata(backend="tpu")

    def call(q):
        return attention(q, q, q, operation="pallas_flash", metadata=metadata)

    with pytest.raises(UnsupportedError, match="allowed: v5e, v5p, v6e, 7x"):
        jax.eval_shape(call, jax.ShapeDtypeStruct((1, 128, 1, 64), "bfloat16"))


def test_a_shard_map_that_follows_what_varies_is_refused_by_name():
    mesh = jax.make_mesh((2,), ("dp",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("dp")
    x = jax.random.normal(jax.random.key(0), (2, 5, 1, 8))

    def call(x):
        return attention(x, x, x, operation="pallas_flash")

    def within(**given):
        split = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec, **given)
        return jax.jit(split)(x)

    with pytest.raises(UnsupportedError, match=r"over dp that.*check_vma=False"):
        within()
    np.testing.assert_allclose(within(check_vma=False), call(x), atol=1e-6)


@pytest.mark.parametrize("given", ["dp", None], ids=["varies", "nothing_varies"])
def test_so_it_is_whatever_varies(given):
    mesh = jax.make_mesh((2,), ("dp",), (jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(given)
    x = jax.random.normal(jax.random.key(0), (1, 5, 1, 8))

    def loss(x, lengths):
        return attention(x, x, x, kv_lengths=lengths, operation="pallas_flash").sum()

    def call(lengths):
        return jax.grad(loss)(x, lengths)

    split = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec))
    lengths = jnp.asarray([3, 4] if given else [3], jnp.int32)
    with pytest.raises(UnsupportedError, match=r"over dp that.*check_vma=False"):
        split(lengths)
