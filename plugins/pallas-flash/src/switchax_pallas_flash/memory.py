"""What a kernel holds on the chip, and whether it fits: asked before it is compiled."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp

from switchax import Refusal, UnsupportedError

from .windows import Window

__all__ = ["CHIPS", "Chip", "bytes_of", "check_fits"]

_MIB = 2**20
_LANES = 128
_MARGIN = 1.1  # for what the compiler holds beside: registers, and steps of a window


class Chip(NamedTuple):
    """What one core of a generation has.

    Attributes:
        vmem: Bytes of vector memory.
        smem: Bytes of scalar memory.
    """

    vmem: int
    smem: int


# As `jax.experimental.pallas.tpu.get_tpu_info` tells them.
CHIPS = {
    "v5e": Chip(128 * _MIB, _MIB),
    "v5p": Chip(64 * _MIB, _MIB),
    "v6e": Chip(128 * _MIB, _MIB),
    "7x": Chip(64 * _MIB, _MIB),
}


def bytes_of(shape: Iterable[int | None], dtype: Any) -> int:
    """Returns what an array takes in vector memory, in whole tiles.

    Args:
        shape: Of the array or block; None is an axis of which a block has one, and
            none.
        dtype: Its type.
    """
    sizes = [size for size in shape if size is not None]
    size = jnp.dtype(dtype).itemsize
    *lead, rows, lanes = [1, 1, *sizes]
    sublanes = 32 // size
    if rows == 1:  # a row alone is not brought to whole tiles
        sublanes = 1
    rows, lanes = (-(-n // of) * of for n, of in ((rows, sublanes), (lanes, _LANES)))
    return math.prod(lead) * rows * lanes * size


def check_fits(
    operation: str,
    kernel: str,
    generation: str,
    windows: Iterable[Window],
    scratch: Iterable[Any],
    scalars: Iterable[Any],
    values: int = 0,
) -> int:
    """Checks that a kernel fits the memories of a chip.

    Args:
        operation: Whose it is, for messages.
        kernel: What is said of it.
        generation: A key of `CHIPS`.
        windows: Of inputs and outputs; each is held twice, one while the other moves.
        scratch: Arrays of vector memory that it has beside them.
        scalars: Arrays that it reads from scalar memory.
        values: Bytes of what it computes at once, for which there are no registers.

    Returns:
        How much vector memory the compiler may use, in bytes.

    Raises:
        UnsupportedError: If it does not fit; the text says what it takes.
    """
    chip = CHIPS[generation]
    need = sum(2 * bytes_of(spec.block_shape, x.dtype) for x, spec in windows)
    need += sum(bytes_of(x.shape, x.dtype) for x in scratch) + values
    listed = sum(x.size * x.dtype.itemsize for x in scalars)
    smaller = "name smaller blocks in PallasFlashConfig; if no size fits, fewer rows: "
    smaller += "the backward pass holds the gradient of query of all of a head's"
    larger = "name larger blocks in PallasFlashConfig, or split the batch"
    for memory, size, has, hint in (
        ("vector memory", need * _MARGIN, chip.vmem, smaller),
        ("scalar memory", listed * _MARGIN, chip.smem, larger),
    ):
        if size > has:
            actual, allowed = f"{size / _MIB:.1f} MiB", f"{has / _MIB:.0f} MiB"
            refusal = Refusal(
                "memory",
                f"{memory} of {kernel}",
                actual,
                f"{allowed} on {generation}",
                hint,
            )
            text = f"{operation}: expected a kernel that fits, got {refusal}"
            raise UnsupportedError(text, {f"{operation}:{operation}": (refusal,)})
    return int(chip.vmem * 0.95)
