"""How attention is split over a mesh: by batch and heads, which need no collective.

For what the partitioner sees, `specs` wishes by the rules of `OperationMetadata`. For
an opaque kernel, `shard` splits batch and heads as those rules split query's, and
everything else follows: bias, mask and sinks follow query's heads, whatever the rules
say of them, since a kernel needs what belongs to its heads and no more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from switchax.capabilities import Capabilities
from switchax.errors import Refusal
from switchax.kind import Adaptation, Arrays
from switchax.placement import Placement, Shards, over_whole_mesh
from switchax.request import ArraySpec
from switchax.sharding import as_spec, correct_spec, flat_names

from .features import with_features
from .request import AttentionRequest

if TYPE_CHECKING:
    from switchax.metadata import OperationMetadata

__all__ = [
    "AttentionShards",
    "inside_shard",
    "outputs_like_query",
    "shard",
    "specs",
    "spread",
]

Names = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class AttentionShards(Shards):
    """How an opaque attention kernel is split.

    Attributes:
        kv_repeat: How often each kv head is repeated before it is split.
    """

    kv_repeat: int = 1


def specs(
    request: AttentionRequest, metadata: OperationMetadata
) -> dict[str, PartitionSpec]:
    """Returns the wish for each array and output, by the metadata's rules.

    Args:
        request: The request as the user made it.
        metadata: Its `get_shardings` for the request's mode and layout.
    """
    sinks = request.array("softmax_aux")
    aux = None if sinks is None else np.broadcast_to(0.0, sinks.shape)
    rules = metadata.get_shardings(request.mode, request.layout, softmax_aux=aux)
    by_letter = dict(zip(request.layout, rules.output, strict=True))
    wishes: dict[str, Any] = rules._asdict()
    for name in ("q_lengths", "kv_lengths", "q_offset"):
        wishes[name] = (by_letter.get("b"),)
    found = {n: as_spec(entries) for n, entries in _outputs(request, by_letter).items()}
    for name, array in request.arrays:
        entries = tuple(wishes.get(name) or ())
        if name in ("bias", "mask") and entries[1] is None:
            # They follow query's heads, else a layout that fits would be undone.
            taken = set(flat_names(entries))
            # In their order, which says what part of the heads a device holds.
            heads = (name for name in flat_names(by_letter["h"]) if name not in taken)
            entries = (entries[0], tuple(heads), *entries[2:])
        # The last dimensions of what is broadcastable, as numpy aligns them.
        found[name] = as_spec(entries[len(entries) - len(array.shape) :])
    return found


def outputs_like_query(
    request: AttentionRequest, placement: Placement
) -> dict[str, PartitionSpec]:
    """Returns how each output that was asked for lies, as query did when passed.

    Args:
        request: The request as the user made it.
        placement: On a mesh with explicit axes.
    """
    spec = dict(placement.passed)["query"]
    by_letter = dict(zip(request.layout, (*spec, *[None] * 4), strict=False))
    if request.v_head_dim != request.head_dim:
        by_letter["d"] = None
    return {
        name: as_spec(entries) for name, entries in _outputs(request, by_letter).items()
    }


def shard(
    request: AttentionRequest, capabilities: Capabilities, placement: Placement
) -> AttentionShards | None:
    """Splits a call over batch and heads.

    Args:
        request: The request as the user made it.
        capabilities: `shardable` says over which of the two the kernel may be split.
        placement: The mesh, and the wishes that `specs` returned.

    Returns:
        The split; its refusals name the mesh axis that stands in the way. None where
        no row has a key, which is answered without the kernel.
    """
    if request.is_empty:
        return None
    mesh = placement.mesh
    shape = [_length(request, letter) for letter in request.layout]
    rules = placement.partition_axis
    corrected = correct_spec(placement.spec("query"), shape, mesh, partition_axis=rules)
    entries = [*corrected, *[None] * len(shape)]
    split = {
        letter: tuple(flat_names(entry)) if length > 1 else ()
        for letter, length, entry in zip(request.layout, shape, entries, strict=False)
    }
    batch = _larger(placement, split.get("b", ()))
    heads = _larger(placement, split["h"])
    parts = {
        axis: math.prod(mesh.shape[n] for n in names)
        for axis, names in (("batch", batch), ("heads", heads))
    }
    refusals = [
        *_refuse_other_dimensions(request, placement),
        *_refuse_undeclared(capabilities, placement, batch, heads),
    ]
    repeat = 1
    if request.kv_heads % parts["heads"]:
        repeat = parts["heads"] // request.kv_heads
        if parts["heads"] % request.kv_heads:
            hint = "choose a mesh whose head axes and kv_heads divide one another"
            allowed = f"a multiple or divisor of {_sizes(placement, heads)}"
            refusals.append(
                Refusal("sharding", "kv_heads", str(request.kv_heads), allowed, hint)
            )
    if refusals:
        return AttentionShards(request, refusals=tuple(refusals))
    inputs = _inputs(request, batch, heads)
    whole = _inputs(request, batch, ())
    placed = {n: whole[n] if n in ("key", "value") else inputs[n] for n in inputs}
    return AttentionShards(
        _local(request, parts, repeat),
        over_whole_mesh(mesh, inputs if repeat == 1 else placed),
        over_whole_mesh(mesh, inputs),
        over_whole_mesh(mesh, _outputs(request, {"b": batch, "h": heads})),
        (*batch, *heads),
        _steps(placement, batch, heads, repeat),
        kv_repeat=repeat,
    )


def _length(request: AttentionRequest, letter: str) -> int:
    sizes = {"b": "batch", "t": "q_len", "h": "heads", "d": "head_dim"}
    return request.sizes[sizes[letter]]


def _larger(placement: Placement, names: Names) -> Names:
    return tuple(name for name in names if placement.mesh.shape[name] > 1)


def _sizes(placement: Placement, names: Names) -> str:
    return " x ".join(f"{name}={placement.mesh.shape[name]}" for name in names)


def _refuse_other_dimensions(
    request: AttentionRequest, placement: Placement
) -> list[Refusal]:
    """Refuses axes that would split a length or head_dim: each device needs it all."""
    refusals = []
    hints = {
        "t": "use an operation that shards sequences or is not opaque, such as "
        "vanilla, or a mesh or PartitionAxis without a sequence axis",
        "d": "keep head_dim whole: leave its axis out of PartitionAxis",
    }
    fields = {
        "query": {"t": ("q_len", request.q_len), "d": ("head_dim", request.head_dim)},
        "key": {"t": ("kv_len", request.kv_len), "d": ("head_dim", request.head_dim)},
        "value": {
            "t": ("kv_len", request.kv_len),
            "d": ("v_head_dim", request.v_head_dim),
        },
    }
    for name, sizes in fields.items():
        for letter, (size, length) in sizes.items():
            dim = request.layout.index(letter)
            axes = placement.splitting_dimension(name, dim)
            if axes and length > 1:
                got = f"split over {_sizes(placement, axes)}"
                refusal = Refusal("sharding", size, got, "whole", hints[letter])
                if refusal not in refusals:
                    refusals.append(refusal)
    for name, dim, size in _passed_lengths(request):
        names = [flat_names(e) for e in dict(placement.passed).get(name, ())[dim:]]
        axes = _larger(placement, tuple(next(iter(names), ())))
        if axes:
            got = f"split over {_sizes(placement, axes)} in {name}"
            refusals.append(Refusal("sharding", size, got, "whole", hints["t"]))
    return refusals


def _passed_lengths(request: AttentionRequest) -> Iterator[tuple[str, int, str]]:
    """Yields array, dimension and size, for lengths of other arrays than the three."""
    for name, array in request.arrays:
        rank = len(array.shape)
        if name in ("bias", "mask"):
            lengths = {rank - 2: "q_len", rank - 1: "kv_len"}
            yield from ((name, dim, size) for dim, size in lengths.items() if dim >= 0)
        elif name.endswith("segment_ids"):
            size = "q_len" if name.startswith("q") else "kv_len"
            yield name, rank - 1, size


def _refuse_undeclared(
    capabilities: Capabilities, placement: Placement, batch: Names, heads: Names
) -> list[Refusal]:
    return [
        Refusal(
            "sharding",
            axis,
            f"split over {_sizes(placement, names)}",
            "whole",
            f"{axis!r} is not among its shardable axes: choose another operation",
        )
        for axis, names in (("batch", batch), ("heads", heads))
        if names and axis not in capabilities.shardable
    ]


def _inputs(
    request: AttentionRequest, batch: Names, heads: Names
) -> dict[str, tuple[Names, ...]]:
    by_letter = {"b": batch, "h": heads}
    first = () if request.layout == "thd" else (batch,)
    ids = (*first, ())
    found: dict[str, tuple[Names, ...]] = {}
    for name, array in request.arrays:
        rank = len(array.shape)
        if name in ("query", "key", "value"):
            found[name] = tuple(by_letter.get(letter, ()) for letter in request.layout)
        elif name in ("bias", "mask"):
            aligned = (batch, heads, (), ())[4 - rank :]
            found[name] = tuple(
                names if size > 1 else ()
                for names, size in zip(aligned, array.shape, strict=True)
            )
        elif name == "softmax_aux":
            found[name] = (heads, ())[:rank]
        elif name.endswith("segment_ids"):
            found[name] = ids
        elif name == "dropout_key":
            found[name] = ((),) * rank
        else:  # lengths and offsets of each sample
            found[name] = (batch,)[:rank]
    return found


def _outputs(
    request: AttentionRequest, by_letter: Mapping[str, Any]
) -> dict[str, tuple[Any, ...]]:
    """Entries for each output that was asked for, of those for a layout's letters."""
    first = () if request.layout == "thd" else (by_letter.get("b"),)
    rows = (*first, by_letter.get("h"), by_letter.get("t"))
    found = {"attention_outputs": tuple(map(by_letter.get, request.layout))}
    if request.return_lse:
        found["lse"] = rows
    if request.return_weights:
        found["attention_weights"] = (*rows, None)
    return found


def _local(
    request: AttentionRequest, parts: Mapping[str, int], repeat: int
) -> AttentionRequest:
    """Returns the call that each device makes."""
    batch, heads = parts["batch"], parts["heads"]
    kv_heads = request.kv_heads * repeat // heads
    shapes = {"b": request.batch // batch, "h": request.heads // heads}
    arrays = []
    for name, array in request.arrays:
        shape = array.shape
        if name in ("query", "key", "value"):
            here = {**shapes, "h": shapes["h"] if name == "query" else kv_heads}
            pairs = zip(request.layout, shape, strict=True)
            shape = tuple(here.get(letter, size) for letter, size in pairs)
        elif name in ("bias", "mask"):
            ways = (batch, heads, 1, 1)[4 - len(shape) :]
            cut = zip(shape, ways, strict=True)
            shape = tuple(size // way if size > 1 else size for size, way in cut)
        elif name == "softmax_aux":
            shape = (shape[0] // heads, *shape[1:])
        elif name != "dropout_key" and shape and request.layout != "thd":
            shape = (shape[0] // batch, *shape[1:])
        arrays.append((name, ArraySpec(shape, array.dtype)))
    return with_features(
        dataclasses.replace(
            request,
            batch=shapes["b"],
            heads=shapes["h"],
            kv_heads=kv_heads,
            arrays=tuple(arrays),
        )
    )


def _steps(
    placement: Placement,
    batch: Names,
    heads: Names,
    repeat: int,
) -> tuple[Adaptation, ...]:
    split = [
        f"{axis} over {_sizes(placement, names)}"
        for axis, names in (("batch", batch), ("heads", heads))
        if names
    ]
    idle = [
        name
        for name, size in placement.mesh.shape.items()
        if size > 1 and name not in (*batch, *heads)
    ]
    cost = "free, no collective"
    if idle:
        cost = f"each device along {', '.join(idle)} computes the same"
    steps = [Adaptation("shard", ", ".join(split) or "nothing is split", cost)]
    if repeat > 1:
        cost = f"key and value are written {repeat} times as large"
        steps.append(Adaptation("repeat_kv", f"each kv head {repeat} times", cost))
    return tuple(steps)


def spread(arrays: Arrays, shards: AttentionShards, layout: str) -> Arrays:
    """Repeats kv heads, where fewer than devices, before they are split."""
    if shards.kv_repeat == 1:
        return arrays
    repeated = {
        name: jnp.repeat(arrays[name], shards.kv_repeat, layout.index("h"))
        for name in ("key", "value")
    }
    return {**arrays, **repeated}


def inside_shard(arrays: Arrays, shards: AttentionShards) -> Arrays:
    """Gives each device that holds other rows or heads dropout of its own."""
    if "dropout_key" not in arrays or not shards.axes:
        return arrays
    index = jax.lax.axis_index(shards.axes)
    return {**arrays, "dropout_key": jax.random.fold_in(arrays["dropout_key"], index)}
