"""The operation "chunked"."""

from __future__ import annotations

from collections.abc import Iterable

from jax import Array

from switchax import (
    ATTENTION,
    BaseOperation,
    Capabilities,
    Cost,
    OperationRegistry,
    Refusal,
    Request,
    Target,
)

from .tiling import ChunkedConfig

__all__ = ["ChunkedAttention"]


@OperationRegistry.register
class ChunkedAttention(BaseOperation):
    """An online softmax over blocks, in plain JAX; skips blocks that nobody sees."""

    kind = ATTENTION
    config_class = ChunkedConfig
    capabilities = Capabilities(
        platforms={"any"},
        dtypes={"float16", "bfloat16", "float32", "float64"},
        features=set(ATTENTION.features) - {"weights", "mask_pattern"},
        differentiable={"query", "key", "value", "bias", "softmax_aux", "lse"},
        cost=Cost.CHUNKED,
        # The partitioner would gather what the loops read block by block.
        opaque=True,
        shardable={"batch", "heads"},
        # Measured on a CPU alone: see the README.
        experimental={"cuda", "rocm", "tpu", "tt"},
    )

    @classmethod
    def get_impl_name(cls) -> str:
        """Returns "chunked"."""
        return "chunked"

    @classmethod
    def refusals(cls, request: Request, target: Target) -> Iterable[Refusal]:
        """Refuses what no capability can state."""
        for axis in ("batch", "q_len", "kv_len", "heads", "kv_heads"):
            size = request.sizes[axis]
            if not isinstance(size, int):  # a symbol of jax.export
                hint = "blocks are counted when a call is traced: export with numbers"
                yield Refusal("rule", axis, str(size), "a number", hint)

    def forward_native(
        self,
        query: Array,
        key: Array,
        value: Array,
        *,
        softmax_scale: float,
        bias: Array | None,
        mask: Array | None,
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
    ) -> tuple[Array, Array]:
        """Computes attention; see `switchax.attention` for the arguments."""
        from .attend import attend

        output, lse = attend(
            query,
            key,
            value,
            softmax_scale=softmax_scale,
            bias=bias,
            mask=mask,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            q_lengths=q_lengths,
            kv_lengths=kv_lengths,
            causal=causal,
            window=window,
            q_offset=q_offset,
            logits_soft_cap=logits_soft_cap,
            softmax_aux=softmax_aux,
            dropout_prob=dropout_prob,
            dropout_key=dropout_key,
            config=self.config,
        )
        return output.astype(query.dtype), lse
