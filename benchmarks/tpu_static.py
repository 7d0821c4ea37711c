"""What TPU kernels take by the compiler's own schedule, beside JAX's and tokamax's.

    tox -e bench-tpu-static -- [--passes forward ...] [--generation v6e ...]
                               [--head-dim 128 ...] [--json FILE]

No TPU is asked for: libtpu compiles each kernel for the generation and writes the
bundles that one chip would issue. The hot block is the one with the most matrix work in
the innermost loop (of several alike the shortest); its bundles times the blocks that a
causal mask visits are the cycles that are printed, in the same way for every kernel,
each at the best of the same sizes. They leave out what a schedule does not show, which
is waits for HBM, and what a kernel does outside of that block: masks at the diagonal,
and for the forward pass of pallas_flash, whose block is a stage of a pipeline, filling
and draining it once for the keys that are copied at once, which its table says, not the
sweep (`switchax inspect --json` lists those blocks).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tpu_compile import LENGTH, LENGTHS, Compiler, run_worker, visited

HEADS = 8
PASSES = ("forward", "backward")
# Rows, keys that are copied at once, and those of them that are computed at once.
SIZES = {
    "forward": [
        (rows, keys, compute)
        for rows in (512, 1024, 2048)
        for keys, compute in ((1024, 512), (2048, 512), (2048, 256), (1024, 1024))
    ],
    "backward": [
        (rows, keys, compute)
        for rows in (512, 1024)
        for keys, compute in ((512, 512), (1024, 512), (1024, 1024), (2048, 512))
    ],
}


class Found(NamedTuple):
    """One kernel at one size.

    Attributes:
        contender: Whose.
        sizes: Of the sweep.
        bundles: Of the hot blocks per 512 x 512 logits, all kernels of the pass.
        spills: Registers that they store and load, of all tiles of a hot block.
        cycles: By length, of one head.
    """

    contender: str
    sizes: tuple[int, int, int]
    bundles: float
    spills: int
    cycles: dict[str, int]


def measured(generation: str, head_dim: int, which: str) -> Iterator[Found]:
    """Compiles every contender at every size; in a process of its own."""
    from switchax.inspection.schedule import MATRIX

    compiler = Compiler(generation)
    for name, contender in CONTENDERS.items():
        for sizes in SIZES[which]:
            try:
                function, block, tiles = contender(which, sizes, head_dim, generation)
                shape = (HEADS, LENGTH, head_dim)
                if name == "pallas_flash":
                    shape = (1, *shape)
                arrays = [(shape, "bfloat16")] * (3 if which == "forward" else 4)
                found = compiler.schedules(function, arrays)
            except Exception as error:
                said = str(error).splitlines()[0][:100]
                print(f"{name} {sizes}: {said}", file=sys.stderr, flush=True)
                continue
            kernels = [k for k in found if k.hot.used.get(MATRIX)]
            if which == "backward":  # not the forward pass that it starts from
                kernels = [k for k in kernels if "fwd" not in k.name]
                kernels = [k for k in kernels if "forward" not in k.name]
            hot = sum(kernel.hot.bundles for kernel in kernels) / tiles
            bundles = hot * 512 * 512 / math.prod(block)
            spills = sum(kernel.hot.spills for kernel in kernels)
            cycles = {str(n): round(hot * visited(n, *block)) for n in LENGTHS}
            said = f"{name} {sizes}: {bundles:.0f} bundles, {spills} spills"
            print(said, file=sys.stderr, flush=True)
            yield Found(name, sizes, bundles, spills, cycles)


def pass_of(which: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a forward pass, or its gradients by a cotangent."""
    import jax

    def backward(q: Any, k: Any, v: Any, d: Any) -> Any:
        return jax.vjp(forward, q, k, v)[1](d)

    return forward if which == "forward" else backward


def of_pallas_flash(which: str, sizes: Any, head_dim: int, generation: str) -> Any:
    """Ours: chunks are skipped one by one."""
    from switchax_pallas_flash import PallasFlashConfig
    from switchax_pallas_flash.attend import attend
    from switchax_pallas_flash.blocks import TABLE, shape_class

    rows, keys, compute = sizes
    tiles = 1
    if which == "forward":
        if keys > compute:
            tiles = TABLE[generation, shape_class("bfloat16", head_dim)].forward.unroll
        config = PallasFlashConfig(
            block_q=rows, block_kv=keys, block_kv_compute=compute
        )
        block = (rows, compute)
    else:
        # The sizes of the forward pass before it are those of splash below.
        config = PallasFlashConfig(
            block_q=512,
            block_kv=512,
            block_kv_compute=512,
            block_kv_backward=keys,
            block_q_compute_backward=rows,
        )
        block = (rows, keys)

    def forward(q: Any, k: Any, v: Any) -> Any:
        return attend(
            q,
            k,
            v,
            softmax_scale=head_dim**-0.5,
            causal=True,
            config=config,
            generation=generation,
        )[0]

    return pass_of(which, forward), block, tiles


def splash_sizes(which: str, sizes: Any) -> dict[str, Any]:
    """Returns sizes by the names that splash has for them; JAX's and tokamax's."""
    rows, keys, compute = sizes
    if which == "forward":
        return {"block_q": rows, "block_kv": keys, "block_kv_compute": compute}
    return {
        "block_q": 512,
        "block_kv": 512,
        "block_kv_compute": 512,
        "block_q_dkv": rows,
        "block_kv_dkv": keys,
        "block_kv_dkv_compute": compute,
    }


def of_splash(which: str, sizes: Any, head_dim: int, generation: str) -> Any:
    """JAX's: blocks of rows x keys are skipped, and computed by parts of the keys."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    rows, keys, _ = sizes
    mask = masks.MultiHeadMask([masks.CausalMask((LENGTH, LENGTH))] * HEADS)
    named = splash_sizes(which, sizes)
    if which == "backward":
        named["use_fused_bwd_kernel"] = True
    kernel = splash.make_splash_mha(
        mask=mask,
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(**named),
    )

    return pass_of(which, lambda q, k, v: kernel(q, k, v)), (rows, keys), 1


def of_tokamax(which: str, sizes: Any, head_dim: int, generation: str) -> Any:
    """tokamax's, with the scheduler that it asks for, which is the faster one."""
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from tokamax._src.ops.experimental.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    rows, keys, _ = sizes
    named = splash_sizes(which, sizes)
    kernel = splash.make_splash_mha_single_device(
        mask=masks.CausalMask((LENGTH, LENGTH)),
        config=splash.SplashConfig(**named, use_experimental_scheduler=True),
    )

    return pass_of(which, lambda q, k, v: kernel(q, k, v)), (rows, keys), 1


CONTENDERS: dict[str, Callable[..., Any]] = {
    "pallas_flash": of_pallas_flash,
    "splash": of_splash,
}
if importlib.util.find_spec("tokamax"):
    CONTENDERS["tokamax"] = of_tokamax


def show(generation: str, head_dim: int, which: str, found: list[Found]) -> None:
    """Prints the best of each contender, and ratios to ours."""
    print(f"\n{which}, {generation}, bfloat16, causal, head_dim {head_dim}")
    print(f"{'':14}{'sizes':>18}{'bundles':>9}{'spills':>8}", end="")
    print("".join(f"{f'cycles {n}':>16}{'ours':>6}" for n in LENGTHS))
    best = {}
    for name in CONTENDERS:
        mine = [one for one in found if one.contender == name]
        if mine:
            best[name] = {
                n: min(mine, key=lambda one, n=n: one.cycles[str(n)]) for n in LENGTHS
            }
    ours = best.get("pallas_flash")
    for name, by_length in best.items():
        one = by_length[LENGTHS[0]]
        sizes = "x".join(map(str, one.sizes))
        print(f"{name:14}{sizes:>18}{one.bundles:>9.0f}{one.spills:>8}", end="")
        for n in LENGTHS:
            cycles = by_length[n].cycles[str(n)]
            ratio = ours[n].cycles[str(n)] / cycles if ours else math.nan
            print(f"{cycles:>16}{ratio:>6.2f}", end="")
        print()


def main() -> None:
    """Measures what is asked for, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=PASSES)
    parser.add_argument("--generation", nargs="+", default=["v5e", "v6e", "7x"])
    parser.add_argument("--head-dim", nargs="+", type=int, default=[128, 64])
    parser.add_argument("--json", type=Path, help="where every size is written to")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker:
        (which,), (head_dim,) = asked.passes, asked.head_dim
        print(json.dumps(list(measured(asked.worker, head_dim, which))))
        return
    kept = []
    for which in asked.passes:
        for generation in asked.generation:
            for head_dim in asked.head_dim:
                given = "--passes", which, "--head-dim", str(head_dim)
                said = run_worker(__file__, generation, *given)
                found = [Found(*row) for row in json.loads(said.splitlines()[-1])]
                show(generation, head_dim, which, found)
                kept += [(which, generation, head_dim, *one) for one in found]
    if asked.json:
        asked.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
