"""What `table` is made of."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Entry", "Sizes"]


class Sizes(NamedTuple):
    """Tiles of one kernel, for lengths that are long enough for them.

    Attributes:
        block: As in `Blocks`, likewise the others.
        chunk: Keys or rows that are computed at once.
        chunks: How many of them are copied at once, at most.
        piece: Keys of a product, at most.
        lanes: Rows that are treated at once, at most; of the forward kernel alone, as
            is the next.
        unroll: Chunks of one turn of its loop.
    """

    block: int
    chunk: int
    chunks: int
    piece: int
    lanes: int = 128
    unroll: int = 1


class Entry(NamedTuple):
    """Tiles of both kernels, for one generation and class of shapes."""

    forward: Sizes
    backward: Sizes
