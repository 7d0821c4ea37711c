"""A function run on each device of a mesh, whose reverse mode adds no collective."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from .compat import axes_of_vmap
from .kind import Arrays
from .sharding import AnyMesh, as_spec, flat_names, is_mesh_set, with_auto_axes

__all__ = ["on_each_device"]

Specs = Mapping[str, PartitionSpec]


def on_each_device(
    function: Callable[[Arrays], dict[str, Any]],
    arrays: Arrays,
    mesh: AnyMesh,
    inputs: Specs,
    outputs: Specs,
    forward_mode: bool = False,
) -> dict[str, Any]:
    """Runs an opaque function of what each device holds.

    Devices along an axis that splits nothing compute the same. `jax.shard_map` cannot
    know that of an opaque kernel, and sums their gradients, as a collective; so here
    each device differentiates by itself.

    Args:
        function: From arrays by name to outputs by name, both as one device holds them.
        arrays: The arguments, whole.
        mesh: The mesh to run on; where one is in force, that one.
        inputs: A spec for each array.
        outputs: A spec for each output.
        forward_mode: Whether forward mode must work; then reverse mode adds that sum.

    Returns:
        The outputs by name, whole.
    """
    mapped = axes_of_vmap()

    def sharded(body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Any:
        function = jax.shard_map(
            body,
            mesh=None if is_mesh_set() else with_auto_axes(mesh),
            in_specs=in_specs,
            out_specs=out_specs,
            check_vma=False,  # a kernel would have to annotate its results
        )
        # JAX 0.10 maps none over an explicit axis but under jit.
        return jax.jit(function) if mapped else function

    inputs = {name: inputs[name] for name in arrays}
    outputs = dict(outputs)
    used = set(_names([*inputs.values(), *outputs.values()]))
    # What a vmap around has split already is no axis of what is mapped.
    axes = {n: size for n, size in mesh.shape.items() if n not in mapped}
    idle = {name for name, size in axes.items() if size > 1} - used
    plain = sharded(function, (inputs,), outputs)
    if forward_mode or not idle:
        return dict(plain(arrays))

    floating = {n for n, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    linear = {name: inputs[name] for name in floating}
    rest = {name: inputs[name] for name in arrays if name not in floating}
    pieces = as_spec([tuple(axes)])  # one for each device

    def forward(arrays: Arrays, others: Arrays) -> Any:
        found, pull = jax.vjp(lambda some: function({**others, **some}), arrays)
        return found, jax.tree.map(lambda x: x[None], pull)

    def backward(pull: Any, cotangents: Arrays) -> dict[str, Any]:
        shares = {
            name: x
            / math.prod(mesh.shape[n] for n in used - {*_names([outputs[name]])})
            for name, x in cotangents.items()
        }
        (found,) = jax.tree.map(lambda x: x[0], pull)(shares)
        lacking = {name: used - {*_names([linear[name]])} for name in found}
        return {name: _psum(x, lacking[name]) for name, x in found.items()}

    @jax.custom_vjp
    def run(arrays: Arrays, others: Arrays) -> dict[str, Any]:
        return dict(plain({**arrays, **others}))

    def run_forward(arrays: Arrays, others: Arrays) -> Any:
        return sharded(forward, (linear, rest), (outputs, pieces))(arrays, others)

    def run_backward(pull: Any, cotangents: Arrays) -> Any:
        return sharded(backward, (pieces, outputs), linear)(pull, cotangents), None

    run.defvjp(run_forward, run_backward)
    return run(
        {name: arrays[name] for name in linear}, {name: arrays[name] for name in rest}
    )


def _psum(x: Any, axes: AbstractSet[str]) -> Any:
    return jax.lax.psum(x, tuple(sorted(axes))) if axes else x  # type: ignore[no-untyped-call]


def _names(specs: Iterable[PartitionSpec]) -> list[str]:
    return [name for spec in specs for name in flat_names(list(spec))]
