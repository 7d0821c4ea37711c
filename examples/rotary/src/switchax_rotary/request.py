"""The request of one rotary call: everything but its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from switchax import ArraySpec, Request

__all__ = ["RotaryRequest"]


@dataclasses.dataclass(frozen=True)
class RotaryRequest(Request):
    """One call of `switchax_rotary.rotary` without its values.

    Attributes:
        batch: Batch size.
        length: Tokens of a sample.
        heads: Heads.
        head_dim: Size of a head.
        rotary_dim: How much of a head is rotated, from its start; even.
        output_dtype: Dtype of the result, that of x as it was passed.
        arrays: Shape and dtype of x and positions, by name, sorted.
        base: Base of the frequencies.
        pairing: "half" or "interleaved".
        scale: Factor of the positions.
    """

    batch: int
    length: int
    heads: int
    head_dim: int
    rotary_dim: int
    output_dtype: str
    arrays: tuple[tuple[str, ArraySpec], ...]
    base: float = 10000.0
    pairing: str = "half"
    scale: float = 1.0

    @property
    def sizes(self) -> Mapping[str, int]:
        """batch, length, heads, head_dim."""
        return {
            "batch": self.batch,
            "length": self.length,
            "heads": self.heads,
            "head_dim": self.head_dim,
        }

    # What a refusal of the feature of that name says was asked for.

    @property
    def interleaved(self) -> bool:
        """Whether neighbours are paired."""
        return self.pairing == "interleaved"

    @property
    def partial(self) -> str:
        """The part of a head that is rotated, in words."""
        return f"{self.rotary_dim} of {self.head_dim}"

    def describe(self) -> str:
        """One line for messages and tables."""
        x, positions = (dict(self.arrays)[name] for name in ("x", "positions"))
        shape = "x".join(map(str, x.shape))
        used = ", ".join(sorted(self.features)) or "none"
        return f"rotary {self.dtype} x {shape} positions {positions}; features: {used}"
