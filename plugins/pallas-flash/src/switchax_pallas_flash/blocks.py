"""Sizes of tiles: what a user says, else a heuristic."""

from __future__ import annotations

import dataclasses
import math

from .static import Blocks

__all__ = ["PallasFlashConfig", "blocks_for"]

LANES = 128
_TILE = 2**19  # logits of a chunk at most, by rows and keys


@dataclasses.dataclass(frozen=True)
class PallasFlashConfig:
    """Sizes of the tiles; None leaves one to a heuristic.

    Attributes:
        block_q: Rows of a block in the forward pass, a multiple of 128.
        block_kv: Keys that are computed at once in it, likewise.
        block_q_backward: Rows that are computed at once in the backward pass, likewise.
        block_kv_backward: Keys of a block in it, likewise.

    Raises:
        TypeError: If a size is no int.
        ValueError: If a size is no multiple of 128, from 128 on.
    """

    block_q: int | None = None
    block_kv: int | None = None
    block_q_backward: int | None = None
    block_kv_backward: int | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            size = getattr(self, field.name)
            if size is None:
                continue
            rule = f"PallasFlashConfig: expected {field.name} to be"
            if type(size) is not int:
                raise TypeError(
                    f"{rule} an int or None, got {field.name}={size!r}; for example 512"
                )
            if size < LANES or size % LANES:
                raise ValueError(
                    f"{rule} a multiple of {LANES} from {LANES} on, got "
                    f"{field.name}={size}; for example 512"
                )


def blocks_for(
    q_len: int, kv_len: int, head_dim: int, config: PallasFlashConfig | None
) -> tuple[Blocks, Blocks, int, int]:
    """Returns the tiles of both kernels, and the lengths in whole blocks of both.

    Args:
        q_len: Rows, from 1.
        kv_len: Keys, from 1.
        head_dim: The larger of head_dim and v_head_dim.
        config: What the user says.
    """
    config = config or PallasFlashConfig()
    wide = 2 if head_dim > LANES else 1  # accumulators grow with it
    block_q = config.block_q or _even(q_len, 1024 // wide)
    block_kv = config.block_kv or _even(kv_len, 512)
    chunk_q = config.block_q_backward or _even(q_len, 512)
    chunk_kv = config.block_kv_backward or _even(kv_len, 1024 // wide)
    rows = _multiple(q_len, math.lcm(block_q, chunk_q))
    keys = _multiple(kv_len, math.lcm(block_kv, chunk_kv))
    forward = Blocks(
        block_q,
        block_kv,
        _chunks(keys // block_kv, 8),
        piece=_divisor(block_kv, 128),
        lanes=_divisor(block_q, 256),
    )
    backward = Blocks(
        chunk_kv,
        chunk_q,
        _chunks(rows // chunk_q, 8),
        piece=_divisor(chunk_kv, 256),
        lanes=chunk_q,
    )
    return forward, backward, rows, keys


def _even(length: int, most: int) -> int:
    """Returns the size of equal blocks that waste the least at the end."""
    blocks = -(-length // most)
    return _multiple(-(-length // blocks), LANES)


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def _chunks(number: int, most: int) -> int:
    """Returns the largest divisor of a number up to `most`."""
    return max(d for d in range(1, most + 1) if number % d == 0)


def _divisor(size: int, most: int) -> int:
    """Returns the largest multiple of 128 up to `most` that divides a size."""
    return max(d for d in range(LANES, most + 1, LANES) if size % d == 0)
