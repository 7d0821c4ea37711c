"""From a wished-for spec to one that an array and a mesh can have, and onto it.

The mesh in force, in this order: the one passed, `jax.set_mesh` (and inside shard_map
the mesh with its manual axes), `with mesh:` (deprecated since JAX 0.12), none.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from . import compat
from .axes import EMPTY
from .caller import warn_caller
from .checks import brief, fail_type, fail_value, is_integer
from .errors import near_miss
from .settings import current_settings

if TYPE_CHECKING:
    from .partition import PartitionAxis

__all__ = [
    "AnyMesh",
    "UnknownMeshAxisWarning",
    "along_explicit_axes",
    "as_spec",
    "check_distinct",
    "constrain",
    "correct_spec",
    "current_mesh",
    "entries_of",
    "flat_names",
    "has_explicit_axes",
    "is_mesh_set",
    "is_shape",
    "report_unused_mesh",
    "shape_of",
    "with_auto_axes",
    "without_mapped_axes",
]

AnyMesh: TypeAlias = Mesh | AbstractMesh


class UnknownMeshAxisWarning(UserWarning):
    """Said once for a name that is neither in the mesh nor in PartitionAxis.

    Also for a mesh none of whose axes PartitionAxis names.
    """


def current_mesh() -> AnyMesh | None:
    """Returns the mesh in force here, or None.

    Returns:
        That of `jax.set_mesh`, with its devices where those are what is in force, else
        abstract: under `jax.sharding.use_abstract_mesh`, and inside shard_map, where
        its manual axes say so. Without one, the mesh of `with mesh:`.

    Example:
        >>> with jax.set_mesh(mesh):
        ...     assert current_mesh() == mesh
    """
    abstract = jax.sharding.get_abstract_mesh()
    if abstract.empty:
        return compat.entered_mesh()
    concrete = compat.mesh_that_was_set()
    if concrete is not None and concrete.abstract_mesh == abstract:
        return concrete
    return abstract


def is_mesh_set() -> bool:
    """Returns whether `jax.set_mesh`, or a shard_map around, has set a mesh."""
    return not jax.sharding.get_abstract_mesh().empty


def has_explicit_axes(mesh: AnyMesh | None = None) -> bool:
    """Returns whether a mesh, by default that which was set, has Explicit axes."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    return AxisType.Explicit in mesh.axis_types


def flat_names(entry: Any) -> Iterator[Any]:
    """Yields the mesh axes of one dimension: flattened, without None and `EMPTY`."""
    if isinstance(entry, list | tuple):
        for member in entry:
            yield from flat_names(member)
    elif entry is not None and not (isinstance(entry, str) and entry == EMPTY):
        yield entry


def entries_of(spec: Iterable[Any]) -> tuple[Any, ...]:
    """Returns a spec's entries, leaving aside what it says of partial sums."""
    return tuple(spec.partitions if isinstance(spec, PartitionSpec) else spec)


def as_spec(entries: Iterable[Any]) -> PartitionSpec:
    """Makes a spec of entries, each None, an axis or a tuple; `()` is None."""
    return PartitionSpec(*entries)  # type: ignore[no-untyped-call]


_WHOLE = as_spec(())


def check_distinct(
    where: str, entries: Iterable[Iterable[Any]], labels: Sequence[Any] = ()
) -> None:
    """Raises a ValueError that names both dimensions of an axis used twice.

    Args:
        where: Who was called.
        entries: For each dimension its mesh axes.
        labels: What each dimension was asked for as, for the message.
    """
    seen: dict[Hashable, int] = {}
    for dim, names in enumerate(entries):
        for name in names:
            if name in seen:
                both = " and ".join(_dimension(d, labels) for d in (seen[name], dim))
                got = f"{name!r} in {both}"
                todo = "split each dimension over axes of its own"
                raise fail_value(where, "each mesh axis at most once", got, todo)
            seen[name] = dim


def _dimension(dim: int, labels: Sequence[Any]) -> str:
    label = f" ({labels[dim]!r})" if dim < len(labels) else ""
    return f"dimension {dim}{label}"


def correct_spec(
    spec: PartitionSpec | Sequence[Any] | None,
    shape: Sequence[int],
    mesh: AnyMesh | None = None,
    *,
    partition_axis: PartitionAxis | None = None,
) -> PartitionSpec:
    """Returns the nearest spec that an array of this shape can have on this mesh.

    Each dimension keeps the longest prefix of its axes that divides its length; length
    0 is divided by all. An axis that is manual (inside shard_map) or that the mesh
    lacks is dropped by itself: quietly if `PartitionAxis` or a registered axis knows
    its name, else with a warning, once, or an error when settings are strict.

    Args:
        spec: For each dimension None, an axis, or a tuple of axes. Missing dimensions
            are replicated, those past the shape are dropped. `UNCONSTRAINED` becomes
            None, since no array lies that way.
        shape: Lengths of the dimensions.
        mesh: With devices or abstract, of any axis types; None is the mesh in force.
        partition_axis: Whose names are known; None is the current manager's, else the
            default's.

    Returns:
        One entry for each dimension, or `PartitionSpec()` where none is split; so no
        mesh, which is one device, gives `PartitionSpec()`. Correcting it again
        changes nothing.

    Raises:
        TypeError: If mesh is no mesh, or spec, shape or partition_axis is none.
        ValueError: For an axis used twice, a bare string, unreduced axes, or, when
            strict, for a name that nobody knows.

    Example:
        >>> mesh = jax.make_mesh((2, 4), ("dp", "tp"))
        >>> correct_spec(PartitionSpec(("fsdp", "dp"), "sp", "tp"), (6, 8, 3), mesh)
        PartitionSpec('dp', None, None)
    """
    where = "correct_spec"
    if isinstance(spec, str):
        todo = f"pass PartitionSpec({spec!r})"
        raise fail_value(where, "a PartitionSpec", f"spec={spec!r}", todo)
    if isinstance(spec, PartitionSpec) and (spec.unreduced or spec.reduced):
        todo = "reshard the array first: partial sums are no layout"
        rule = "a spec without unreduced or reduced axes"
        raise fail_value(where, rule, f"spec={spec}", todo)
    if not isinstance(spec, Sequence | PartitionSpec | None) or isinstance(spec, bytes):
        got = f"spec={brief(spec)}"
        raise fail_type(where, "a PartitionSpec", got, "pass its spec")
    if not is_shape(shape):
        got = f"shape={brief(shape)}"
        raise fail_type(where, "a shape", got, "pass x.shape")
    entries = [
        () if entry is PartitionSpec.UNCONSTRAINED else tuple(flat_names(entry))
        for entry in (() if spec is None else spec)
    ]
    for name in itertools.chain.from_iterable(entries):
        if not isinstance(name, Hashable):  # a set or a dict
            todo = "pass names of mesh axes"
            raise fail_type(where, "a PartitionSpec of axes", brief(name), todo)
    check_distinct(where, entries)
    _check_partition_axis(where, partition_axis)
    mesh = _checked_mesh(where, mesh)
    if mesh is None:
        return _WHOLE
    _report_unknown(where, entries, mesh, partition_axis)
    sizes = _splitting_axes(mesh)
    kept = [
        _dividing_prefix(length, names, sizes)
        for length, names in zip(shape, entries, strict=False)
    ]
    if not any(kept):
        return _WHOLE
    return as_spec([*kept, *[None] * (len(shape) - len(kept))])


def _check_partition_axis(where: str, value: Any) -> None:
    if value is None:
        return
    # Here, since partition imports this module.
    from .partition import PartitionAxis

    if not isinstance(value, PartitionAxis):
        got = f"partition_axis={brief(value)}"
        raise fail_type(where, "a PartitionAxis", got, "pass PartitionAxis(...)")


def is_shape(shape: Any) -> bool:
    """Whether it is a sequence of lengths, which may be symbolic."""
    none = str, bytes, float, type(None)
    return isinstance(shape, Sequence | np.ndarray) and not (
        isinstance(shape, str | bytes)
        or any(isinstance(n, none) or not isinstance(n, Hashable) for n in shape)
    )


def _checked_mesh(where: str, mesh: Any) -> AnyMesh | None:
    if mesh is None:
        return current_mesh()
    if not isinstance(mesh, Mesh | AbstractMesh):
        got = f"mesh={brief(mesh)}"
        raise fail_type(where, "a Mesh or AbstractMesh", got, "see jax.make_mesh")
    return None if mesh.empty else mesh


def _axis_types(mesh: AnyMesh) -> Mapping[Any, AxisType]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def _splitting_axes(mesh: AnyMesh) -> Mapping[Any, int]:
    """Returns the sizes of the axes that an array can be split over."""
    types = _axis_types(mesh)
    sizes = mesh.shape.items()
    return {name: size for name, size in sizes if types[name] != AxisType.Manual}


def _dividing_prefix(
    length: int, names: Sequence[Any], sizes: Mapping[Any, int]
) -> tuple[Any, ...]:
    kept: list[Any] = []
    parts = 1
    for name in names:
        if name in sizes:
            parts *= sizes[name]
            if not is_integer(length) or length % parts:  # it may be symbolic
                break
            kept.append(name)
    return tuple(kept)


_said: set[Any] = set()


def _report_unknown(
    where: str,
    entries: Iterable[Iterable[Any]],
    mesh: AnyMesh,
    partition_axis: PartitionAxis | None,
) -> None:
    absent = {n for names in entries for n in names if n not in mesh.axis_names}
    if not absent:
        return
    # Here, since partition imports this module.
    from .partition import known_mesh_axes

    known = known_mesh_axes(partition_axis)
    for name in sorted(absent - known, key=str):
        names = [str(n) for n in (*mesh.axis_names, *known)]
        rule = f"an axis of the mesh {mesh.axis_names} or of PartitionAxis"
        got = f"{name!r}{near_miss(str(name), names)}"
        if current_settings().strict:
            raise fail_value(where, rule, got, "strict is set: correct the name")
        if name not in _said:
            _said.add(name)
            message = f"{where}: expected {rule}, got {got}; it splits nothing"
            warn_caller(message, UnknownMeshAxisWarning)


def report_unused_mesh(
    where: str,
    mesh: AnyMesh,
    partition_axis: PartitionAxis,
    used: AbstractSet[Any] = frozenset(),
) -> None:
    """Warns, once, of a mesh that splits nothing since no rule names its axes.

    Args:
        where: Who was called.
        mesh: The mesh in force.
        partition_axis: The rules.
        used: Axes that split something by themselves.

    Raises:
        ValueError: Instead, if settings are strict.
    """
    from .partition import known_mesh_axes

    sizes = {n: size for n, size in _splitting_axes(mesh).items() if size > 1}
    known = known_mesh_axes(partition_axis)
    if not sizes or not sizes.keys().isdisjoint(known | used):
        return
    names = ", ".join(sorted(map(str, known)))
    rule = f"a mesh with an axis that PartitionAxis names ({names})"
    got = ", ".join(f"{name}={size}" for name, size in sizes.items())
    fields = zip(("data_parallel_axis", "tensor_parallel_axis"), sizes, strict=False)
    names = ", ".join(f"{field}={name!r}" for field, name in fields)
    todo = "name them so, or pass metadata=OperationMetadata(partition_axis="
    todo += f"PartitionAxis({names})) or the like"
    if current_settings().strict:
        raise fail_value(where, rule, got, f"strict is set: {todo}")
    if (where, got) not in _said:
        _said.add((where, got))
        message = f"{where}: expected {rule}, got {got}, which splits nothing; {todo}"
        warn_caller(message, UnknownMeshAxisWarning)


def shape_of(where: str, x: Any) -> tuple[int, ...]:
    """Returns an array's shape, or raises a TypeError for what is no array."""
    shape = getattr(x, "shape", None)
    if isinstance(shape, tuple) and not isinstance(x, jax.ShapeDtypeStruct):
        return shape
    got = f"x={brief(x)}"
    raise fail_type(where, "an array", got, "shard each array of a tree")


def constrain(
    x: Any,
    spec: PartitionSpec | Sequence[Any] | None,
    mesh: AnyMesh | None = None,
    *,
    partition_axis: PartitionAxis | None = None,
) -> Any:
    """Returns x laid out as the corrected spec says, values unchanged.

    Inside jit this constrains the partitioner, or reshards where axes are explicit;
    outside it moves the array. Inside shard_map only the axes that are not manual
    matter, and inside vmap those over which what is mapped is not split already.
    Without a mesh, x comes back as it is; so it does, outside of jit, on an abstract
    mesh, which has no devices, and where that leaves nothing of a spec that asked for
    something, unless x is committed to other devices. Under grad or vmap alone nothing
    moves: there, as for JAX's own constraint, x must be free to move or on the mesh.

    Args:
        x: An array of any shape.
        spec: The wish; see `correct_spec`. None or all None means whole on every
            device, but for an array outside of jit that is free to move there.
        mesh: None is the mesh in force. A mesh that `jax.set_mesh` did not set
            constrains as if its axes were of type Auto.
        partition_axis: Whose names are known; see `correct_spec`.

    Returns:
        The array, [*x.shape].

    Raises:
        TypeError: If x is no array or mesh is no mesh; see `correct_spec`.
        ValueError: See `correct_spec`; also for a mesh whose devices are not those of
            the one that is set, where that is traced.

    Example:
        >>> with jax.set_mesh(mesh):
        ...     y = constrain(x, PartitionSpec("dp", None))
    """
    shape = shape_of("shard", x)
    mesh = _checked_mesh("shard", mesh)
    if mesh is None:
        correct_spec(spec, shape, partition_axis=partition_axis)  # what it refuses
        return x
    context = jax.sharding.get_abstract_mesh()
    is_eager = not isinstance(x, jax.core.Tracer) and not compat.is_tracing()
    if not is_eager:
        _check_devices(mesh)
    is_in_force = not context.empty and context.shape == mesh.shape
    corrected = correct_spec(
        spec,
        shape,
        context if is_in_force else mesh,
        partition_axis=partition_axis,
    )
    corrected = without_mapped_axes(corrected)
    asks = any(True for entry in spec or () for _ in flat_names(entry))
    if asks and corrected == _WHOLE and not (is_eager and _is_elsewhere(x, mesh)):
        return x
    if is_eager:
        return _place(x, corrected, mesh)
    if not compat.is_staged() and _has_no_devices(mesh):
        return x  # grad or vmap alone, which run at once
    if is_in_force:
        return _constrain_in_context(x, corrected, context)
    sharding = NamedSharding(with_auto_axes(mesh), corrected)
    return _constrained(x, sharding)


def _check_devices(mesh: AnyMesh) -> None:
    """Raises where a program under `jax.set_mesh` cannot have the mesh's devices."""
    known = compat.mesh_that_was_set()
    if known is None or not isinstance(mesh, Mesh):
        return
    if list(known.devices.flat) != list(mesh.devices.flat):
        got = f"a mesh of {mesh.devices.size} others or in another order"
        todo = "leave mesh out, or set that one with jax.set_mesh"
        raise fail_value("shard", "the devices of the mesh that is set", got, todo)


def _is_elsewhere(x: Any, mesh: AnyMesh) -> bool:
    """Returns whether an array is held on devices that are not those of the mesh.

    Beside arrays that are laid out on it, no computation would take it.
    """
    if not isinstance(x, jax.Array) or not isinstance(mesh, Mesh):
        return False
    return bool(x.committed) and x.sharding.device_set != frozenset(mesh.devices.flat)


def _has_no_devices(mesh: AnyMesh) -> bool:
    """Returns whether there are none behind a mesh, nor a shard_map around."""
    is_abstract = isinstance(mesh, AbstractMesh) and not mesh.manual_axes
    return is_abstract and compat.mesh_that_was_set() is None


def without_mapped_axes(spec: Iterable[Any]) -> PartitionSpec:
    """Returns the spec without the axes that split what a vmap around maps."""
    mapped = compat.axes_of_vmap()

    def left(entry: Any) -> Any:
        names = list(flat_names(entry))
        kept = tuple(name for name in names if name not in mapped)
        return entry if len(kept) == len(names) else kept or None

    return as_spec(map(left, entries_of(spec)))


def _place(x: Any, spec: PartitionSpec, mesh: AnyMesh) -> Any:
    now = getattr(x, "sharding", None)
    if isinstance(mesh, AbstractMesh):
        own = now.mesh if isinstance(now, NamedSharding) else None
        if not isinstance(own, Mesh) or own.shape != mesh.shape:
            return x
        mesh = own
    if spec == _WHOLE and isinstance(x, jax.Array) and _is_whole(x, mesh):
        return x
    return jax.device_put(x, NamedSharding(mesh, spec))


def _is_whole(x: jax.Array, mesh: Mesh) -> bool:
    """Returns whether x is replicated already, or on one device but free to move."""
    devices = frozenset(mesh.devices.flat)
    free = not x.committed or x.sharding.device_set == devices
    return free and x.sharding.is_fully_replicated


def along_explicit_axes(x: Any, spec: Iterable[Any]) -> Any:
    """Returns x split over explicit axes, of the mesh that was set, as a spec says."""
    types = _axis_types(jax.sharding.get_abstract_mesh())
    if AxisType.Explicit not in types.values():
        return x
    if jax.typeof(x).sharding.mesh.empty:  # else its gradient would come back split
        x = jax.sharding.reshard(x, _WHOLE)  # type: ignore[no-untyped-call]
    own = as_spec(_of_type(AxisType.Explicit, spec, types))
    return jax.sharding.reshard(x, own)  # type: ignore[no-untyped-call]


def _of_type(
    kind: AxisType, spec: Iterable[Any], types: Mapping[Any, AxisType]
) -> list[tuple[Any, ...]]:
    """Returns for each dimension of a spec its axes of one type."""
    return [tuple(n for n in flat_names(entry) if types[n] == kind) for entry in spec]


def _constrain_in_context(x: Any, spec: PartitionSpec, context: AbstractMesh) -> Any:
    """Constrains under `jax.set_mesh`, by the types of the mesh's axes."""
    types = _axis_types(context)
    entries = [*spec, *[None] * (x.ndim - len(spec))]
    x = along_explicit_axes(x, entries)
    if AxisType.Auto not in types.values():
        return x
    # None would undo what the explicit axes split, and what runs at once, as under
    # grad, loses them from a cotangent's type if others stand beside them.
    staged, free = compat.is_staged(), PartitionSpec.UNCONSTRAINED
    explicit = _of_type(AxisType.Explicit, entries, types)
    auto = _of_type(AxisType.Auto, entries, types)
    splitting = [staged and any(context.shape[n] > 1 for n in a) for a in auto]
    triples = zip(explicit, auto, splitting, strict=True)
    wish = as_spec((a or None) if s or not e else free for e, a, s in triples)
    # A program may run again under a like mesh of other devices, so it holds none;
    # what grad runs at once needs them, for an array that is on one device.
    mesh = None if staged else compat.mesh_that_was_set()
    if mesh is not None and mesh.abstract_mesh == context:
        return _constrained(x, NamedSharding(mesh, wish))
    return _constrained(x, wish)


def _constrained(x: Any, sharding: NamedSharding | PartitionSpec) -> Any:
    return jax.lax.with_sharding_constraint(x, sharding)  # type: ignore[no-untyped-call]


def with_auto_axes(mesh: AnyMesh) -> AnyMesh:
    """Returns the mesh with every axis of type Auto."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if tuple(mesh.axis_types) == types:
        return mesh
    if isinstance(mesh, Mesh):
        return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
    return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
