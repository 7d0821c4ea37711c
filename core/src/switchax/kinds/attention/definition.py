"""The kind `attention`: one meaning for all operations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from switchax.capabilities import Capabilities
from switchax.checks import fail_type
from switchax.kind import Arrays, Call, OperationKind, Plan
from switchax.request import Request

from . import adaptation, arguments, outcome, sharding
from .features import FEATURES, with_features
from .request import AttentionRequest

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from switchax.metadata import OperationMetadata
    from switchax.placement import Placement, Shards
    from switchax.testing.suite import Suite

__all__ = ["ATTENTION", "AttentionKind"]


class AttentionKind(OperationKind):
    """Scaled dot-product attention under rules R1 to R13."""

    name = "attention"
    features = FEATURES
    arguments = ("query", "key", "value")
    required = ("softmax_scale",)
    always = ("layout", "mode")
    outputs = ("lse", "weights")
    sizes = (
        "batch",
        "q_len",
        "kv_len",
        "heads",
        "kv_heads",
        "head_dim",
        "v_head_dim",
    )
    shardable = ("batch", "heads")

    def bind(
        self, where: str, arguments_: Mapping[str, Any], metadata: OperationMetadata
    ) -> Call:
        """Checks and normalises a call; see `OperationKind.bind`."""
        call = arguments.bind(where, arguments_, metadata)
        assert isinstance(call.request, AttentionRequest)  # narrows the type
        return dataclasses.replace(call, request=with_features(call.request))

    def plan(self, request: Request, capabilities: Capabilities) -> Plan:
        """Plans layout, kv heads, padding and visibility.

        Raises:
            TypeError: If the request is not one of attention.
        """
        if not isinstance(request, AttentionRequest):
            rule, got = "an AttentionRequest", f"a {type(request).__name__}"
            todo = "make it with ATTENTION.request(...)"
            raise fail_type(self.name, rule, got, todo)
        return adaptation.plan(request, capabilities)

    def operands(self, call: Call, plan: Plan) -> tuple[Arrays, dict[str, Any]]:
        """Applies the plan."""
        assert isinstance(plan, adaptation.AttentionPlan)
        return adaptation.operands(call, plan)

    def specs(
        self, request: Request, metadata: OperationMetadata
    ) -> Mapping[str, PartitionSpec]:
        """By the metadata's rules for the request's mode and layout."""
        assert isinstance(request, AttentionRequest)
        return sharding.specs(request, metadata)

    def outputs_like_inputs(
        self, request: Request, placement: Placement
    ) -> Mapping[str, PartitionSpec]:
        """As query lies."""
        assert isinstance(request, AttentionRequest)
        return sharding.outputs_like_query(request, placement)

    def shard(
        self, request: Request, capabilities: Capabilities, placement: Placement
    ) -> Shards | None:
        """Splits batch and heads."""
        assert isinstance(request, AttentionRequest)
        return sharding.shard(request, capabilities, placement)

    def spread(self, arrays: Arrays, shards: Shards, request: Request) -> Arrays:
        """Repeats kv heads just enough."""
        assert isinstance(shards, sharding.AttentionShards)
        return sharding.spread(arrays, shards, request.layout)

    def inside_shard(self, arrays: Arrays, shards: Shards) -> Arrays:
        """Folds the device's place into the dropout key."""
        assert isinstance(shards, sharding.AttentionShards)
        return sharding.inside_shard(arrays, shards)

    def shortcut(self, call: Call, plan: Plan) -> dict[str, Any] | None:
        """Answers calls in which no row can see a key."""
        assert isinstance(plan, adaptation.AttentionPlan)
        assert isinstance(call.request, AttentionRequest)
        if not plan.skip:
            return None
        return outcome.answer_without_keys(call.request, call.arrays)

    def finish(self, result: Any, request: Request, plan: Plan) -> dict[str, Any]:
        """Undoes the plan."""
        assert isinstance(plan, adaptation.AttentionPlan)
        assert isinstance(request, AttentionRequest)
        return outcome.finish(result, request, plan)

    def output(self, outputs: Mapping[str, Any]) -> outcome.AttentionOutput:
        """Names the outputs."""
        return outcome.AttentionOutput(**outputs)

    @property
    def oracle(self) -> Callable[..., Any]:
        """`attention_oracle`, float64 numpy."""
        from .oracle import attention_oracle

        return attention_oracle

    @property
    def suite(self) -> Suite:
        """`switchax.testing.attention.AttentionSuite`."""
        from switchax.testing.attention import AttentionSuite

        return AttentionSuite()


ATTENTION = AttentionKind()
