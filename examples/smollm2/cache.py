"""Key and value cache (this part will move to the plugin `switchax-flax`)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """What one layer remembers.

    Attributes:
        key: `[batch, slots, kv_heads, head_dim]`.
        value: As `key`.
    """

    key: jax.Array
    value: jax.Array

    def write(
        self, key: jax.Array, value: jax.Array, offset: int | jax.Array
    ) -> LayerCache:
        """Returns a cache with `[batch, q_len, ...]` written from slot `offset` on."""
        return LayerCache(
            key=lax.dynamic_update_slice_in_dim(self.key, key, offset, axis=1),
            value=lax.dynamic_update_slice_in_dim(self.value, value, offset, axis=1),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """All layers' caches. Every text of a batch has the same length.

    Attributes:
        layers: One `LayerCache` each. Separate buffers, not one stacked array, so that
            a donated cache is updated in place layer by layer.
        length: int32 scalar, how many slots are filled.
    """

    layers: tuple[LayerCache, ...]
    length: jax.Array

    @classmethod
    def empty(
        cls, layers: int, shape: tuple[int, int, int, int], dtype: jax.typing.DTypeLike
    ) -> Cache:
        """Returns an empty cache; `shape` is `[batch, slots, kv_heads, head_dim]`."""
        return cls(
            layers=tuple(
                LayerCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))
                for _ in range(layers)
            ),
            length=jnp.zeros((), jnp.int32),
        )
