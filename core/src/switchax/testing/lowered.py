"""Compiles calls for a device that is not here: what lowers, and what is refused."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from switchax.errors import UnsupportedError
from switchax.execution import Invocation, run
from switchax.matching import refusals_of
from switchax.operation import BaseOperation, forward_method
from switchax.target import Target

__all__ = ["lower_for"]


def lower_for(
    operation: BaseOperation,
    arguments: Mapping[str, Any],
    target: Target,
    use: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda function: function,
) -> None:
    """Lowers a call, as `jax.export` does, for a platform that need not be here.

    Args:
        operation: The operation.
        arguments: The call's arguments by name, arrays or `jax.ShapeDtypeStruct`.
        target: The device; of its generation, only what core knows counts.
        use: From the function of the call's arrays to the one that is lowered, such
            as its gradient.

    Raises:
        UnsupportedError: If the operation refuses the call there.
        Exception: Whatever lowering raises.
    """
    cls, kind = type(operation), operation.kind
    with _as_if_on(target):
        call = kind.bind(cls.names()[0], arguments, operation.metadata)
        plan = kind.plan(call.request, cls.capabilities)
        method = forward_method(cls, target.platform)
        reasons = refusals_of(cls, plan, target, method)
        if reasons or method is None:
            name = cls.names()[0]
            raise UnsupportedError(f"{name}: {reasons[0]}", {name: reasons})
        invocation = Invocation(operation, call.request, plan, method, target.platform)

        def function(arrays: dict[str, Any]) -> Any:
            return run(invocation, arrays)

        lowered = jax.jit(use(function)).trace(call.arrays)
        lowered.lower(lowering_platforms=(target.platform,))


def _as_if_on(target: Target) -> contextlib.AbstractContextManager[Any]:
    """Makes `switchax.current_target` answer with a TPU's generation."""
    if target.platform != "tpu" or not target.device_kind:
        return contextlib.nullcontext()
    device = AbstractDevice(
        device_kind=target.device_kind, num_cores=None, platform="tpu"
    )
    mesh = AbstractMesh((1,), ("dp",), (AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)
