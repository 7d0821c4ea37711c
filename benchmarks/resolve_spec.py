"""What it costs to resolve axes, which models do thousands of times while traced.

    python benchmarks/resolve_spec.py [--repeats N]

Warm means that the same was asked before, as it is for every layer but the first.
"""

import argparse
import timeit
from collections.abc import Callable

from switchax.axes import (
    BATCH,
    FSDP,
    HEAD,
    HEAD_DIM,
    MODE_TRAIN,
    QUERY_LENGTH,
    SP,
    TP,
    AttnQSharding,
)
from switchax.partition import PartitionAxis, PartitionManager, axis_rules
from switchax.sharding import correct_spec

AXES = [BATCH, QUERY_LENGTH, HEAD, HEAD_DIM]
SHAPE = (8, 128, 16, 64)
CALLS = 20_000
GOAL = 10.0
"""Microseconds that a warm resolve_spec of an attention tensor may take."""


def microseconds(call: Callable[[], object], repeats: int) -> float:
    """Time one call: the median of several loops."""
    call()
    loops = sorted(timeit.repeat(call, number=CALLS, repeat=repeats))
    return loops[len(loops) // 2] / CALLS * 1e6


def main() -> None:
    """Print the times as a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7, help="loops of each")
    repeats = parser.parse_args().repeats

    # Here, so that `--help` does not wait for JAX's backend.
    import jax

    paxis = PartitionAxis()
    manager = PartitionManager(paxis)
    mesh = jax.make_mesh((1, 1), ("dp", "tp"))
    spec = paxis.resolve_spec(AXES, MODE_TRAIN)

    def cold() -> object:
        with axis_rules({}):
            return paxis.resolve_spec(AXES, MODE_TRAIN)

    rows = [
        ("resolve_spec, 4 axes, warm", lambda: paxis.resolve_spec(AXES, MODE_TRAIN)),
        (
            "the same, axes in lists",
            lambda: paxis.resolve_spec([[FSDP, SP], TP], MODE_TRAIN),
        ),
        ("the same, cold, in a new scope", cold),
        (
            "resolve of a preset, warm",
            lambda: manager.resolve(AttnQSharding, shape=SHAPE),
        ),
        ("correct_spec", lambda: correct_spec(spec, SHAPE, mesh)),
    ]
    print(f"{'median over ' + str(repeats) + ' loops':<34}{'':>10}{'goal':>10}")
    for label, call in rows:
        goal = f"{GOAL:.0f} us" if label == rows[0][0] else ""
        print(f"{label:<34}{microseconds(call, repeats):>7.2f} us{goal:>10}")


if __name__ == "__main__":
    main()
