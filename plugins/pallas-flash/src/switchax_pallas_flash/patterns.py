"""Maps of a mask pattern, made once on the host: which tiles it shows, and their pairs.

Tiles that are alike are kept once, so that what repeats along a diagonal, as chunks and
windows do, takes a few of them, however long a sequence is.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from switchax import MaskPattern

__all__ = ["Table", "first_rows", "packed_pairs", "sees_of", "table_of"]

_KEPT = 32  # of patterns and sizes
_FEW = 2**20  # pairs that are looked at together


class Table(NamedTuple):
    """The different tiles of a pattern, and where each is.

    Attributes:
        tiles: int8 `[tiles, rows, keys]`, 1 where a row sees a key.
        which: int32 `[blocks of rows, blocks of keys]`: the tile of each.
    """

    tiles: NDArray[np.int8]
    which: NDArray[np.int32]


@functools.lru_cache(maxsize=_KEPT)
def sees_of(
    pattern: MaskPattern, block_q: int, block_kv: int
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Returns whether tiles show any pair, and all of them.

    Args:
        pattern: The pattern.
        block_q: Rows of a tile; the last may have fewer.
        block_kv: Keys of a tile, likewise.

    Returns:
        Both bool `[1, blocks of rows, blocks of keys]`.
    """
    missing = -pattern.kv_len % block_kv
    some, whole = [], []
    for first in range(0, pattern.q_len, block_q):
        rows = pattern.tile(slice(first, first + block_q), slice(None))
        for found, of_keys, fill in (
            (some, rows.any(axis=0), False),
            (whole, rows.all(axis=0), True),
        ):
            of_keys = np.pad(of_keys, (0, missing), constant_values=fill)
            blocks = of_keys.reshape(-1, block_kv)
            found.append(blocks.all(axis=1) if fill else blocks.any(axis=1))
    return np.stack(some)[None], np.stack(whole)[None]


@functools.lru_cache(maxsize=_KEPT)
def table_of(pattern: MaskPattern, rows: int, keys: int) -> Table:
    """Returns the different tiles of a pattern; beyond its ends nothing is seen.

    Args:
        pattern: The pattern.
        rows: Rows of a tile.
        keys: Keys of a tile.
    """
    found: dict[bytes, int] = {}
    tiles, which = [], []
    for first in range(0, pattern.q_len, rows):
        for start in range(0, pattern.kv_len, keys):
            seen = pattern.tile(slice(first, first + rows), slice(start, start + keys))
            whole = np.zeros((rows, keys), np.int8)
            whole[: seen.shape[0], : seen.shape[1]] = seen
            name = np.packbits(whole).tobytes()
            if name not in found:
                found[name] = len(tiles)
                tiles.append(whole)
            which.append(found[name])
    number = -(-pattern.q_len // rows)
    return Table(np.stack(tiles), np.array(which, np.int32).reshape(number, -1))


def first_rows(
    pattern: MaskPattern, first: NDArray[np.int32] | None, end: NDArray[np.int32] | None
) -> NDArray[np.int32]:
    """Returns the first row that sees each key, int32 `[kv_len]`, or q_len.

    Args:
        pattern: The pattern.
        first: int32 `[q_len]`, the first key that each row may see; None is 0.
        end: int32 `[q_len]`, the first key after them; None is kv_len.
    """
    q_len, kv_len = pattern.q_len, pattern.kv_len
    found = np.full(kv_len, q_len, np.int32)
    key, size = np.arange(kv_len), max(_FEW // max(kv_len, 1), 1)
    for row in range(0, q_len, size):
        part = slice(row, min(row + size, q_len))
        seen = pattern.tile(part, slice(None))
        if end is not None:
            seen = seen & (key < end[part, None])
        if first is not None:
            seen = seen & (key >= first[part, None])
        of_part = np.where(seen.any(axis=0), row + seen.argmax(axis=0), q_len)
        found = np.minimum(found, of_part.astype(np.int32))
    return found


def packed_pairs(pattern: MaskPattern) -> NDArray[np.uint8]:
    """Returns all pairs, eight keys in a byte, uint8 `[q_len, ceil(kv_len / 8)]`."""
    size = max(_FEW // max(pattern.kv_len, 1), 1)
    parts = [
        np.packbits(pattern.tile(slice(row, row + size), slice(None)), axis=1)
        for row in range(0, pattern.q_len, size)
    ]
    return np.concatenate(parts)
