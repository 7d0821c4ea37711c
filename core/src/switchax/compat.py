"""What JAX has no public name for. Nothing else in switchax imports `jax._src`."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from jax._src import config as _config
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax.sharding import Mesh

__all__ = [
    "Primitive",
    "axes_named_to_vmap",
    "axes_of_vmap",
    "entered_mesh",
    "is_staged",
    "is_tracing",
    "jax_settings",
    "mesh_that_was_set",
]

# The public name, `jax.extend.core.Primitive`, brings Pallas in with it.
Primitive: Any = _core.Primitive


def mesh_that_was_set() -> Mesh | None:
    """Returns the mesh of `jax.set_mesh`, with its devices, or None.

    `jax.sharding.get_mesh` refuses under jit and under grad outside of jit. There an
    array of one device can be constrained only by a mesh that has devices.
    """
    mesh = _mesh.get_concrete_mesh()
    return None if mesh is None or mesh.empty else mesh


def entered_mesh() -> Mesh | None:
    """Returns the mesh of `with mesh:`, or None.

    The public name, `jax.interpreters.pxla.thread_resources`, is deprecated and warns.
    """
    mesh = _mesh.thread_resources.env.physical_mesh
    return None if mesh.empty else mesh


def is_tracing() -> bool:
    """Returns whether some transformation is at work: jit, grad, vmap, shard_map.

    An array that a traced function closes over is concrete, so looking at the array
    does not tell.
    """
    return not _core.trace_state_clean()


def is_staged() -> bool:
    """Returns whether what is computed here becomes a program, as under jit.

    Such a program may run again on other devices; grad or vmap alone run at once.
    """
    return bool(_core.unsafe_am_i_under_a_jit())


def axes_of_vmap() -> frozenset[str]:
    """Returns the mesh axes over which a vmap around has split what it maps.

    By `spmd_axis_name`, or because the mapped axis is split over an explicit one: of
    an array within, no dimension can be split over them too.
    """
    env = _core.get_axis_env()  # type: ignore[no-untyped-call]
    names = {*env.explicit_mesh_axis_names, *env.spmd_axis_names}
    return frozenset(name for name in names if isinstance(name, str))


def axes_named_to_vmap() -> frozenset[str]:
    """Returns those of `axes_of_vmap` that are named, while nothing mapped has them."""
    env = _core.get_axis_env()  # type: ignore[no-untyped-call]
    return axes_of_vmap() - frozenset(env.explicit_mesh_axis_names)


def jax_settings() -> Hashable:
    """Returns all of JAX's settings that a trace may depend on, as a key.

    Publicly each has a name of its own, and an operation may ask any of them.
    """
    key: Hashable = _config.trace_context()
    return key
