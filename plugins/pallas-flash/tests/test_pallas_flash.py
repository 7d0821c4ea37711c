"""Values and gradients against the oracle, the kernels being interpreted.

`switchax conform pallas_flash` asks far more; these are what kernels do by blocks.
"""

import jax
import jax.numpy as jnp
import pytest

from switchax import OperationMetadata, OperationRegistry, explain
from switchax.testing.attention import AttentionCall, AttentionCase
from switchax_pallas_flash import PallasFlashConfig

SMALL = OperationMetadata(
    operation_configs={
        "pallas_flash": PallasFlashConfig(
            block_q=128, block_kv=128, block_q_backward=128, block_kv_backward=128
        )
    }
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
    ("R2", {"scale": -0.7, "kv_heads": 2}),
    ("R2", {"scale": 0.0, "v_head_dim": 24}),
    ("R8", {"dtype": "bfloat16", "causal": True, "sinks": 0, **LONG}),
]


@pytest.mark.parametrize(("rule", "call"), CALLS, ids=range(len(CALLS)))
def test_blocks_of_all_sorts_agree_with_the_oracle(rule, call):
    operation = OperationRegistry.create("pallas_flash", SMALL)
    finding = AttentionCase(rule, AttentionCall(**call), dirty=True).run(operation)
    assert not finding.is_wrong, str(finding)


@pytest.mark.parametrize("size", [0, 100, 129])
def test_a_config_checks_itself(size):
    with pytest.raises(ValueError, match=f"multiple of 128 from 128 on.*{size}"):
        PallasFlashConfig(block_q=size)
    with pytest.raises(TypeError, match="int or None"):
        PallasFlashConfig(block_kv=float(size))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "call", "said"),
    [
        ("float64", 64, {}, "float64"),
        ("bfloat16", 512, {}, "256"),
        ("bfloat16", 64, {"dropout_prob": 0.5}, "dropout"),
    ],
)
def test_what_it_cannot_do_is_refused_for_a_tpu_that_is_not_here(
    dtype, head_dim, call, said
):
    with jax.enable_x64(dtype == "float64"):
        x = jax.ShapeDtypeStruct((1, 128, 2, head_dim), jnp.dtype(dtype))
        if call:
            call = {**call, "dropout_key": jax.eval_shape(lambda: jax.random.key(0))}
        answer = explain(
            query=x, key=x, value=x, operation="pallas_flash", target="tpu:v6e", **call
        )
    assert answer.chosen is None
    assert said in str(answer)
