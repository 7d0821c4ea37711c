"""The oracle: pairs as complex numbers, in float64 numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["rotary_oracle"]


def rotary_oracle(
    x: Any,
    positions: Any,
    *,
    base: float = 10000.0,
    pairing: str = "half",
    rotary_dim: int | None = None,
    scale: float = 1.0,
) -> NDArray[np.float64]:
    """Computes what `switchax_rotary.rotary` means; see there for the arguments.

    Returns:
        float64 `[batch, length, heads, head_dim]`.
    """
    out: NDArray[np.float64] = np.array(x, "float64")
    end = out.shape[3] if rotary_dim is None else rotary_dim
    real, imaginary = {
        "half": (slice(0, end // 2), slice(end // 2, end)),
        "interleaved": (slice(0, end, 2), slice(1, end, 2)),
    }[pairing]
    exponents = np.linspace(0, 1, end // 2, endpoint=False)
    turns = np.asarray(positions, "float64")[..., None] * scale / base**exponents
    # positions [length] are those of every sample
    turns = np.broadcast_to(turns, (*out.shape[:2], end // 2))[:, :, None]
    turned = (out[..., real] + 1j * out[..., imaginary]) * np.exp(1j * turns)
    out[..., real], out[..., imaginary] = turned.real, turned.imag
    return out
