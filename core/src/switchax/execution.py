"""Runs a planned call: adapt, call the forward method, undo, guard derivatives."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from .checks import fail_value
from .compat import is_tracing
from .errors import Refusal, RegistrationError, UnsupportedError, house_message
from .kind import Arrays, Call, Plan
from .lowering import check_when_lowered
from .matching import refusals_of
from .operation import BaseOperation, forward_method, forward_parameters
from .per_device import on_each_device
from .placement import Placement, Shards, Specs
from .request import Request
from .reverse_only import reverse_only
from .sharding import along_explicit_axes, constrain
from .target import PLATFORMS, Target, gpu_vendor

__all__ = ["Invocation", "run"]


@dataclasses.dataclass(frozen=True)
class Invocation:
    """Everything static about one run; equal ones are traced once.

    Attributes:
        operation: The operation instance.
        request: The request as the user made it.
        plan: How core adapts it.
        method: Name of the forward method.
        platform: Where it will run.
        placement: The mesh and where arrays are wished to lie on it; None on one
            device.
        shards: How core splits an opaque kernel; None if it does not.
    """

    operation: BaseOperation
    request: Request
    plan: Plan
    method: str
    platform: str
    placement: Placement | None = None
    shards: Shards | None = None


def run(invocation: Invocation, arrays: Arrays) -> dict[str, Any]:
    """Runs an invocation on its arrays; returns the kind's outputs by name."""
    # A copy, so that an instance changed later does not change the key of its trace.
    operation = copy.copy(invocation.operation)
    operation.metadata = operation.metadata.without_config()
    invocation = dataclasses.replace(invocation, operation=operation)
    arrays = _laid_out(invocation, arrays)
    try:
        outputs: dict[str, Any] = _run(invocation, arrays)
    except TypeError as error:
        # Raised by vmap of jvp while it is traced, which is before our own refusal.
        if "forward-mode autodiff (jvp) to a custom_vjp" in str(error):
            name = operation.names()[0]
            raise UnsupportedError(_only_declared(name, "forward_mode")) from error
        raise
    return outputs


# Inlined, so that the compiled program is that of a direct call; the trace is kept
# all the same, so that thirty equal layers are traced once.
@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run(invocation: Invocation, arrays: Arrays) -> dict[str, Any]:
    operation = invocation.operation
    guarded = _guard_inputs(invocation, arrays)
    scope = jax.named_scope(f"switchax.{operation.names()[0]}")
    with scope, _types_in_force(invocation.placement):
        if invocation.shards is not None:
            outputs = _over_shards(invocation, invocation.shards, guarded)
        elif invocation.placement is not None:
            outputs = _in_partitioned(invocation, invocation.placement, guarded)
        else:
            outputs = _compute(invocation, invocation.request, guarded)
    outputs = _guard_outputs(invocation, outputs, guarded)
    check = _PlatformCheck(invocation)
    return {
        field: None if array is None else check_when_lowered(check, array)
        for field, array in outputs.items()
    }


def _types_in_force(placement: Placement | None) -> AbstractContextManager[object]:
    """While a call is traced: the mesh of its arrays' types, where none was set."""
    if placement is None or placement.typed is None:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(placement.typed)


def _compute(
    invocation: Invocation, request: Request, arrays: Arrays
) -> dict[str, Any]:
    """Runs the kernel on arrays that are whole, or are what one device holds."""
    operation, plan = invocation.operation, invocation.plan
    kind, call = operation.kind, Call(request, arrays)
    outputs = kind.shortcut(call, plan)
    if outputs is None:
        operands, static = kind.operands(call, plan)
        given = _arguments(invocation, {**operands, **static})
        result = getattr(operation, invocation.method)(**given)
        try:
            outputs = kind.finish(result, request, plan)
        except RegistrationError as error:
            name = operation.names()[0]
            raise RegistrationError(f"{name}: {error}") from error
    return outputs


def _laid_out(invocation: Invocation, arrays: Arrays) -> Arrays:
    """Lays the arguments out on the mesh, as far as each can be split."""
    placement, shards = invocation.placement, invocation.shards
    if placement is None or not placement.is_set:
        return arrays
    if placement.typed is not None and is_tracing():
        return arrays
    if shards is None:
        return _placed(placement, placement.specs, arrays)
    if isinstance(placement.mesh, AbstractMesh) and not is_tracing():
        raise fail_value(
            invocation.operation.names()[0],
            "a mesh with devices to run on",
            f"an abstract one of {placement}",
            "use jax.set_mesh with a jax.sharding.Mesh, or lower without running",
        )
    return _placed(placement, shards.placed, arrays)


def _placed(placement: Placement, specs: Specs, arrays: Arrays) -> Arrays:
    """Lays out the arrays that a spec is given for."""
    mesh, rules, wishes = placement.mesh, placement.partition_axis, dict(specs)
    return {
        name: constrain(x, wishes[name], mesh, partition_axis=rules)
        if name in wishes
        else x
        for name, x in arrays.items()
    }


def _over_shards(
    invocation: Invocation, shards: Shards, arrays: Arrays
) -> dict[str, Any]:
    """Runs an opaque kernel on each device by itself."""
    placement, kind = invocation.placement, invocation.operation.kind
    assert placement is not None  # shards come of one
    arrays = kind.spread(arrays, shards, invocation.request)
    # Over the other axes shard_map brings them itself.
    wishes = dict(shards.inputs)
    arrays = {name: along_explicit_axes(x, wishes[name]) for name, x in arrays.items()}

    def on_device(arrays: Arrays) -> dict[str, Any]:
        arrays = kind.inside_shard(arrays, shards)
        outputs = _compute(invocation, shards.request, arrays)
        return {field: outputs[field] for field, _ in shards.outputs}

    capabilities = invocation.operation.capabilities
    outputs = on_each_device(
        on_device,
        arrays,
        placement.mesh,
        dict(shards.inputs),
        dict(shards.outputs),
        capabilities.honours_derivative(invocation.platform, "forward_mode"),
    )
    for field, spec in _explicit_outputs(invocation, placement).items():
        outputs[field] = jax.sharding.reshard(outputs[field], spec)  # type: ignore[no-untyped-call]
    return outputs


def _explicit_outputs(
    invocation: Invocation, placement: Placement
) -> Mapping[str, PartitionSpec]:
    """Returns how each output lies where axes are explicit, else nothing.

    As the arguments lay when they were passed: a mesh changes no type.
    """
    kind = invocation.operation.kind
    if not placement.passed:
        return {}
    return kind.outputs_like_inputs(invocation.request, placement)


def _in_partitioned(
    invocation: Invocation, placement: Placement, arrays: Arrays
) -> dict[str, Any]:
    """Runs plain JAX on a mesh, where the partitioner splits it.

    Axes of type Explicit are Auto within: a kernel need not say how each of its
    arrays lies.
    """
    request = invocation.request

    def compute(arrays: Arrays) -> dict[str, Any]:
        outputs = _compute(invocation, request, arrays)
        return {field: x for field, x in outputs.items() if x is not None}

    explicit = _explicit_outputs(invocation, placement)
    if explicit:
        within = jax.sharding.auto_axes(compute, out_sharding=explicit)
        outputs: dict[str, Any] = within(arrays)
        return outputs
    return _placed(placement, placement.specs, compute(arrays))


@dataclasses.dataclass(frozen=True)
class _PlatformCheck:
    """Raises where what was chosen for one platform is lowered for another.

    It may run there if it would run by the same method and refuse nothing.
    """

    invocation: Invocation

    def __call__(self, platform: str) -> None:
        invocation = self.invocation
        platform = gpu_vendor() if platform == "gpu" else platform
        if platform == invocation.platform:
            return
        cls, name = type(invocation.operation), invocation.operation.names()[0]
        method: str | None = None
        reasons: tuple[Refusal, ...] = ()
        if platform in PLATFORMS:
            method = forward_method(cls, platform)
            reasons = refusals_of(cls, invocation.plan, Target(platform), method)
        if method != invocation.method or reasons:
            rule = f"to be lowered for {invocation.platform}, which it was chosen for"
            todo = (
                "say beforehand what the program runs on: jax.set_mesh, "
                f"jax.default_device or OperationMetadata(backend={platform!r})"
            )
            text = house_message(name, rule, platform, todo)
            raise UnsupportedError(text, {name: reasons})


def _arguments(invocation: Invocation, available: Mapping[str, Any]) -> dict[str, Any]:
    names = forward_parameters(type(invocation.operation), invocation.method)
    return {name: available.get(name) for name in names}


def _guard_inputs(invocation: Invocation, arrays: Arrays) -> Arrays:
    """Makes the derivative to an undeclared argument raise, instead of being zero.

    Undeclared forward mode and second derivatives raise here already, before a
    `jax.custom_vjp` of the kernel does, which cannot name the operation.
    """
    operation = invocation.operation
    name, capabilities = operation.names()[0], operation.capabilities
    declared = capabilities.differentiable
    forward = capabilities.honours_derivative(invocation.platform, "forward_mode")
    second = capabilities.honours_derivative(invocation.platform, "second_order")
    guarded = {}
    for argument, array in arrays.items():
        if not _is_floating(array):
            guarded[argument] = array
        elif argument not in declared:
            way = "use jax.lax.stop_gradient on it"
            message = _no_derivative(name, argument, declared, way)
            guarded[argument] = refuse_derivative(message, array)
        elif not (forward and second):
            guarded[argument] = _limit_derivatives(forward, second, name, array)
        else:
            guarded[argument] = array
    return guarded


def _no_derivative(name: str, what: str, declared: AbstractSet[str], way: str) -> str:
    todo = f"{way}, or an operation that declares it"
    return house_message(
        name,
        f"derivatives of {', '.join(sorted(declared)) or 'nothing'} only",
        f"one of {what}",
        todo,
    )


def _guard_outputs(
    invocation: Invocation, outputs: dict[str, Any], inputs: Arrays
) -> dict[str, Any]:
    """Makes undeclared derivatives of outputs raise.

    An output that has none is tied to the inputs, since a kernel may have dropped its
    tangent already: then it would be a silent zero.
    """
    operation = invocation.operation
    capabilities = operation.capabilities
    name = operation.names()[0]
    for output in operation.kind.outputs:
        field = _output_field(outputs, output)
        if outputs.get(field) is not None and output not in capabilities.differentiable:
            # Refused before anybody could use `stop_gradient` on it.
            declared, way = capabilities.differentiable, "do not ask for it there"
            message = _no_derivative(name, output, declared, way)
            floating = [x for x in inputs.values() if _is_floating(x)]
            outputs[field] = _refuse_if_differentiated(
                message, outputs[field], *floating
            )
    forward = capabilities.honours_derivative(invocation.platform, "forward_mode")
    second = capabilities.honours_derivative(invocation.platform, "second_order")
    if forward and second:
        return outputs
    guard = functools.partial(_limit_derivatives, forward, second, name)
    return {
        field: None if array is None else guard(array)
        for field, array in outputs.items()
    }


def _output_field(outputs: Mapping[str, Any], output: str) -> str:
    return next((f for f in outputs if f == output or f.endswith(f"_{output}")), output)


def _is_floating(array: Any) -> bool:
    return bool(jnp.issubdtype(array.dtype, jnp.floating))


def refuse_derivative(message: str, x: Any) -> Any:
    """Returns x; differentiating with respect to it raises UnsupportedError."""
    return _refuse_if_differentiated(message, x)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _refuse_if_differentiated(message: str, x: Any, *others: Any) -> Any:
    """Returns x; raises where x or any of the others is being differentiated."""
    return x


def _refuse(message: str, primals: Any, tangents: Any) -> Any:
    symbolic_zero = jax.custom_derivatives.SymbolicZero
    if all(isinstance(tangent, symbolic_zero) for tangent in tangents):
        return primals[0], tangents[0]
    raise UnsupportedError(message)


_refuse_if_differentiated.defjvp(_refuse, symbolic_zeros=True)


def _limit_derivatives(forward: bool, second: bool, name: str, x: Any) -> Any:
    """Returns x; undeclared forward mode or second derivatives raise."""

    @jax.custom_jvp
    def guard(y: Any) -> Any:
        return y

    @guard.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        (y,), (t,) = primals, tangents
        if not second:
            # Seen by an outer differentiation only: the inner one has taken y already.
            y = refuse_derivative(_only_declared(name, "second_order"), y)
        if not forward:
            t = reverse_only(_only_declared(name, "forward_mode"), t)
        return y, t

    return guard(x)


def _only_declared(name: str, undeclared: str) -> str:
    got = {"forward_mode": "forward mode", "second_order": "a second derivative"}
    return house_message(
        name,
        "first derivatives in reverse mode",
        got[undeclared],
        f"use an operation that declares {undeclared}, such as 'vanilla'",
    )
