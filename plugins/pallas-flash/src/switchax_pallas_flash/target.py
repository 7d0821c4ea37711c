"""Which chips kernels are made for, what is refused on them, and how they are asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from switchax import (
    BaseOperation,
    Refusal,
    Request,
    Target,
    UnsupportedError,
    current_target,
)

from .blocks import GENERATIONS

__all__ = ["attend_for", "refusals_on"]


def attend_for(
    operation: BaseOperation,
    query: Array,
    key: Array,
    value: Array,
    *,
    interpret: bool,
    **given: Any,
) -> tuple[Array, Array]:
    """Computes attention for an operation, with its config and for the chip that is.

    Args:
        operation: Whose forward method asks.
        query: As in `attend`, likewise the next two.
        key: Of all kv heads.
        value: Likewise.
        interpret: Whether kernels are interpreted, on a CPU.
        **given: The others of `attend`.

    Raises:
        UnsupportedError: For a chip that is not known, within a `jax.shard_map` that
            follows how values vary, or if a kernel does not fit the chip.
    """
    from .attend import attend  # heavy imports live in there

    name, *_ = operation.names()
    _check_untyped(name)
    return attend(
        query,
        key,
        value,
        config=operation.config,
        operation=name,
        generation=_compiled_for(name, interpret),
        interpret=interpret,
        **given,
    )


def _compiled_for(operation: str, interpret: bool) -> str:
    """Returns the generation whose memories and sizes count.

    Args:
        operation: Who asks, for messages.
        interpret: Whether kernels are interpreted; then any will do.

    Raises:
        UnsupportedError: Where only the platform is known.
    """
    if interpret:
        return "v6e"
    here = current_target()
    if here.platform == "tpu" and here.generation in GENERATIONS:
        return here.generation
    refusal = Refusal(
        "platform",
        "generation",
        str(here),
        ", ".join(GENERATIONS),
        "trace within jax.sharding.use_abstract_mesh of a mesh that names the chip",
    )
    text = f"{operation}: expected a generation to compile for, got {refusal}"
    raise UnsupportedError(text, {f"{operation}:{operation}": (refusal,)})


def _check_untyped(operation: str) -> None:
    """Checks that nobody follows how values vary over a mesh: Pallas does not say it.

    Args:
        operation: Who asks, for messages.

    Raises:
        UnsupportedError: Within a `jax.shard_map` that does.
    """
    axes = tuple(jax.sharding.get_abstract_mesh().manual_axes)
    if not axes:
        return
    # Where nobody follows it, what is made to vary is not said to.
    made = jax.lax.pcast(jnp.zeros(()), axes, to="varying")
    if not jax.typeof(made).manual_axis_type.varying:
        return
    refusal = Refusal(
        "rule",
        "check_vma",
        f"a shard_map over {', '.join(axes)} that follows how values vary",
        "one that does not",
        "pass check_vma=False to jax.shard_map, which Pallas cannot be traced with",
    )
    text = f"{operation}: expected check_vma=False, got {refusal}"
    raise UnsupportedError(text, {f"{operation}:{operation}": (refusal,)})


def refusals_on(request: Request, target: Target) -> Iterator[Refusal]:
    """Yields what is refused that no capability can state."""
    for axis, size in request.sizes.items():
        if not isinstance(size, int):  # a symbol of jax.export
            hint = "blocks are counted when a call is traced: export with numbers"
            yield Refusal("rule", axis, str(size), "a number", hint)
    known = GENERATIONS
    if target.platform == "tpu" and target.generation not in ("", *known):
        hint = "its memories are not known: choose another operation"
        yield Refusal(
            "platform", "generation", target.generation, ", ".join(known), hint
        )
