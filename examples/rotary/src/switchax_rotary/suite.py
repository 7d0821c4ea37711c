"""What conformance asks of rotary operations: the rules RO1 to RO10."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from switchax.testing.arrays import ArrayCall, ArraySuite

from .kind import ROTARY

__all__ = ["RotaryCall", "RotarySuite"]


@dataclasses.dataclass(frozen=True)
class RotaryCall(ArrayCall):
    """One rotary call without its values.

    Attributes:
        dtype: Of x.
        seed: Of the values.
        batch: Batch size.
        length: Tokens.
        heads: Heads.
        head_dim: Size of a head.
        places: Of the tokens: "first" (from 0 on), "later" (from 37 on), "negative",
            "far" (from 4000 on), or "mixed", in no order and others in each sample.
        base: As in the call.
        pairing: As in the call.
        rotary_dim: As in the call.
        scale: As in the call.
    """

    kind = ROTARY
    smaller: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "scale": (1.0,),
        "rotary_dim": (None,),
        "pairing": ("half",),
        "places": ("first", "later"),
        "base": (10000.0,),
        "batch": (1,),
        "heads": (1,),
        "length": (1, 2, 3),
        "head_dim": (2, 4, 8),
    }

    dtype: str = "float32"
    seed: int = 0
    batch: int = 2
    length: int = 7
    heads: int = 3
    head_dim: int = 8
    places: str = "first"
    base: float = 10000.0
    pairing: str = "half"
    rotary_dim: int | None = None
    scale: float = 1.0

    def arrays(self) -> dict[str, Any]:
        """Draws x and positions."""
        rng = np.random.default_rng(self.seed)
        shape = (self.batch, self.length, self.heads, self.head_dim)
        start = {"later": 37, "negative": -50, "far": 4000}.get(self.places, 0)
        positions = start + np.arange(self.length)
        if self.places == "mixed":
            positions = rng.integers(-20, 300, size=shape[:2])
        x = rng.normal(size=shape).astype(self.dtype)
        return {"x": x, "positions": positions.astype("int32")}

    def options(self) -> dict[str, Any]:
        """The other arguments."""
        names = ("base", "pairing", "rotary_dim", "scale")
        return {name: getattr(self, name) for name in names}

    @property
    def growth(self) -> float:
        """The largest angle, as the first pair has it."""
        positions = self.arrays()["positions"]
        return self.scale * float(abs(positions).max(initial=0))


class RotarySuite(ArraySuite):
    """The contract of rotary position embedding."""

    declaration = "RO8"
    rules: ClassVar[Mapping[str, str]] = {
        "RO1": "pair i of a head is turned by position * base ** (-2 * i / rotary_dim)",
        "RO2": "positions may start anywhere, be negative, and differ by sample",
        "RO3": "a pair is two entries half of rotary_dim apart, or two neighbours",
        "RO4": "what is past rotary_dim stays, and does not change the frequencies",
        "RO5": "scale is a factor of the positions",
        "RO6": "angles and products in float32 at least, rounded once to the dtype",
        "RO7": "the gradient of x is its cotangent turned back; no other is made up",
        "RO8": "what is not declared is refused, before a kernel starts",
        "RO9": "vmap, vmap of grad, jvp and no jit mean one call for each",
        "RO10": "the output is of the dtype of x",
    }
    roles: ClassVar[Mapping[str, str]] = {
        "dtype": "RO10",
        "precision": "RO6",
        "gradient": "RO7",
        "refusal": "RO8",
        "transforms": "RO9",
    }

    def calls(self, level: str) -> Iterator[tuple[str, RotaryCall]]:
        """Yields one thing more at a time."""
        yield "RO1", RotaryCall()
        yield "RO1", RotaryCall(length=1, heads=1, head_dim=2)
        for length in (65,) if level == "quick" else (0, 1, 2, 63, 64, 65, 130):
            yield "RO1", RotaryCall(length=length, batch=1)
        yield "RO1", RotaryCall(base=500000.0)  # tables are not kept by shape
        for places in ("later", "negative", "mixed"):
            yield "RO2", RotaryCall(places=places)
        yield "RO2", RotaryCall(length=1, places="mixed")  # a step of decoding
        yield "RO2", RotaryCall(batch=5, places="mixed")
        # Not from 0 on, where a single token would not be turned at all.
        mixed = functools.partial(RotaryCall, places="mixed")
        yield "RO1", mixed(heads=9, length=2)
        yield "RO3", mixed(pairing="interleaved")
        yield "RO3", mixed(pairing="interleaved", base=500000.0)
        yield "RO4", mixed(rotary_dim=4)
        yield "RO4", mixed(rotary_dim=6, head_dim=7, base=500.0)
        yield "RO4", mixed(rotary_dim=4, pairing="interleaved")
        yield "RO5", mixed(scale=0.3)  # exact in no dtype
        yield "RO5", mixed(scale=0.3, base=500.0)
        yield "RO5", mixed(scale=0.25, rotary_dim=4)
        yield "RO5", mixed(scale=0.3, pairing="interleaved")
        yield "RO6", RotaryCall(places="far")
        yield "RO6", RotaryCall(places="mixed", head_dim=64, base=500000.0)
