"""What the TPU's compiler makes of patterns, with no TPU: needs libtpu."""

import jax
import pytest

from switchax import MaskPattern
from switchax.inspection import GENERATIONS, inspect_operation

pytest.importorskip("libtpu")


def inspected(operation, generation, **more):
    x = jax.ShapeDtypeStruct((1, 2048, 1, 128), "bfloat16")
    given = {"query": x, "key": x, "value": x, **more}
    return inspect_operation(operation, given, f"tpu:{generation}")


@pytest.mark.parametrize("generation", GENERATIONS)
def test_both_passes_compile_and_fit(generation):
    pattern = MaskPattern.chunked(700, 2048, 2048)
    found = inspected("blocksparse", generation, causal=True, mask_pattern=pattern)
    forward, gradients = found.passes
    assert len(forward.kernels) == 1
    assert len(gradients.kernels) == 2
    for part in found.passes:
        for kernel in part.kernels:
            assert 0 < kernel.vmem < found.vmem


def test_a_tile_that_is_seen_whole_costs_what_it_does_without_a_pattern():
    pattern = MaskPattern.chunked(512, 2048, 2048)
    found = inspected("blocksparse", "v6e", causal=True, mask_pattern=pattern)
    plain = inspected("pallas_flash", "v6e", causal=True)
    for part, other in zip(found.passes, plain.passes, strict=True):
        for kernel, without in zip(part.kernels, other.kernels, strict=True):
            assert kernel.hot.bundles <= 1.02 * without.hot.bundles
