"""What the process of an inspection does: `python -m switchax.inspection.child`.

It is told a folder, of a question and for the answer, both pickled, and the folder that
libtpu writes to.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from switchax.errors import UnsupportedError, described, house_message
from switchax.metadata import OperationMetadata
from switchax.registry import create_from, find_entry
from switchax.target import Target

from .chips import GENERATIONS
from .outcome import Inspection, NotCompiledError, Pass
from .schedule import read_schedules
from .traffic import traffic_of

__all__: list[str] = []

Arrays = dict[str, Any]
_LONGEST = 600  # of what the compiler says


Asked = tuple[str, Mapping[str, Any], Target, OperationMetadata | None, tuple[str, ...]]


def _inspection(asked: Asked, folder: Path) -> Inspection:
    name, arguments, there, metadata, passes = asked
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=GENERATIONS[there.generation].topology
    )
    mesh = Mesh(np.array(topology.devices[:1]), ("dp",))
    entry = find_entry(name, there)
    operation = create_from(entry, metadata)
    request = operation.kind.request(**arguments)
    here = NamedSharding(mesh, PartitionSpec())  # type: ignore[no-untyped-call]
    arrays = {
        n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)  # type: ignore[no-untyped-call]
        for n, x in arguments.items()
        if hasattr(x, "dtype")
    }
    static = {n: x for n, x in arguments.items() if n not in arrays}

    def forward(arrays: Arrays) -> Any:
        outputs = operation(**arrays, **static)
        return [x for x in jax.tree.leaves(outputs) if x is not None]

    programs = {
        "forward": forward,
        "gradients": _gradients(forward, entry.operation.capabilities),
    }
    found = tuple(_pass(part, programs[part], arrays, mesh, folder) for part in passes)
    with jax.set_mesh(mesh):
        vmem = pltpu.get_tpu_info().vmem_capacity_bytes
    versions = {name: version(name) for name in ("jax", "libtpu")}
    return Inspection(entry.name, str(there), str(request), versions, vmem, found)


def _gradients(forward: Callable[[Arrays], Any], capabilities: Any) -> Any:
    """Returns the outputs and the gradients of what is declared to have one."""

    def both(arrays: Arrays) -> Any:
        names = [n for n in arrays if n in capabilities.differentiable]
        rest = {n: x for n, x in arrays.items() if n not in names}

        def of(floats: Arrays) -> Any:
            return forward({**rest, **floats})

        outputs, pull = jax.vjp(of, {n: arrays[n] for n in names})
        # Not a constant, which the compiler could fold.
        return outputs, pull([jnp.sin(x) for x in outputs])

    return both


def _pass(
    name: str,
    program: Callable[[Arrays], Any],
    arrays: Arrays,
    mesh: Mesh,
    folder: Path,
) -> Pass:
    before = frozenset(folder.iterdir())  # of another pass
    started = time.monotonic()
    try:
        with jax.set_mesh(mesh):  # nothing can run there
            traced = jax.jit(program).trace(arrays)
            compiled = traced.lower().compile()
    except UnsupportedError:
        raise
    except Exception as error:
        got, todo = _said(error), "smaller blocks, or what it names"
        text = house_message("inspect", f"a {name} pass that compiles", got, todo)
        raise NotCompiledError(text) from error
    seconds = time.monotonic() - started
    kernels = tuple(read_schedules(folder, before))
    sizes = compiled.memory_analysis()
    return Pass(
        name,
        kernels,
        traffic_of(traced.jaxpr),
        sizes.argument_size_in_bytes,
        sizes.output_size_in_bytes,
        sizes.temp_size_in_bytes,
        seconds,
    )


def _said(error: BaseException) -> str:
    """Returns the first paragraph of what the compiler says."""
    text = described(error).partition("\n\n")[0]
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ..."


def _main(between: Path, folder: Path) -> None:
    try:
        asked: Asked = pickle.loads((between / "question").read_bytes())
        answer = "found", _inspection(asked, folder)
        written = pickle.dumps(answer)
    except Exception as error:
        written = pickle.dumps(("raised", _portable(error)))
    (between / "answer").write_bytes(written)


def _portable(error: Exception) -> Exception:
    """Returns an error that another process can read."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return NotCompiledError(described(error))
    return error


if __name__ == "__main__":
    _main(Path(sys.argv[1]), Path(sys.argv[2]))
