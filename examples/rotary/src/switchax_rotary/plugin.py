"""What the entry point loads: adds the kind, and registers its operations."""

from __future__ import annotations

from switchax import OperationKind, hookimpl

from .kind import ROTARY
from .operation import PallasRotary, XlaRotary

__all__ = ["PallasRotary", "XlaRotary", "switchax_kinds"]

SWITCHAX_CONTRACT = 1


@hookimpl
def switchax_kinds() -> list[OperationKind]:
    """Returns the kind "rotary"."""
    return [ROTARY]
