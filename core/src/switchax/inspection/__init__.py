"""What a TPU's compiler makes of an operation, with no TPU at hand.

The program of a call is compiled for a generation by libtpu, which writes the schedule
of each kernel: every bundle of instructions, and which units it occupies. Schedules are
deterministic; they leave out what a chip waits for, such as copies that are late.
"""

from .chips import GENERATIONS
from .inspecting import inspect_operation
from .outcome import Inspection, NotCompiledError, Pass
from .schedule import Block, KernelSchedule

__all__ = [
    "GENERATIONS",
    "Block",
    "Inspection",
    "KernelSchedule",
    "NotCompiledError",
    "Pass",
    "inspect_operation",
]
