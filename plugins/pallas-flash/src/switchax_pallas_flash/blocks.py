"""Sizes of tiles: what a user says, else those that a generation is fastest with."""

from __future__ import annotations

import dataclasses
import math

from .sizes import Sizes
from .static import Blocks
from .table import TABLE

__all__ = [
    "GENERATIONS",
    "TABLE",
    "PallasFlashConfig",
    "blocks_for",
    "shape_class",
]

GENERATIONS = ("v5e", "v5p", "v6e", "7x")
LANES = 128
_TILES = 4 * 2**20  # bytes at most of a tile of bias or mask
_ONE_BLOCK = 4  # chunks at most that are copied at once where all rows are one block


@dataclasses.dataclass(frozen=True)
class PallasFlashConfig:
    """Sizes of the tiles; None leaves one to the table of the generation.

    Attributes:
        block_q: Rows of a block in the forward pass, a multiple of 128.
        block_kv: Keys that are copied at once in it, a multiple of the next.
        block_kv_compute: Keys that are computed at once in it, a multiple of 128.
        block_kv_backward: Keys of a block in the backward pass, likewise.
        block_q_backward: Rows that are copied at once in it, a multiple of the next.
        block_q_compute_backward: Rows that are computed at once in it, likewise.

    Raises:
        TypeError: If a size is no int.
        ValueError: If a size is no multiple of 128, from 128 on, or one that is copied
            is no multiple of what is computed.
    """

    block_q: int | None = None
    block_kv: int | None = None
    block_kv_compute: int | None = None
    block_kv_backward: int | None = None
    block_q_backward: int | None = None
    block_q_compute_backward: int | None = None

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
        for copied, computed in (
            ("block_kv", "block_kv_compute"),
            ("block_q_backward", "block_q_compute_backward"),
        ):
            whole, part = getattr(self, copied), getattr(self, computed)
            if whole is not None and part is not None and whole % part:
                raise ValueError(
                    f"PallasFlashConfig: expected {copied} to be a multiple of "
                    f"{computed}, got {copied}={whole} and {computed}={part}; for "
                    f"example {copied}={part * max(1, whole // part)}"
                )


def shape_class(dtype: str, head_dim: int) -> str:
    """Returns what the table tells apart: the dtype, and whether heads are wide."""
    return f"{dtype} {128 if head_dim <= LANES else 256}"


def blocks_for(
    generation: str,
    shape: str,
    q_len: int,
    kv_len: int,
    tile_bytes: int,
    config: PallasFlashConfig | None,
) -> tuple[Blocks, Blocks, int, int]:
    """Returns the tiles of both kernels, and the lengths in whole blocks of both.

    Args:
        generation: Of the table.
        shape: Of the table, see `shape_class`.
        q_len: Rows, from 1.
        kv_len: Keys, from 1.
        tile_bytes: Bytes of bias and mask per row and key.
        config: What the user says.
    """
    config = config or PallasFlashConfig()
    forward, backward = TABLE[generation, shape]
    block_q, chunk_q = _pair(q_len, forward.block, backward.chunk)
    block_kv, chunk_kv = _pair(kv_len, backward.block, forward.chunk)
    block_q = config.block_q or block_q
    block_kv = config.block_kv_backward or block_kv
    if config.block_kv:
        chunk_kv = _divisor(config.block_kv, forward.chunk)
    if config.block_q_backward:
        chunk_q = _divisor(config.block_q_backward, backward.chunk)
    chunk_kv = config.block_kv_compute or chunk_kv
    chunk_q = config.block_q_compute_backward or chunk_q

    def most(of: Sizes, bytes_of_chunk: int) -> int:
        """Returns how many chunks are copied at once, beside their bias or mask."""
        if bytes_of_chunk == 0:
            return of.chunks
        return max(1, min(of.chunks, _TILES // bytes_of_chunk))

    at_once = most(forward, block_q * chunk_kv * tile_bytes)
    if q_len <= block_q:  # keys are copied once, and those that nobody sees are not
        at_once = min(at_once, _ONE_BLOCK)
    chunks_kv, keys = _spans(kv_len, block_kv, chunk_kv, config.block_kv, at_once)
    at_once = most(backward, block_kv * chunk_q * tile_bytes)
    chunks_q, rows = _spans(q_len, block_q, chunk_q, config.block_q_backward, at_once)
    return (
        Blocks(
            block_q,
            chunk_kv,
            chunks_kv,
            piece=_divisor(chunk_kv, forward.piece),
            lanes=_divisor(block_q, forward.lanes),
            unroll=forward.unroll,
        ),
        Blocks(
            block_kv,
            chunk_q,
            chunks_q,
            piece=_divisor(block_kv, backward.piece),
        ),
        rows,
        keys,
    )


def _spans(
    length: int, block: int, chunk: int, copied: int | None, most: int
) -> tuple[int, int]:
    """Returns how many chunks are copied at once, and the length in whole spans.

    Args:
        length: Of a side.
        block: By which the other kernel divides it.
        chunk: By which this one does.
        copied: At once, if the user says so.
        most: Chunks that are, otherwise; or fewer, to half of them, that fill less.
    """
    if copied is not None:
        return copied // chunk, _multiple(length, math.lcm(block, copied))
    unit = math.lcm(block, chunk)
    units, in_unit = -(-length // unit), unit // chunk
    if most < in_unit:
        chunks = max(d for d in range(1, most + 1) if in_unit % d == 0)
        return chunks, units * unit
    largest = min(most // in_unit, units)
    at_once = min(
        range(largest, (largest - 1) // 2, -1), key=lambda size: _multiple(units, size)
    )
    return at_once * in_unit, _multiple(units, at_once) * unit


def _pair(length: int, block: int, chunk: int) -> tuple[int, int]:
    """Returns sizes of blocks and chunks of one side that waste little at its end.

    Both divide the same length in whole ones.
    """
    if length <= chunk:
        return (_multiple(length, LANES),) * 2
    ratio = block // chunk
    blocks = -(-length // block)
    small = _multiple(-(-length // (blocks * ratio)), LANES)
    return small * ratio, small


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


def _divisor(size: int, most: int) -> int:
    """Returns the largest multiple of 128 up to `most` that divides a size."""
    return max(d for d in range(LANES, most + 1, LANES) if size % d == 0)
