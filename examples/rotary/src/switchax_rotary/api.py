"""`switchax_rotary.rotary`: the call that a model makes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import Array
from jax.typing import ArrayLike

from switchax import OperationMetadata, run_named

from .kind import ROTARY

__all__ = ["rotary"]


def rotary(
    x: Array,
    positions: ArrayLike,
    *,
    base: float = 10000.0,
    pairing: str = "half",
    rotary_dim: int | None = None,
    scale: float = 1.0,
    operation: str | Sequence[str] = "auto",
    metadata: OperationMetadata | None = None,
    **unknown: Any,
) -> Any:
    """Rotary position embedding by the operation of a name.

    Pair i of a head at position p, of `rotary_dim // 2` pairs, is turned as a point
    of the plane by the angle `scale * p * base ** (-2 * i / rotary_dim)`. Products of
    a query and a key so turned depend on the distance of their positions alone.

    Args:
        x: Query or key, `[batch, length, heads, head_dim]`, any floating dtype.
        positions: int32 `[length]` or `[batch, length]`; any number, also negative.
        base: At least 1.
        pairing: "half", entries i and `i + rotary_dim // 2` are a pair, or
            "interleaved", entries 2 * i and 2 * i + 1.
        rotary_dim: Entries of a head that are rotated, the others stay; even. None is
            all of them.
        scale: Factor of the positions, over 0 and up to 1.
        operation: "auto", a name, or names tried in order.
        metadata: As in `switchax.attention`.
        **unknown: Raises a TypeError.

    Returns:
        The rotated array, in the shape and dtype of x.

    Raises:
        TypeError: For an unknown keyword, a wrong type or dtype.
        ValueError: For a wrong shape or value.
        UnsupportedError: If the operation refuses the call.

    Example:
        >>> x = jnp.ones((1, 3, 2, 8))
        >>> rotary(x, jnp.arange(3, dtype=jnp.int32), operation="rotary_xla").shape
        (1, 3, 2, 8)

    References:
        Jianlin Su et al., "RoFormer: Enhanced transformer with rotary position
        embedding", 2021, arXiv:2104.09864, section 3.2, which interleaves.
        Shouyuan Chen et al., "Extending context window of large language models via
        positional interpolation", 2023, arXiv:2306.15595, section 2.3, for `scale`.
    """
    arguments = {
        "x": x,
        "positions": positions,
        "base": base,
        "pairing": pairing,
        "rotary_dim": rotary_dim,
        "scale": scale,
        **unknown,
    }
    return run_named(ROTARY, "rotary", operation, arguments, metadata)["output"]
