"""Values and gradients against the oracle, the kernels being interpreted.

`switchax conform blocksparse` asks far more; these are what kernels do by tiles.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from switchax import (
    MaskPattern,
    OperationMetadata,
    OperationRegistry,
    UnsupportedError,
    attention,
)
from switchax.testing.attention import AttentionCall, AttentionCase
from switchax_blocksparse import BlockSparseConfig

SMALL = {
    "block_q": 128,
    "block_kv_compute": 128,
    "block_q_compute_backward": 128,
    "block_kv_backward": 128,
}
ALONE = {**SMALL, "block_kv": 128, "block_q_backward": 128}
LONG = {"q_len": 300, "kv_len": 520, "batch": 1, "heads": 2, "kv_heads": 1}
CALLS = [
    ("R3", {"pattern": "blocks", **LONG}),
    ("R3", {"pattern": "chunks", "causal": True, "offset": "last", **LONG}),
    ("R6", {"pattern": "rows", **LONG}),
    ("R3", {"pattern": "blocks", "mask": "blocks", "bias": "full", **LONG}),
    ("R6", {"pattern": "rows", "bias": "key", "sinks": 0, "segments": "ids"}),
    ("R3", {"pattern": "noise", "q_len": 1, "kv_len": 300, "kv_heads": 1}),
    ("R4", {"pattern": "noise", "window": (20, 2), "offset": "batch", "kv_len": 300}),
    ("R6", {"pattern": "rows", "lengths": "both", **LONG, "batch": 3}),
    ("R8", {"pattern": "blocks", "dtype": "bfloat16", "soft_cap": 2.0, **LONG}),
]


@pytest.mark.parametrize("sizes", [SMALL, ALONE], ids=["spans", "alone"])
@pytest.mark.parametrize(("rule", "call"), CALLS, ids=range(len(CALLS)))
def test_patterns_agree_with_the_oracle(rule, call, sizes):
    configs = {"blocksparse": BlockSparseConfig(**sizes)}
    metadata = OperationMetadata(operation_configs=configs)
    operation = OperationRegistry.create("blocksparse", metadata)
    finding = AttentionCase(rule, AttentionCall(**call), dirty=True).run(operation)
    assert not finding.is_wrong, str(finding)


def test_nan_of_a_tile_that_is_hidden_reaches_nothing():
    """Where a splash kernel gives the mean of the blocks that it visits, or NaN."""
    shown = np.ones((256, 256), bool)
    shown[:128], shown[:, 128:] = False, False
    x = jax.random.normal(jax.random.key(0), (1, 256, 1, 64))
    dirty = x.at[:, 128:].set(jnp.nan)

    def call(k, v):
        pattern = MaskPattern(shown)
        out = attention(x, k, v, mask_pattern=pattern, operation="blocksparse")
        return (out**2).sum(), out

    (_, out), gradients = jax.value_and_grad(call, (0, 1), has_aux=True)(dirty, dirty)
    assert not out[:, :128].any()
    assert np.isfinite(out).all()
    for gradient in gradients:
        assert np.isfinite(gradient).all()
        assert not gradient[:, 128:].any()


def test_what_does_not_fit_is_refused_by_its_own_name():
    x = jax.ShapeDtypeStruct((1, 2**17, 1, 256), "float32")
    chip = AbstractDevice(device_kind="TPU v6 lite", num_cores=None, platform="tpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=chip)

    def loss(q):
        return attention(q, q, q, causal=True, operation="blocksparse").sum()

    with use_abstract_mesh(mesh), pytest.raises(UnsupportedError) as refused:
        jax.eval_shape(jax.grad(loss), x)
    assert str(refused.value).startswith("blocksparse: expected a kernel that fits")
    assert list(refused.value.refusals) == ["blocksparse:blocksparse"]
