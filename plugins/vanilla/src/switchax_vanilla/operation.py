"""The operation "vanilla"."""

from __future__ import annotations

from jax import Array

from switchax import (
    ATTENTION,
    AttentionOutput,
    BaseOperation,
    Capabilities,
    Cost,
    MaskPattern,
    OperationRegistry,
)
from switchax.kinds.attention import visibility

from .kernel import attend

__all__ = ["VanillaAttention"]


@OperationRegistry.register
class VanillaAttention(BaseOperation):
    """Plain jnp; writes the scores, honours everything, runs everywhere."""

    kind = ATTENTION
    capabilities = Capabilities(
        platforms={"any"},
        dtypes={"float16", "bfloat16", "float32", "float64"},
        features=set(ATTENTION.features),
        differentiable={
            "query",
            "key",
            "value",
            "bias",
            "softmax_aux",
            "lse",
            "weights",
        },
        cost=Cost.MATERIALISES,
        forward_mode=True,
        second_order=True,
    )

    @classmethod
    def get_impl_name(cls) -> str:
        """Returns "vanilla"."""
        return "vanilla"

    def forward_native(
        self,
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
        dropout_prob: float,
        dropout_key: Array | None,
    ) -> AttentionOutput:
        """Computes attention; see `switchax.attention` for the arguments."""
        visible = visibility(
            q_len=query.shape[1],
            kv_len=key.shape[1],
            mask=mask,
            mask_pattern=mask_pattern,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            q_lengths=q_lengths,
            kv_lengths=kv_lengths,
            causal=causal,
            window=window,
            q_offset=q_offset,
        )
        result = attend(
            query,
            key,
            value,
            softmax_scale=softmax_scale,
            visible=visible,
            bias=bias,
            logits_soft_cap=logits_soft_cap,
            softmax_aux=softmax_aux,
            dropout_prob=dropout_prob,
            dropout_key=dropout_key,
        )
        return AttentionOutput(result.output, result.weights, result.lse)
