"""What `import switchax` and the first discovery cost, in fresh processes.

Run in an environment with the plugins to be discovered (`tox -e bench-import`):

    python benchmarks/import_time.py [--repeats N]

Every process imports jax first, so switchax's figure is what it adds to that. Bytecode
is kept, as pip keeps it for an installed wheel: where PYTHONDONTWRITEBYTECODE is set,
an editable install would be compiled anew in each process, and jax would not.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

PROBE = """
import json, time

def seconds(statement):
    start = time.perf_counter()
    exec(statement, globals())
    return time.perf_counter() - start

print(json.dumps([
    seconds("import jax"),
    seconds("import switchax"),
    seconds("names = switchax.OperationRegistry.list_implementations()"),
    names,
]))
"""

NO_BYTECODE = "PYTHONDONTWRITEBYTECODE"
ROWS = (
    ("import jax", None),
    ("import switchax, beyond jax", 80.0),
    ("first list_implementations()", 60.0),
)
"""What is measured, and the milliseconds that it may take."""


def measure() -> tuple[list[float], list[str]]:
    """Time one fresh process: seconds for each of `ROWS`, the names discovered."""
    environment = {k: v for k, v in os.environ.items() if k != NO_BYTECODE}
    run = subprocess.run(
        [sys.executable, "-c", PROBE],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    *seconds, names = json.loads(run.stdout)
    return seconds, names


def main() -> None:
    """Print the medians as a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11, help="fresh processes")
    repeats = parser.parse_args().repeats

    _, names = measure()  # fills the page cache and writes bytecode; not counted
    samples = [measure()[0] for _ in range(repeats)]
    medians = [statistics.median(column) * 1e3 for column in zip(*samples, strict=True)]

    print(f"medians over {repeats} fresh processes; discovered: {', '.join(names)}")
    print(f"{'':<30}{'median':>10}{'of jax':>9}{'target':>10}")
    for (label, target), median in zip(ROWS, medians, strict=True):
        goal = "" if target is None else f"{target:.0f} ms"
        share = median / medians[0]
        print(f"{label:<30}{median:>7.1f} ms{share:>9.1%}{goal:>10}")


if __name__ == "__main__":
    main()
