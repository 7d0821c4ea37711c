"""The kind "rotary": one meaning for all of its operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from switchax import (
    Adaptation,
    Call,
    Capabilities,
    Feature,
    OperationKind,
    OperationMetadata,
    Plan,
    Refusal,
    Request,
)

from . import arguments
from .request import RotaryRequest

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec

    from switchax.placement import Placement
    from switchax.testing import Suite

__all__ = ["ROTARY", "RotaryKind"]

Arrays = dict[str, Any]


class RotaryKind(OperationKind):
    """Rotary position embedding under the rules RO1 to RO10 of its suite.

    A forward method takes x `[batch, length, heads, head_dim]` in the dtype of the
    request, positions int32 `[batch, length]`, `base`, and what its features bring:
    `interleaved` (bool), `rotary_dim` (int), `scale` (float). It returns an array like
    x.
    """

    name = "rotary"
    features: Mapping[str, Feature] = {
        "interleaved": Feature(("interleaved",), summary="neighbours are pairs"),
        "partial": Feature(("rotary_dim",), summary="the end of a head is left alone"),
        "scale": Feature(("scale",), summary="a factor of the positions"),
    }
    arguments = ("x", "positions")
    required = ("base",)
    sizes = ("batch", "length", "heads", "head_dim")

    def bind(
        self, where: str, arguments_: Mapping[str, Any], metadata: OperationMetadata
    ) -> Call:
        """Checks and normalises a call; see `OperationKind.bind`."""
        return arguments.bind(where, arguments_, metadata)

    def plan(self, request: Request, capabilities: Capabilities) -> Plan:
        """Brings positions to one form; pads nothing."""
        request = _own(request)
        steps = []
        if len(dict(request.arrays)["positions"].shape) == 1:
            detail = "one row for each sample"
            steps.append(Adaptation("positions", detail, "fused into the kernel"))
        if request.dtype != request.output_dtype:
            detail = f"{request.output_dtype} to {request.dtype} and back"
            steps.append(Adaptation("cast", detail, "fused into the kernel"))
        refusals = tuple(
            Refusal(
                "size", axis, str(size), f"a multiple of {capabilities.multiples[axis]}"
            )
            for axis, size in request.sizes.items()
            if axis in capabilities.multiples and size % capabilities.multiples[axis]
        )
        return Plan(request, tuple(steps), refusals)

    def operands(self, call: Call, plan: Plan) -> tuple[Arrays, dict[str, Any]]:
        """Applies the plan."""
        request, x = _own(call.request), call.arrays["x"]
        positions = call.arrays["positions"].astype(jnp.int32)
        if positions.ndim == 1:
            positions = jnp.broadcast_to(positions[None], x.shape[:2])
        arrays = {"x": x.astype(request.dtype), "positions": positions}
        return arrays, {
            "base": request.base,
            "interleaved": request.interleaved,
            "rotary_dim": request.rotary_dim,
            "scale": request.scale,
        }

    def shortcut(self, call: Call, plan: Plan) -> dict[str, Any] | None:
        """Answers calls without any entry."""
        sizes = call.request.sizes.values()
        is_empty = any(isinstance(size, int) and size == 0 for size in sizes)
        return {"output": call.arrays["x"]} if is_empty else None

    def finish(self, result: Any, request: Request, plan: Plan) -> dict[str, Any]:
        """Casts back what was cast; the dtype is otherwise the operation's to keep."""
        request = _own(request)
        if request.dtype != request.output_dtype:
            result = result.astype(request.output_dtype)
        return {"output": result}

    def output(self, outputs: Mapping[str, Any]) -> Any:
        """The rotated array."""
        return outputs["output"]

    def outputs_like_inputs(
        self, request: Request, placement: Placement
    ) -> Mapping[str, PartitionSpec]:
        """As x lies."""
        return {"output": dict(placement.passed)["x"]}

    @property
    def oracle(self) -> Callable[..., Any]:
        """`rotary_oracle`, float64 numpy."""
        from .oracle import rotary_oracle

        return rotary_oracle

    @property
    def suite(self) -> Suite:
        """`switchax_rotary.suite.RotarySuite`."""
        from .suite import RotarySuite

        return RotarySuite()


def _own(request: Request) -> RotaryRequest:
    if not isinstance(request, RotaryRequest):
        got = f"a {type(request).__name__}"
        raise TypeError(
            f"rotary: expected a RotaryRequest, got {got}; "
            "make it with ROTARY.request(...)"
        )
    return request


ROTARY = RotaryKind()
