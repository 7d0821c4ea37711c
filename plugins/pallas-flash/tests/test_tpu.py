"""What the TPU's compiler makes of the kernels, with no TPU: needs libtpu.

Its schedules are read for what must hold of them; how fast they are is no test.
"""

import jax
import pytest

from switchax.inspection import GENERATIONS, inspect_operation
from switchax_pallas_flash.blocks import TABLE

pytest.importorskip("libtpu")


def call(length, head_dim=128, heads=8, kv_heads=8, dtype="bfloat16", **more):
    def shape(heads):
        return jax.ShapeDtypeStruct((1, length, heads, head_dim), dtype)

    query, key = shape(heads), shape(kv_heads)
    return {"query": query, "key": key, "value": key, **more}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_both_passes_compile_and_fit(generation):
    given = call(2048, causal=True)
    found = inspect_operation("pallas_flash", given, f"tpu:{generation}")
    forward, gradients = found.passes
    assert len(forward.kernels) == 1
    assert len(gradients.kernels) == 2
    for part in found.passes:
        for kernel in part.kernels:
            assert 0 < kernel.vmem < found.vmem
            assert kernel.hot.floor <= kernel.hot.bundles
            assert kernel.hot.used["MATMUL"] > 0


@pytest.mark.parametrize("entry", TABLE, ids=" ".join)
def test_every_entry_of_the_table_compiles_and_fits(entry):
    generation, shape = entry
    dtype, head_dim = shape.split()
    given = call(4096, int(head_dim), heads=1, kv_heads=1, dtype=dtype, causal=True)
    found = inspect_operation("pallas_flash", given, f"tpu:{generation}")
    for part in found.passes:
        assert all(kernel.vmem < found.vmem for kernel in part.kernels)


FEATURES = {
    "window": {"window": (256, 0)},
    "float32": {"dtype": "float32", "causal": True},
    "one row": {"kv_heads": 2},
    "narrow": {"head_dim": 64, "causal": True, "logits_soft_cap": 30.0},
    "wide": {"head_dim": 256, "causal": True},
}


@pytest.mark.parametrize("name", FEATURES)
def test_what_it_declares_compiles(name):
    given = call(1024, **FEATURES[name])
    if name == "one row":
        given["query"] = jax.ShapeDtypeStruct((1, 1, 8, 128), "bfloat16")
    found = inspect_operation("pallas_flash", given, "tpu:v6e")
    assert all(part.kernels for part in found.passes)


def test_bias_mask_and_segments_compile():
    given = call(512, heads=2, kv_heads=2)
    given["bias"] = jax.ShapeDtypeStruct((1, 2, 512, 512), "bfloat16")
    given["mask"] = jax.ShapeDtypeStruct((1, 1, 512, 512), "bool")
    ids = jax.ShapeDtypeStruct((1, 512), "int32")
    given |= {"q_segment_ids": ids, "kv_segment_ids": ids}
    found = inspect_operation("pallas_flash", given, "tpu:v5e")
    # That of the bias's gradient is one of its own.
    assert len(found.passes[1].kernels) == 3
