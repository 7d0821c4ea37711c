"""The operations "rotary_xla" and "rotary_pallas": names, and what they honour."""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
import numpy as np
from jax import Array

from switchax import (
    BaseOperation,
    Capabilities,
    Cost,
    OperationRegistry,
    Refusal,
    Request,
    Target,
)

from .kind import ROTARY

__all__ = ["PallasRotary", "XlaRotary", "frequencies"]


def frequencies(rotary_dim: int, base: float, scale: float = 1.0) -> np.ndarray:
    """Returns the angle of each pair at position 1, float64 `[rotary_dim // 2]`.

    Known beforehand, so it is exact to the dtype that it is cast to.
    """
    return scale * base ** -(np.arange(0, rotary_dim, 2) / rotary_dim)


@OperationRegistry.register
class XlaRotary(BaseOperation):
    """Plain JAX, which XLA fuses into what is around it."""

    kind = ROTARY
    capabilities = Capabilities(
        platforms={"any"},
        dtypes={"float16", "bfloat16", "float32", "float64"},
        features={"interleaved", "partial", "scale"},
        differentiable={"x"},
        cost=Cost.CHUNKED,
        forward_mode=True,
        second_order=True,
    )

    @classmethod
    def get_impl_name(cls) -> str:
        """Returns "rotary_xla"."""
        return "rotary_xla"

    def forward_native(
        self,
        x: Array,
        positions: Array,
        *,
        base: float,
        interleaved: bool,
        rotary_dim: int,
        scale: float,
    ) -> Array:
        """Rotates in float32, or in float64 for float64; see `rotary`."""
        wide = x.dtype if x.dtype == jnp.float64 else jnp.float32
        steps = jnp.asarray(frequencies(rotary_dim, base, scale), wide)
        angles = positions.astype(wide)[..., None] * steps[None, None]
        cos, sin = jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]
        part, rest = x[..., :rotary_dim].astype(wide), x[..., rotary_dim:]
        axis = -1 if interleaved else -2
        split = (-1, 2) if interleaved else (2, -1)
        pairs = part.reshape(*part.shape[:-1], *split)
        a, b = jnp.take(pairs, 0, axis), jnp.take(pairs, 1, axis)
        turned = jnp.stack([a * cos - b * sin, a * sin + b * cos], axis)
        turned = turned.reshape(part.shape).astype(x.dtype)
        return jnp.concatenate([turned, rest], -1)


@OperationRegistry.register
class PallasRotary(BaseOperation):
    """A Pallas kernel, for half pairing of whole heads; interpreted on a CPU.

    It is experimental, so auto passes it over: an interpreter is slow.
    """

    kind = ROTARY
    capabilities = Capabilities(
        platforms={"cpu"},
        dtypes={"bfloat16", "float32"},
        differentiable={"x"},
        cost=Cost.FUSED,
        opaque=True,
        experimental=True,
    )

    @classmethod
    def get_impl_name(cls) -> str:
        """Returns "rotary_pallas"."""
        return "rotary_pallas"

    @classmethod
    def refusals(cls, request: Request, target: Target) -> Iterable[Refusal]:
        """Refuses sizes that are symbols of `jax.export`."""
        for axis, size in request.sizes.items():
            if not isinstance(size, int):
                hint = "export with numbers, or choose 'rotary_xla'"
                yield Refusal("rule", axis, str(size), "a number", hint)

    def forward_cpu(self, x: Array, positions: Array, *, base: float) -> Array:
        """Rotates block by block; see `rotary`."""
        from .kernel import rotate  # heavy imports live in there

        return rotate(x, positions, frequencies(x.shape[3], base), interpret=True)
