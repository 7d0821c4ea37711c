"""Compiles for a TPU that is not there, and reads its schedule: for both `tpu_*.py`."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from switchax.inspection.chips import GENERATIONS, environment

if TYPE_CHECKING:
    from switchax.inspection.schedule import KernelSchedule

LENGTH = 8192  # of what is compiled
LENGTHS = (LENGTH, 32768)  # of what is counted


def visited(length: int, rows: int, keys: int) -> int:
    """Tiles of rows x keys of which a causal mask shows anything."""
    return sum(
        -(-min((n + 1) * rows, length) // keys) for n in range(math.ceil(length / rows))
    )


class Compiler:
    """Compiles for one chip of a generation; in a process of `run_worker`."""

    def __init__(self, generation: str) -> None:
        """Asks libtpu for the topology, which takes seconds."""
        import jax
        import numpy as np
        from jax.experimental import topologies

        topology = topologies.get_topology_desc(
            platform="tpu", topology_name=GENERATIONS[generation].topology
        )
        self.mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("x",))
        self.folder = Path(os.environ["SWITCHAX_DUMPS"])

    def schedules(
        self,
        function: Callable[..., Any],
        arrays: Sequence[tuple[tuple[int, ...], str]],
    ) -> list[KernelSchedule]:
        """Returns the schedules of a function's kernels.

        Args:
            function: Of arrays.
            arrays: Their shapes and dtypes.
        """
        import jax

        from switchax.inspection.schedule import read_schedules

        here = jax.sharding.NamedSharding(self.mesh, jax.sharding.PartitionSpec())
        for written in self.folder.iterdir():
            written.unlink()
        with jax.set_mesh(self.mesh):
            jax.jit(function).lower(
                *(jax.ShapeDtypeStruct(*array, sharding=here) for array in arrays)
            ).compile()
        return read_schedules(self.folder)


def run_worker(script: str, generation: str, *arguments: str) -> str:
    """Runs a script for a generation, in a process of its own as libtpu's settings ask.

    Returns:
        What it printed, errors aside.
    """
    with tempfile.TemporaryDirectory(prefix="switchax-bench-") as dumps:
        settings = environment(generation, dumps)
        done = subprocess.run(
            [sys.executable, script, *arguments, "--worker", generation],
            env={**os.environ, **settings, "SWITCHAX_DUMPS": dumps},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    return done.stdout
