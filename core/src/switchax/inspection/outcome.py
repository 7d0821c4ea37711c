"""What an inspection found: data to print, to compare and to choose block sizes by."""

from __future__ import annotations

import dataclasses
from typing import Any

from .schedule import KernelSchedule
from .traffic import Traffic

__all__ = ["Inspection", "NotCompiledError", "Pass"]


class NotCompiledError(RuntimeError):
    """A program that the TPU's compiler does not compile."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """One program: the forward pass, or the forward pass with all gradients.

    Attributes:
        name: "forward" or "gradients".
        kernels: In the order in which they were compiled.
        traffic: Bytes that their windows move.
        arguments: Bytes of its arguments in HBM, as the next two.
        outputs: Of its outputs.
        temporaries: Of what it holds beside them, at most at once.
        seconds: How long it took to compile.
    """

    name: str
    kernels: tuple[KernelSchedule, ...]
    traffic: Traffic
    arguments: int
    outputs: int
    temporaries: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON data."""
        return {
            "kernels": [kernel.to_dict() for kernel in self.kernels],
            "hbm_bytes": self.traffic.bytes,
            "hbm_bytes_exact": self.traffic.exact,
            "argument_bytes": self.arguments,
            "output_bytes": self.outputs,
            "temporary_bytes": self.temporaries,
            "compile_seconds": round(self.seconds, 2),
        }


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What the compiler makes of a call.

    Attributes:
        operation: Its name.
        target: The generation, as `switchax.Target` writes it.
        request: The call, as `explain` writes it.
        versions: Of jax and libtpu.
        vmem: Bytes of vector memory that the chip has.
        passes: The programs that were compiled.
    """

    operation: str
    target: str
    request: str
    versions: dict[str, str]
    vmem: int
    passes: tuple[Pass, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON data."""
        return {
            "operation": self.operation,
            "target": self.target,
            "request": self.request,
            "versions": self.versions,
            "vmem_available_bytes": self.vmem,
            "passes": {part.name: part.to_dict() for part in self.passes},
        }
