"""What "chunked" takes on a CPU, beside PyTorch and jax.nn in the same run.

    tox -e torch,bench-cpu -- [forward] [backward] [window] [decode] [memory] [compile]
                              [profile]

Every figure is a ratio of neighbours: the contenders take turns, and the median of the
ratios of one turn is printed, since a machine's speed changes within a run. PyTorch
runs in a process and an environment of its own, named by `--torch-python`; without it
the ratios to it are left out.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from xla_ops import seconds_by_op

import switchax
from switchax_chunked.exponential import exp_of_logits
from switchax_chunked.tiling import cache_of_a_core, tiling_for

HEADS = 8
SIZES = [(t, d) for d in (64, 128) for t in (512, 1024, 2048, 4096, 8192)]
TURNS = 5
WIDTH = 256
WORKER = Path(__file__).with_name("torch_attention.py")


class Torch:
    """A process that calls PyTorch's attention when it is asked to."""

    def __init__(self, python: str) -> None:
        self.process = subprocess.Popen(
            [python, WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self.answer()["torch"]

    def answer(self) -> dict[str, Any]:
        """Read one answer."""
        line = self.process.stdout.readline()
        if not line:
            sys.exit("chunked_cpu: expected an answer of PyTorch's process, it ended")
        return json.loads(line)

    def ask(self, **asked: Any) -> dict[str, Any]:
        """Ask once."""
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        return self.answer()


def seconds(call: Callable[[], Any], times: int) -> float:
    """Time one of several calls in a row, after one that is not counted."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    for _ in range(times):
        jax.block_until_ready(call())
    return (time.perf_counter() - start) / times


def attention(name: str, causal: bool, backward: bool) -> Callable[..., Any]:
    """Return a compiled call of an operation, or of jax.nn."""

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        if name == "jax.nn":
            return jax.nn.dot_product_attention(q, k, v, is_causal=causal)
        return switchax.attention(q, k, v, causal=causal, q_offset=0, operation=name)

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        return jax.vjp(forward, q, k, v)[1](q)

    return jax.jit(gradients if backward else forward)


def drawn(*shape: int, seed: int = 0, dtype: str = "float32") -> jax.Array:
    """Return normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def geometric(values: list[float]) -> float:
    """Return the geometric mean."""
    return math.exp(statistics.fmean(map(math.log, values)))


def compare(torch: Torch | None, backward: bool) -> None:
    """Print throughput and ratios over `SIZES`."""
    what = "forward and backward" if backward else "forward"
    print(f"\n{what}: batch 1, {HEADS} heads, float32")
    print("     T    D causal  GFLOP/s   of torch  of jax.nn   of a product")
    of_torch, of_jax = [], []
    square = drawn(2048, 2048)
    product = jax.jit(jnp.matmul)
    for (length, size), causal in ((s, c) for s in SIZES for c in (False, True)):
        operands = [drawn(1, length, HEADS, size, seed=i) for i in range(3)]
        flop = (14 if backward else 4) * HEADS * length**2 * size / (1 + causal)
        times = max(1, int(4e9 / flop))
        calls = {"chunked": attention("chunked", causal, backward)}
        if length <= 4096:  # beyond, its scores are gigabytes
            calls["jax.nn"] = attention("jax.nn", causal, backward)
        if torch is not None:
            shape = [1, HEADS, length, size]
            given = {"causal": causal, "backward": backward, "dtype": "float32"}
            torch.ask(prepare={"q": shape, "kv": shape, **given})
        taken: dict[str, list[float]] = {
            name: [] for name in ("chunked", "jax.nn", "torch", "x")
        }
        for _ in range(TURNS):
            if torch is not None:
                taken["torch"].append(torch.ask(run=times)["seconds"])
            for name, call in calls.items():
                taken[name].append(seconds(partial(call, *operands), times))
            taken["x"].append(seconds(lambda: product(square, square), 2))

        def ratio(name: str, taken: dict[str, list[float]] = taken) -> float | None:
            pairs = zip(taken[name], taken["chunked"], strict=False)
            ratios = [theirs / ours for theirs, ours in pairs]
            return statistics.median(ratios) if ratios else None

        speed = flop / statistics.median(taken["chunked"]) / 1e9
        share = ratio("x") * flop / (2 * 2048**3)
        cells = [ratio("torch"), ratio("jax.nn")]
        if cells[0] is not None:
            of_torch.append(cells[0])
        if cells[1] is not None and causal and length >= 2048:
            of_jax.append(cells[1])
        texts = ["         -" if x is None else f"{x:>10.2f}" for x in cells]
        row = f"{length:>6}{size:>5} {causal!s:>6}{speed:>9.0f}{''.join(texts)}"
        print(f"{row}{share:>13.2f}", flush=True)
    if of_torch:
        print(f"of torch: geometric mean {geometric(of_torch):.2f}", end=", ")
        print(f"least {min(of_torch):.2f}")
    print(f"of jax.nn, causal, T >= 2048: least {min(of_jax):.2f}")


def banded(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Compute attention to the last `WIDTH` keys."""
    given = {"causal": True, "q_offset": 0, "operation": "chunked"}
    return switchax.attention(q, k, v, window=(WIDTH - 1, 0), **given)


def window() -> None:
    """Print what a window costs, of its share of full attention."""
    length = 8192
    operands = [drawn(1, length, HEADS, 64, seed=i) for i in range(3)]
    full, call = attention("chunked", False, False), jax.jit(banded)
    ratios = []
    for _ in range(TURNS):
        whole = seconds(lambda: full(*operands), 1)
        ratios.append(seconds(lambda: call(*operands), 4) / (whole * WIDTH / length))
    print(
        f"\nwindow of {WIDTH} keys at T={length}: {statistics.median(ratios):.2f}",
        end="",
    )
    print(" times its share of full attention")


def cache_operands() -> list[jax.Array]:
    """Return a query row and a cache: batch 8, 32 heads on 8, 8192 keys."""
    shapes = [(8, 1, 32, 128), (8, 8192, 8, 128), (8, 8192, 8, 128)]
    return [drawn(*s, seed=i, dtype="bfloat16") for i, s in enumerate(shapes)]


def decode() -> None:
    """Print how fast a cache is read, of what a copy reaches."""
    operands = cache_operands()
    source = np.zeros(operands[1].size, np.int16)
    target = np.ones_like(source)
    calls = {name: attention(name, False, False) for name in ("chunked", "jax.nn")}
    taken: dict[str, list[float]] = {"copy": [], "chunked": [], "jax.nn": []}
    for _ in range(TURNS):
        np.copyto(target, source)
        start = time.perf_counter()
        np.copyto(target, source)
        taken["copy"].append(time.perf_counter() - start)
        for name, call in calls.items():
            taken[name].append(seconds(partial(call, *operands), 2))
    # A copy reads and writes source.nbytes; the cache is twice as large, and is read.
    shares = [c / x for c, x in zip(taken["copy"], taken["chunked"], strict=True)]
    others = [x / y for x, y in zip(taken["jax.nn"], taken["chunked"], strict=True)]
    speed = 2 * source.nbytes / statistics.median(taken["copy"]) / 1e9
    print("\ndecode, batch 8, 32 heads on 8, 8192 keys, bf16:")
    print(f"  {statistics.median(shares):.0%} of a copy's {speed:.0f} GB/s, ", end="")
    print(f"{statistics.median(others):.1f} times as fast as jax.nn")


PARTS = ("qk", "values", "exp", "max+sum")


@partial(jax.jit, static_argnums=(0, 1))
def part_of_a_tile(
    part: int, times: int, q: jax.Array, k: jax.Array, v: jax.Array
) -> jax.Array:
    """Compute one tile in the cache up to one of `PARTS`, again and again."""

    def again(_: int, q: jax.Array) -> jax.Array:
        x = q @ k
        if part == 0:
            return x[..., : q.shape[-1]] * 1e-3
        m = x.max(axis=-1, keepdims=True) if part >= 3 else 4.0
        if part >= 2:
            x = exp_of_logits(x - m)
        total = x.sum(axis=-1, keepdims=True) if part >= 3 else 1e3
        return x @ v / total

    return jax.lax.fori_loop(0, times, again, q)


def profile(torch: Torch | None) -> None:
    """Print how fast one tile is by its parts, the operation and PyTorch."""
    print("\nprofile: a tile, each part with those before it; the whole call; GFLOP/s")
    titles = "".join(f"{x:>9}" for x in (*PARTS, "chunked", "torch"))
    print(f"     T    D  heads x rows x keys{titles}")
    for size in (64, 128):
        length, cache = 4096, cache_of_a_core()
        tile = tiling_for(length, length, HEADS, 1, cache=cache)
        flop = 4 * tile.kv_heads * tile.q * tile.kv * size
        times = 4 * HEADS * length**2 * size // flop
        shapes = [(tile.q, size), (size, tile.kv), (tile.kv, size)]
        operands = [drawn(tile.kv_heads, *shape) for shape in shapes]
        calls = {
            name: partial(part_of_a_tile, i, times) for i, name in enumerate(PARTS)
        }
        call = attention("chunked", False, False)
        whole = [drawn(1, length, HEADS, size, seed=i) for i in range(3)]
        taken: dict[str, list[float]] = {
            name: [] for name in (*PARTS, "chunked", "torch")
        }
        if torch is not None:
            shape = [1, HEADS, length, size]
            given = {"causal": False, "backward": False, "dtype": "float32"}
            torch.ask(prepare={"q": shape, "kv": shape, **given})
        for _ in range(TURNS):
            for name, part in calls.items():
                taken[name].append(seconds(partial(part, *operands), 1))
            taken["chunked"].append(seconds(partial(call, *whole), 1))
            if torch is not None:
                taken["torch"].append(torch.ask(run=1)["seconds"])
        cells = []
        for name, values in taken.items():
            done = times * flop * (0.5 if name == "qk" else 1)
            cells.append(
                f"{done / statistics.median(values) / 1e9:.0f}" if values else "-"
            )
        shape = f"{tile.kv_heads} x {tile.q} x {tile.kv}"
        texts = "".join(f"{cell:>9}" for cell in cells)
        print(f"{length:>6}{size:>5}{shape:>21}{texts}", flush=True)


def profile_window() -> None:
    """Print what a window's tiles cost by their parts, of the share of full attention.

    A tile of rows reads the keys of its first row to those of its last.
    """
    length, size = 8192, 64
    cache = cache_of_a_core()
    given = {"is_banded": True, "reach": WIDTH, "cache": cache}
    tile = tiling_for(length, length, HEADS, 1, **given)
    keys = WIDTH + tile.q  # but one, in whole vectors
    times = length // tile.q * HEADS // tile.kv_heads
    shapes = [(tile.q, size), (size, keys), (keys, size)]
    operands = [drawn(tile.kv_heads, *shape) for shape in shapes]
    whole = [drawn(1, length, HEADS, size, seed=i) for i in range(3)]
    full = attention("chunked", False, False)
    calls: dict[str, Callable[[], Any]] = {
        name: partial(part_of_a_tile, i, times, *operands)
        for i, name in enumerate(PARTS)
    }
    calls["chunked"] = partial(jax.jit(banded), *whole)
    shares: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        share = seconds(lambda: full(*whole), 1) * WIDTH / length
        for name, call in calls.items():
            shares[name].append(seconds(call, 2) / share)
    cells = "".join(f"{statistics.median(x):>9.2f}" for x in shares.values())
    print(f"\nprofile: {WIDTH} keys at T={length}, of the share of full attention")
    print("  heads x rows x keys" + "".join(f"{name:>9}" for name in shares))
    print(f"{f'{tile.kv_heads} x {tile.q} x {keys}':>21}{cells}")


def cache_products(part: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Compute a step of decoding by products over all heads, up to one of `PARTS`."""
    batch, _, heads, size = q.shape
    kv_len, kv_heads = k.shape[1:3]
    own = np.eye(kv_heads, dtype=bool).reshape(kv_heads, 1, kv_heads, 1)
    rows = q.reshape(batch, kv_heads, heads // kv_heads, 1, size)
    rows = jnp.where(own, rows, 0).reshape(batch, heads, -1)
    exact = {"preferred_element_type": jnp.float32}
    x = jnp.einsum("bnc,bsc->bns", rows, k.reshape(batch, kv_len, -1), **exact)
    if part == 0:
        return x
    m = x.max(axis=-1, keepdims=True) if part >= 3 else 4.0
    p = exp_of_logits(x - m) if part >= 2 else x
    total = p.sum(axis=-1, keepdims=True)[..., None] if part >= 3 else 1e3
    panels = 8
    p = p.astype(v.dtype).reshape(batch, heads, panels, -1)
    values = v.reshape(batch, panels, kv_len // panels, -1)
    values = jnp.einsum("bnps,bpsc->bpnc", p, values, **exact).sum(axis=1)
    return values.reshape(batch, heads, kv_heads, size) / total


def profile_decode() -> None:
    """Print what a step of decoding takes by its parts, in times of a copy.

    To read the cache and do nothing else is a part of its own, and the floor.
    """
    operands = cache_operands()
    source = np.zeros(operands[1].size, np.int16)
    target = np.ones_like(source)
    cache = [jax.lax.bitcast_convert_type(x, jnp.int16) for x in operands[1:]]
    read = jax.jit(lambda *cache: [x.reshape(-1, 8192).max(axis=0) for x in cache])
    calls: dict[str, Callable[[], Any]] = {"read": partial(read, *cache)}
    for i, name in enumerate(PARTS):
        products = jax.jit(cache_products, static_argnums=0)
        calls[name] = partial(products, i, *operands)
    calls["chunked"] = partial(attention("chunked", False, False), *operands)
    ratios: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(TURNS):
        copy = seconds(lambda: np.copyto(target, source), 2)
        for name, call in calls.items():
            ratios[name].append(seconds(call, 2) / copy)
    print("\nprofile: decode as above, in times of a copy of as many bytes")
    print("".join(f"{name:>9}" for name in ratios))
    print("".join(f"{statistics.median(x):>9.2f}" for x in ratios.values()))


def profile_ops() -> None:
    """Print which operations of XLA the time goes to, as shares of their sum."""
    long = [drawn(1, 8192, HEADS, 64, seed=i) for i in range(3)]
    calls = {
        "full, T=8192": (attention("chunked", False, False), long),
        f"window of {WIDTH}": (jax.jit(banded), long),
        "decode": (attention("chunked", False, False), cache_operands()),
    }
    print("\nprofile: shares of the time, by the last primitive of what XLA fused")
    for name, (call, operands) in calls.items():
        spent = seconds_by_op(call, operands, 3)
        shares = {op: x / sum(spent.values()) for op, x in spent.items()}
        cells = [f"{op} {share:.0%}" for op, share in shares.items() if share > 0.02]
        print(f"{name:>14}: {', '.join(cells)}", flush=True)


def memory() -> None:
    """Print what T = 32768 takes, by the program's own analysis and the process."""
    length, size = 32768, 64
    operands = [drawn(1, length, 1, size, seed=i) for i in range(3)]
    own = sum(x.nbytes for x in operands)
    call = attention("chunked", True, True).lower(*operands).compile()
    analysis = call.memory_analysis()
    whole = analysis.temp_size_in_bytes + analysis.output_size_in_bytes + own
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    jax.block_until_ready(call(*operands))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"\nmemory at T={length}, one head, forward and backward, of q+k+v:")
    print(f"  {whole / own:.1f} by the analysis of the program, all of it; ", end="")
    print(f"{(after - before) / own:.1f} by the peak of the process")


def compiling() -> None:
    """Print how long forward and backward take to compile."""
    shape = jax.ShapeDtypeStruct((1, 4096, HEADS, 64), jnp.float32)
    start = time.perf_counter()
    attention("chunked", True, True).lower(shape, shape, shape).compile()
    print(f"\ntraced and compiled, T=4096: {time.perf_counter() - start:.2f} s")


def main() -> None:
    """Print what is asked for, or all of it."""
    parts = ("memory", "compile", "forward", "backward", "window", "decode", "profile")
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *parts], default=[])
    parser.add_argument("--torch-python", help="of an environment with torch")
    given = parser.parse_args()
    asked = given.parts or parts
    torch = None
    if given.torch_python is not None:
        if not Path(given.torch_python).is_file():
            sys.exit(
                f"chunked_cpu: expected a Python with torch, got no file "
                f"{given.torch_python}; run `tox -e torch` first"
            )
        torch = Torch(given.torch_python)
    beside = "none" if torch is None else torch.version
    print(f"jax {jax.__version__}, torch {beside}, {jax.devices()[0].device_kind}")
    for part in parts:  # memory first: the peak of a process never falls
        if part not in asked:
            continue
        match part:
            case "memory":
                memory()
            case "compile":
                compiling()
            case "forward" | "backward":
                compare(torch, part == "backward")
            case "window":
                window()
            case "decode":
                decode()
            case "profile":
                profile(torch)
                profile_window()
                profile_decode()
                profile_ops()


if __name__ == "__main__":
    main()
