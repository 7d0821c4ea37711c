"""Which sizes of tiles pallas_flash is fastest with, by the TPU compiler's schedule.

    tox -e bench-tpu-sizes -- --kept FILE [--generation v6e ...] [--write]

Compiles both kernels at each of the sizes below, for each generation and class of
shapes, with no TPU: bundles of the hot block times the tiles that a causal mask visits,
as in `tpu_static.py`. The least of them over 8192 and 32768 keys (in the geometric
mean) is an entry of the table; `--write` writes it where the plugin reads it. What does
not fit the memories of a generation is left out. It takes an hour: what is in the file
of an earlier run is not compiled again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tpu_static import LENGTHS, visited

from switchax.inspection.chips import GENERATIONS, environment

LENGTH = 8192
CLASSES = ("bfloat16 128", "bfloat16 256", "float32 128", "float32 256")
# As `Sizes` has them: block, chunk, chunks, piece, lanes, unroll.
SWEEPS = {
    ("bfloat16", "forward"): (
        (512, 512, 4, 128, 256, 1),
        (512, 512, 4, 512, 256, 2),
        (1024, 512, 4, 128, 256, 1),
        (1024, 512, 4, 512, 256, 2),
        (2048, 512, 4, 128, 256, 1),
    ),
    ("bfloat16", "backward"): (
        (512, 512, 8, 256),
        (512, 512, 8, 512),
        (1024, 512, 8, 256),
        (1024, 512, 8, 512),
    ),
    # Its products take six passes, beside which the rest is little.
    ("float32", "forward"): (
        (512, 512, 4, 128, 256, 1),
        (1024, 512, 4, 128, 256, 1),
    ),
    ("float32", "backward"): ((512, 512, 8, 256), (512, 256, 8, 256)),
}
TABLE = Path(__file__).parents[1] / (
    "plugins/pallas-flash/src/switchax_pallas_flash/table.py"
)
HEAD = '''"""Sizes of tiles by generation and class of shapes.

Written by `benchmarks/tpu_sizes.py`, not by hand. Beside each are the cycles of a head
of 8192 keys under a causal mask, and the registers that a hot block spills, of how many
bundles (libtpu {libtpu}).
"""

from __future__ import annotations

from .sizes import Entry, Sizes

__all__ = ["TABLE"]

TABLE: dict[tuple[str, str], Entry] = {{
'''


def measured(generation: str, known: set[str]) -> Iterator[dict[str, Any]]:
    """Compiles all sizes of all classes that are not known; in its own process."""
    import jax
    import numpy as np
    from jax.experimental import topologies

    from switchax import UnsupportedError
    from switchax.inspection.schedule import read_schedules
    from switchax_pallas_flash.backward import gradients_of
    from switchax_pallas_flash.forward import attend_rows
    from switchax_pallas_flash.static import Blocks, Operands, Static
    from switchax_pallas_flash.steps import Hidden, bounds

    folder = Path(os.environ["SWITCHAX_DUMPS"])
    topology = topologies.get_topology_desc(
        platform="tpu", topology_name=GENERATIONS[generation].topology
    )
    mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ("x",))
    here = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    first, end = bounds(
        LENGTH,
        LENGTH,
        causal=True,
        window=None,
        q_offset=0,
        q_lengths=None,
        kv_lengths=None,
    )
    hidden = Hidden(first, end)

    def array(shape: Any, dtype: str) -> Any:
        return jax.ShapeDtypeStruct((1, 1, *shape), dtype, sharding=here)

    for name in CLASSES:
        dtype, head_dim = name.split()
        size = int(head_dim)
        x = array((LENGTH, size), dtype)
        row = array((LENGTH,), "float32")
        turned = array((size, LENGTH), dtype)
        for which in ("forward", "backward"):
            for sizes in SWEEPS[dtype, which]:
                key = {"generation": generation, "class": name, "pass": which}
                key |= {"sizes": list(sizes)}
                if json.dumps(key) in known:
                    continue
                blocks = Blocks(*sizes)
                lengths = {"q_len": LENGTH, "kv_len": LENGTH}
                static = Static(
                    size**-0.5,
                    None,
                    blocks,
                    blocks,
                    output=dtype,
                    generation=generation,
                    **lengths,
                )

                def forward(q: Any, k: Any, v: Any, static: Any = static) -> Any:
                    return attend_rows(static, Operands(q, k, v, None), hidden)

                def backward(
                    q: Any, k: Any, v: Any, *given: Any, static: Any = static
                ) -> Any:
                    operands = Operands(q, k, v, None)
                    lse, d_output, delta = given
                    return gradients_of(static, operands, hidden, lse, d_output, delta)

                function, arrays = forward, (x, x, x)
                if which == "backward":
                    function, arrays = backward, (x, x, x, row, turned, row)
                for written in folder.iterdir():
                    written.unlink()
                try:
                    with jax.set_mesh(mesh):
                        jax.jit(function).lower(*arrays).compile()
                except (UnsupportedError, jax.errors.JaxRuntimeError) as error:
                    said = str(error).splitlines()[0][:150]
                    print(f"{generation} {name} {sizes}: {said}", file=sys.stderr)
                    continue
                kernels = read_schedules(folder)
                (hot,) = (k.hot for k in kernels if "pallas_flash" in k.name)
                said = f"{hot.bundles} bundles, {hot.spills} spills"
                print(f"{generation} {name} {sizes}: {said}", file=sys.stderr)
                rows, keys = blocks.block, blocks.chunk
                if which == "backward":
                    rows, keys = keys, rows
                yield key | {
                    "bundles": hot.bundles,
                    "spills": hot.spills,
                    "cycles": [
                        hot.bundles * visited(n, rows, keys) // blocks.unroll
                        for n in LENGTHS
                    ],
                }


def in_a_process(generation: str, kept: Path) -> None:
    """Measures in a process of its own, as libtpu's settings need."""
    with tempfile.TemporaryDirectory(prefix="switchax-bench-") as dumps:
        settings = environment(generation, dumps)
        subprocess.run(
            [sys.executable, __file__, "--kept", str(kept), "--worker", generation],
            env={**os.environ, **settings, "SWITCHAX_DUMPS": dumps},
            check=True,
        )


def read(kept: Path) -> list[dict[str, Any]]:
    """Returns what was found before."""
    if not kept.exists():
        return []
    return [json.loads(line) for line in kept.read_text().splitlines()]


def best(found: list[dict[str, Any]], *key: str) -> dict[str, Any]:
    """Returns the fastest sizes of a generation, a class and a pass."""
    of = [one for one in found if (one["generation"], one["class"], one["pass"]) == key]
    return min(of, key=lambda one: math.prod(one["cycles"]))


def table(found: list[dict[str, Any]], generations: list[str], libtpu: str) -> str:
    """Returns the text of the plugin's table."""
    lines = [HEAD.format(libtpu=libtpu)]
    for generation in generations:
        for name in CLASSES:
            lines.append(f'    ("{generation}", "{name}"): Entry(\n')
            for which in ("forward", "backward"):
                one = best(found, generation, name, which)
                sizes = ", ".join(map(str, one["sizes"]))
                spills = f"{one['spills']} of {one['bundles']}"
                lines.append(f"        # {one['cycles'][0]} cycles, spills {spills}\n")
                lines.append(f"        Sizes({sizes}),\n")
            lines.append("    ),\n")
    return "".join([*lines, "}\n"])


def main() -> None:
    """Measures what is asked for, prints it, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--generation", nargs="+", default=list(GENERATIONS))
    parser.add_argument("--kept", type=Path, required=True, help="lines of JSON")
    parser.add_argument("--write", action="store_true", help="the table")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        names = ("generation", "class", "pass", "sizes")
        known = {json.dumps({n: one[n] for n in names}) for one in read(asked.kept)}
        for one in measured(asked.worker, known):
            with asked.kept.open("a") as lines:
                lines.write(json.dumps(one) + "\n")
        return
    for generation in asked.generation:
        in_a_process(generation, asked.kept.resolve())
    if asked.write:
        from importlib.metadata import version

        text = table(read(asked.kept), list(GENERATIONS), version("libtpu"))
        TABLE.write_text(text)


if __name__ == "__main__":
    main()
