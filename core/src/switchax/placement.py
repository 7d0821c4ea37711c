"""How the arrays of a call lie on the mesh in force, and how a kernel is split over it.

The partitioner sees into plain JAX: there core constrains arrays and lets it work. It
does not see into an opaque kernel (Pallas, Triton): there core builds the
`jax.shard_map` itself, from what the kind says of the meaning of each dimension.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import AxisType, PartitionSpec

from .capabilities import Capabilities
from .checks import fail_value
from .errors import Refusal
from .request import Request
from .sharding import AnyMesh, as_spec, current_mesh, flat_names

if TYPE_CHECKING:
    from .kind import Adaptation, OperationKind
    from .metadata import OperationMetadata

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
    """

    mesh: AnyMesh
    specs: Specs

    def spec(self, name: str) -> PartitionSpec:
        """The wish for one array; whole where there is none."""
        return dict(self.specs).get(name, as_spec(()))

    def splitting(self, entry: Any) -> tuple[str, ...]:
        """The axes of one dimension of a spec that this mesh splits it over."""
        sizes = _open_axes(self.mesh)
        return tuple(name for name in flat_names(entry) if sizes.get(name, 1) > 1)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.mesh.shape.items())


@dataclasses.dataclass(frozen=True)
class Shards:
    """How an opaque kernel is split: one shard_map over the whole mesh.

    Attributes:
        request: The call that each device makes.
        inputs: A spec for each array argument, by name.
        outputs: A spec for each output that was asked for, by field.
        axes: The mesh axes that split something.
        adaptations: What splitting changes.
        refusals: Why the call cannot be split; empty if it can.
    """

    request: Request
    inputs: Specs = ()
    outputs: Specs = ()
    axes: tuple[str, ...] = ()
    adaptations: tuple[Adaptation, ...] = ()
    refusals: tuple[Refusal, ...] = ()


def placement_of(
    kind: OperationKind, request: Request, metadata: OperationMetadata
) -> Placement | None:
    """Returns the placement of a call, or None where nothing can be split.

    Raises:
        ValueError: If the metadata's mesh is another than that of `jax.set_mesh` or
            of the shard_map around.
    """
    mesh = metadata.mesh
    context = jax.sharding.get_abstract_mesh()
    if mesh is not None and not context.empty:
        if dict(context.shape) != dict(mesh.shape):
            got = f"{dict(mesh.shape)} beside {dict(context.shape)}"
            rule = "metadata's mesh to be the one in force"
            raise fail_value(request.kind, rule, got, "leave one of the two out")
        mesh = current_mesh()
    if mesh is None or not any(size > 1 for size in _open_axes(mesh).values()):
        return None
    if {AxisType.Manual, AxisType.Explicit} <= set(mesh.axis_types):
        return Placement(mesh, ())  # JAX hands over no axes from within shard_map
    return Placement(mesh, tuple(kind.specs(request, metadata).items()))


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
    manual = [
        n
        for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if t == AxisType.Manual
    ]
    if manual:
        rest = ", ".join(n for n, size in _open_axes(mesh).items() if size > 1)
        hint = "give shard_map every axis of the mesh"
        refusal = Refusal("sharding", "mesh", f"{rest} not manual", "manual", hint)
        return Shards(request, refusals=(refusal,))
    return kind.shard(request, capabilities, placement)


def over_whole_mesh(mesh: AnyMesh, specs: Mapping[str, Iterable[Any]]) -> Specs:
    """Returns specs in which every axis of size 1 is named too.

    An axis that a spec does not name is summed over by the derivative of shard_map,
    as a collective, even if its size is 1.
    """
    ones = tuple(name for name, size in _open_axes(mesh).items() if size == 1)

    def named(entries: Iterable[Any]) -> PartitionSpec:
        dims = [tuple(flat_names(entry)) for entry in entries]
        if dims:
            dims[0] = (*dims[0], *ones)
        return as_spec([names or None for names in dims])

    return tuple((name, named(entries)) for name, entries in specs.items())


def _open_axes(mesh: AnyMesh) -> dict[str, int]:
    types = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    return {n: size for (n, size), kind in types if kind != AxisType.Manual}
