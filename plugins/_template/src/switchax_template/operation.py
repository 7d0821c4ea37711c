"""The operation "template": its names, and what it honours."""

from __future__ import annotations

from jax import Array

from switchax import (
    ATTENTION,
    BaseOperation,
    Capabilities,
    Cost,
    OperationRegistry,
)

__all__ = ["TemplateAttention"]


@OperationRegistry.register
class TemplateAttention(BaseOperation):
    """Attention block by block; core brings every call to the form declared here."""

    kind = ATTENTION
    capabilities = Capabilities(
        platforms={"any"},
        dtypes={"bfloat16", "float32"},
        features={"causal", "q_offset", "segment_ids", "lse"},
        differentiable={"query", "key", "value", "lse"},
        cost=Cost.CHUNKED,
        multiples={"kv_len": 64},  # core pads, and hides the padding by segment ids
        experimental=True,  # never chosen by auto; remove it when yours is proven
    )

    @classmethod
    def get_impl_name(cls) -> str:
        """Returns "template"."""
        return "template"

    def forward_native(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        softmax_scale: float,
        causal: bool,
        q_offset: Array | int,
        q_segment_ids: Array | None,
        kv_segment_ids: Array | None,
    ) -> tuple[Array, Array]:
        """Computes attention; see `switchax.attention` for the arguments."""
        from .kernel import attend  # heavy imports live in there

        return attend(
            query,
            key,
            value,
            softmax_scale=softmax_scale,
            causal=causal,
            q_offset=q_offset,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
        )
