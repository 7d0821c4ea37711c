"""The operation "blocksparse"."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jax import Array

from switchax import (
    ATTENTION,
    BaseOperation,
    Capabilities,
    Cost,
    MaskPattern,
    OperationRegistry,
    Refusal,
    Request,
    Target,
)
from switchax_pallas_flash.blocks import PallasFlashConfig
from switchax_pallas_flash.target import attend_for, refusals_on

__all__ = ["BlockSparseAttention"]


def _attending(*, interpret: bool) -> Any:
    """Returns a forward method."""

    def forward(
        self: BaseOperation,
        query: Array,
        key: Array,
        value: Array,
        *,
        softmax_scale: float,
        bias: Array | None,
        mask: Array | None,
        mask_pattern: MaskPattern | None,
        q_segment_ids: Array | None,
        kv_segment_ids: Array | None,
        q_lengths: Array | None,
        kv_lengths: Array | None,
        causal: bool,
        window: tuple[int | None, int | None] | None,
        q_offset: Array | int,
        logits_soft_cap: float | None,
        softmax_aux: Array | None,
    ) -> tuple[Array, Array]:
        """Computes attention; see `switchax.attention` for the arguments."""
        return attend_for(
            self,
            query,
            key,
            value,
            interpret=interpret,
            softmax_scale=softmax_scale,
            bias=bias,
            mask=mask,
            mask_pattern=mask_pattern,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            q_lengths=q_lengths,
            kv_lengths=kv_lengths,
            causal=causal,
            window=window,
            q_offset=q_offset,
            logits_soft_cap=logits_soft_cap,
            softmax_aux=softmax_aux,
        )

    return forward


@OperationRegistry.register
class BlockSparseAttention(BaseOperation):
    """Attention for TPU whose work is what a mask pattern, and positions, show."""

    kind = ATTENTION
    config_class = PallasFlashConfig
    capabilities = Capabilities(
        platforms={"cpu", "tpu"},
        dtypes={"bfloat16", "float32"},
        features=set(ATTENTION.features) - {"weights", "dropout"},
        differentiable={"query", "key", "value", "bias", "softmax_aux", "lse"},
        cost=Cost.FUSED,
        layouts=("bhtd",),
        limits={"head_dim": 256, "v_head_dim": 256},
        opaque=True,
        shardable={"batch", "heads"},
        # On a CPU Pallas interprets it, slowly; on a TPU it has been compiled, not run.
        experimental=True,
    )

    @classmethod
    def get_impl_name(cls) -> str:
        """Returns "blocksparse"."""
        return "blocksparse"

    @classmethod
    def refusals(cls, request: Request, target: Target) -> Iterable[Refusal]:
        """Refuses what no capability can state."""
        return refusals_on(request, target)

    forward_tpu = _attending(interpret=False)
    # Pallas's interpreter: slow, for tests.
    forward_cpu = _attending(interpret=True)
