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
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tpu_compile import LENGTH, LENGTHS, Compiler, run_worker, visited

from switchax.inspection.chips import GENERATIONS

CLASSES = ("bfloat16 128", "bfloat16 256", "float32 128", "float32 256")
# As `Sizes` has them: block, chunk, chunks, piece, lanes, unroll.
SWEEPS = {
    ("bfloat16", "forward"): (
        (512, 512, 16, 128, 256, 1),
        (512, 512, 16, 512, 256, 2),
        (1024, 512, 16, 128, 256, 1),
        (1024, 512, 16, 512, 256, 2),
        (2048, 512, 16, 128, 256, 1),
    ),
    ("bfloat16", "backward"): (
        (512, 512, 8, 256),
        (512, 512, 8, 512),
        (1024, 512, 8, 256),
        (1024, 512, 8, 512),
    ),
    # Its products take six passes, beside which the rest is little.
    ("float32", "forward"): (
        (512, 512, 16, 128, 256, 1),
        (1024, 512, 16, 128, 256, 1),
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


def candidates(generation: str) -> Iterator[dict[str, Any]]:
    """Yields what is compiled, as it is kept."""
    for name in CLASSES:
        for which in ("forward", "backward"):
            for sizes in SWEEPS[name.split()[0], which]:
                yield {
                    "generation": generation,
                    "class": name,
                    "pass": which,
                    "sizes": list(sizes),
                }


def kernel_of(one: dict[str, Any]) -> tuple[Callable[..., Any], list[Any]]:
    """Returns one pass over a head under a causal mask, and its arrays."""
    from switchax_pallas_flash.backward import gradients_of
    from switchax_pallas_flash.forward import attend_rows
    from switchax_pallas_flash.static import Blocks, Operands, Static
    from switchax_pallas_flash.steps import Hidden, bounds

    dtype, head_dim = one["class"].split()
    size = int(head_dim)
    blocks = Blocks(*one["sizes"])
    static = Static(
        size**-0.5,
        None,
        blocks,
        blocks,
        output=dtype,
        generation=one["generation"],
        q_len=LENGTH,
        kv_len=LENGTH,
    )
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

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attend_rows(static, Operands(q, k, v, None), hidden)

    def backward(q: Any, k: Any, v: Any, *given: Any) -> Any:
        lse, d_output, delta = given
        operands = Operands(q, k, v, None)
        return gradients_of(static, operands, hidden, lse, d_output, delta)

    operand = (1, 1, LENGTH, size), dtype
    if one["pass"] == "forward":
        return forward, [operand] * 3
    row, turned = ((1, 1, LENGTH), "float32"), ((1, 1, size, LENGTH), dtype)
    return backward, [*[operand] * 3, row, turned, row]


def measured(generation: str, known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Compiles all sizes of all classes that are not known; in its own process."""
    import jax

    from switchax import UnsupportedError
    from switchax_pallas_flash.sizes import Sizes

    compiler = Compiler(generation)
    for one in candidates(generation):
        if any(one.items() <= of.items() for of in known):
            continue
        said = f"{generation} {one['class']} {one['pass']} {one['sizes']}"
        try:
            kernels = compiler.schedules(*kernel_of(one))
        except (UnsupportedError, jax.errors.JaxRuntimeError) as error:
            print(said, str(error).splitlines()[0][:150], file=sys.stderr, flush=True)
            continue
        (hot,) = (k.hot for k in kernels if "pallas_flash" in k.name)
        found = f"{hot.bundles} bundles, {hot.spills} spills"
        print(said, found, file=sys.stderr, flush=True)
        sizes = Sizes(*one["sizes"])
        rows, keys = sizes.block, sizes.chunk
        if one["pass"] == "backward":
            rows, keys = keys, rows
        yield one | {
            "bundles": hot.bundles,
            "spills": hot.spills,
            "cycles": [
                hot.bundles * visited(n, rows, keys) // sizes.unroll for n in LENGTHS
            ],
        }


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
    kept = "lines of JSON of what was compiled, which is not compiled again"
    parser.add_argument("--kept", type=Path, required=True, help=kept)
    write = f"overwrites {TABLE.name} of the plugin with the fastest"
    parser.add_argument("--write", action="store_true", help=write)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        for one in measured(asked.worker, read(asked.kept)):
            with asked.kept.open("a") as lines:
                lines.write(json.dumps(one) + "\n")
        return
    for generation in asked.generation:
        run_worker(__file__, generation, "--kept", str(asked.kept.resolve()))
    if asked.write:
        from importlib.metadata import version

        text = table(read(asked.kept), list(GENERATIONS), version("libtpu"))
        TABLE.write_text(text)


if __name__ == "__main__":
    main()
