"""How the arrays of a call lie on the mesh in force, and how a kernel is split over it.

The partitioner sees into plain JAX: there core constrains arrays and lets it work. It
does not see into an opaque kernel (Pallas, Triton): there core builds the
`jax.shard_map` itself, from what the kind says of the meaning of each dimension.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from . import compat
from .capabilities import Capabilities
from .checks import fail_value
from .errors import Refusal
from .request import Request
from .sharding import (
    AnyMesh,
    as_spec,
    current_mesh,
    entries_of,
    flat_names,
    has_explicit_axes,
    is_mesh_set,
    report_unused_mesh,
    with_auto_axes,
    without_mapped_axes,
)

if TYPE_CHECKING:
    from .kind import Adaptation, OperationKind
    from .metadata import OperationMetadata
    from .partition import PartitionAxis

__all__ = [
    "Placement",
    "Shards",
    "Specs",
    "over_whole_mesh",
    "placement_of",
    "shards_of",
]

Specs = tuple[tuple[str, PartitionSpec], ...]


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where the arrays of one call are wished to lie.

    Attributes:
        mesh: The mesh in force; inside shard_map its manual axes say so.
        specs: A wish for each array argument and output, by name, not corrected.
        passed: Where axes are explicit, how each array lay when it was passed.
        is_set: Whether the mesh is in force; if not, it is that of the arrays' types.
        typed: Where the arrays' types have a mesh that `jax.set_mesh` did not set:
            that mesh, for the call to be traced under.
        mapped: The axes over which a vmap around has split what it maps.
        unsplit: Explicit axes that were named to a vmap, but split nothing it maps.
        partition_axis: The rules that the specs are of: its names are known.
    """

    mesh: AnyMesh
    specs: Specs
    passed: Specs = ()
    is_set: bool = True
    typed: AbstractMesh | None = None
    mapped: frozenset[str] = frozenset()
    unsplit: tuple[str, ...] = ()
    partition_axis: PartitionAxis | None = None

    def spec(self, name: str) -> PartitionSpec:
        """The wish for one array; whole where there is none."""
        return dict(self.specs).get(name, as_spec(()))

    def splitting_dimension(self, name: str, dim: int) -> tuple[str, ...]:
        """The axes that a wish, or how it was passed, splits a dimension over."""
        sizes = _open_axes(self.mesh)
        specs = (self.spec(name), dict(self.passed).get(name, ()))
        found = [n for spec in specs for n in flat_names(list(spec[dim : dim + 1]))]
        return tuple(name for name in dict.fromkeys(found) if sizes.get(name, 1) > 1)

    def is_split(self) -> bool:
        """Whether something was passed, or is mapped, that several devices share."""
        sizes = self.mesh.shape
        names = [n for _, spec in self.passed for n in flat_names([*spec])]
        return any(sizes[name] > 1 for name in (*names, *self.mapped & sizes.keys()))

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.mesh.shape.items())


@dataclasses.dataclass(frozen=True)
class Shards:
    """How an opaque kernel is split: one shard_map over the whole mesh.

    Attributes:
        request: The call that each device makes.
        placed: A spec for each array argument as it was passed, by name.
        inputs: Likewise as the kernel is given it, after `OperationKind.spread`.
        outputs: A spec for each output that was asked for, by field.
        axes: The mesh axes that split something.
        adaptations: What splitting changes.
        refusals: Why the call cannot be split; empty if it can.
    """

    request: Request
    placed: Specs = ()
    inputs: Specs = ()
    outputs: Specs = ()
    axes: tuple[str, ...] = ()
    adaptations: tuple[Adaptation, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def placement_of(
    kind: OperationKind,
    request: Request,
    metadata: OperationMetadata,
    arrays: Mapping[str, Any] = types.MappingProxyType({}),
) -> Placement | None:
    """Returns the placement of a call, or None where nothing can be split.

    Args:
        kind: The request's kind.
        request: The request as the user made it.
        metadata: Its mesh and rules.
        arrays: The arguments by name; an explicit axis is part of their types.

    Raises:
        ValueError: If the metadata's mesh is another than that of `jax.set_mesh` or
            of the shard_map around.
    """
    mesh = metadata.mesh
    if mesh is not None and is_mesh_set():
        _check_same(request.kind, mesh)
        mesh = current_mesh()
    types_ = {name: jax.typeof(array).sharding for name, array in arrays.items()}
    passed = tuple((n, as_spec(entries_of(s.spec))) for n, s in types_.items())
    # What lies whole on an explicit mesh has it in its type too.
    of_types = [s.mesh for s in types_.values() if has_explicit_axes(s.mesh)]
    typed = of_types[0] if of_types and not is_mesh_set() else None
    mapped = compat.axes_of_vmap()
    if mesh is None:
        if typed is None:
            return None
        return Placement(typed, (), passed, False, typed, mapped, _unsplit(typed))
    if typed is not None and typed.shape != mesh.shape:
        got = f"{dict(mesh.shape)} beside {dict(typed.shape)}"
        rule = "metadata's mesh to be that of the arrays' types"
        raise fail_value(request.kind, rule, got, "leave one of the two out")
    if typed is None and not is_mesh_set():
        mesh = with_auto_axes(mesh)  # no type says how anything lies
    open_axes = _open_axes(mesh)
    named = {n for _, spec in passed for n in flat_names([*spec])}
    is_in_types = typed is not None or not named.isdisjoint(open_axes)
    if not is_in_types and not any(size > 1 for size in open_axes.values()):
        return None
    if {AxisType.Manual, AxisType.Explicit} <= set(mesh.axis_types):
        return Placement(mesh, ())  # JAX hands over no axes from within shard_map
    if typed is None and not has_explicit_axes():
        passed = ()
    used = named if passed else set()
    rules = metadata.partition_axis
    report_unused_mesh(request.kind, mesh, rules, used)
    wishes = kind.specs(request, metadata)
    specs = tuple((name, without_mapped_axes(wish)) for name, wish in wishes.items())
    # A call is traced under the mesh of its types, whatever that of metadata says.
    unsplit = _unsplit(mesh if typed is None else typed)
    return Placement(mesh, specs, passed, True, typed, mapped, unsplit, rules)


def _unsplit(mesh: AnyMesh) -> tuple[str, ...]:
    """Returns the explicit axes that are named to a vmap, and split nothing it maps."""
    named = compat.axes_named_to_vmap()
    pairs = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return tuple(n for n, kind in pairs if kind == AxisType.Explicit and n in named)


def _check_same(where: str, mesh: AnyMesh) -> None:
    """Raises unless a mesh is the one in force, types of its axes aside."""
    context, concrete = jax.sharding.get_abstract_mesh(), compat.mesh_that_was_set()
    same = tuple(context.shape.items()) == tuple(mesh.shape.items())
    if same and isinstance(mesh, Mesh) and concrete is not None:
        same = list(concrete.devices.flat) == list(mesh.devices.flat)
    if not same:
        got = f"{dict(mesh.shape)} beside {dict(context.shape)}"
        rule = "metadata's mesh to be the one in force, on the same devices"
        raise fail_value(where, rule, got, "leave one of the two out")


def shards_of(
    kind: OperationKind,
    request: Request,
    capabilities: Capabilities,
    placement: Placement,
) -> Shards | None:
    """Returns how core would split an opaque kernel of these capabilities.

    Returns:
        The split, which may be refused; None for a call that needs no kernel.
    """
    mesh = placement.mesh
    open_axes = _open_axes(mesh)
    symbols = [str(s) for s in request.sizes.values() if not isinstance(s, int)]
    refusal = None
    if not placement.is_set and placement.is_split():
        got, hint = f"{placement}, of the arrays' types", "put it in jax.set_mesh"
        refusal = Refusal("sharding", "mesh", got, "in force", hint)
    elif placement.unsplit:
        # JAX's shard_map takes them for split, and its reshard does not.
        got = f"{', '.join(placement.unsplit)} in spmd_axis_name alone"
        hint = "split what vmap maps over it, or leave spmd_axis_name out"
        refusal = Refusal("sharding", "mesh", got, "in the types too", hint)
    elif len(open_axes) < len(mesh.axis_names):
        rest = ", ".join(name for name, size in open_axes.items() if size > 1)
        hint = "give shard_map every axis of the mesh"
        refusal = Refusal("sharding", "mesh", f"{rest} not manual", "manual", hint)
    elif symbols:
        hint = "export with numbers, or choose an operation that is not opaque"
        got = ", ".join(symbols)
        refusal = Refusal("sharding", "sizes", got, "numbers, on a mesh", hint)
    if refusal is not None:
        return Shards(request, refusals=(refusal,))
    return kind.shard(request, capabilities, placement)


def over_whole_mesh(mesh: AnyMesh, specs: Mapping[str, Iterable[Any]]) -> Specs:
    """Returns specs in which every axis of size 1 is named too.

    An axis that a spec does not name is summed over by the derivative of shard_map,
    as a collective, even if its size is 1.
    """
    mapped = compat.axes_of_vmap()
    ones = tuple(
        name
        for name, size in _open_axes(mesh).items()
        if size == 1 and name not in mapped
    )

    def named(entries: Iterable[Any]) -> PartitionSpec:
        dims = [tuple(flat_names(entry)) for entry in entries]
        if dims:
            dims[0] = (*dims[0], *ones)
        return as_spec([names or None for names in dims])

    return tuple((name, named(entries)) for name, entries in specs.items())


def _open_axes(mesh: AnyMesh) -> dict[str, int]:
    pairs = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    return {n: size for (n, size), kind in pairs if kind != AxisType.Manual}
