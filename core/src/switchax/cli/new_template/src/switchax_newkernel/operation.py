"""The operation "newkernel": its names, and what it honours."""

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

__all__ = ["NewkernelAttention"]


@OperationRegistry.register
class NewkernelAttention(BaseOperation):
    """Attention in one kernel; core brings every call to the form declared here."""

    kind = ATTENTION
    capabilities = Capabilities(
        platforms={"cpu", "tpu"},
        dtypes={"bfloat16", "float32"},
        features={"causal", "q_offset", "segment_ids", "gqa", "v_head_dim", "lse"},
        differentiable={"query", "key", "value", "lse"},
        cost=Cost.FUSED,
        layouts=("bhtd",),
        # The blocks of kernel.py: core pads, and hides the padding by segment ids.
        multiples={"q_len": 64, "kv_len": 128},
        opaque=True,
        shardable={"batch", "heads"},
        experimental=True,  # auto never takes it; see the README, "Publish it"
    )

    @classmethod
    def get_impl_name(cls) -> str:
        """Returns "newkernel"."""
        return "newkernel"

    @classmethod
    def refusals(cls, request: Request, target: Target) -> Iterable[Refusal]:
        """Refuses what no capability can state."""
        for axis in ("head_dim", "v_head_dim"):
            size = request.sizes[axis]
            if not isinstance(size, int) or size == 0:  # a symbol of jax.export
                hint = "a block of the kernel is that wide: choose another operation"
                yield Refusal("rule", axis, str(size), "a number from 1", hint)

    def forward_tpu(
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
            interpret=False,
        )

    def forward_cpu(
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
        """Computes the same by Pallas's interpreter: slow, for tests."""
        from .kernel import attend

        return attend(
            query,
            key,
            value,
            softmax_scale=softmax_scale,
            causal=causal,
            q_offset=q_offset,
            q_segment_ids=q_segment_ids,
            kv_segment_ids=kv_segment_ids,
            interpret=True,
        )
