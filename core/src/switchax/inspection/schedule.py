"""Reads what libtpu writes of a kernel: its bundles, units and allocations.

Per kernel there is a file of bundles (one line each, with the address and a mark where
a loop or a branch begins), one of the units that each bundle occupies, and one that
lists allocations.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any

__all__ = ["MATRIX", "Block", "KernelSchedule", "read_schedules"]

MATRIX = "MATMUL"
"""The unit by whose work the hot block is found."""
_SPILLS = ("VSTORE:SPILL", "VLOAD:FILL")
_MUCH = 0.5  # of the most matrix work: no loop is hot that has less
_NEARLY = 0.9  # of the most in those loops: blocks of the same tile, masked and not

_BUNDLE = re.compile(r"^\s*(?:0x)?([0-9a-f]+)\s+(?:(LH|LB|LE|PB|PF|CT)\s*)?:\s*(>*)")
_ENTRY = re.compile(r"/\* entry bundle: %(\S+) = .*custom-call")
_ALLOCATION = re.compile(
    r"#allocation\w+ \[shape = '([^']*)', space=(\w+), size = 0x([0-9a-f]+)"
)
_UTILISATION = r"final_hlo-static-per-bundle-utilization"
_REGISTERS = r"post-ra"  # once registers are allocated, and what did not fit


@dataclasses.dataclass(frozen=True)
class Block:
    """Bundles without a branch or a label between them.

    Attributes:
        first: Address of the first.
        bundles: How many; each takes a cycle, and longer where it waits.
        depth: How many loops it is in.
        used: Slots that they occupy, by unit.
        capacity: Slots of one bundle, by unit.
    """

    first: int
    bundles: int
    depth: int
    used: dict[str, int]
    capacity: dict[str, int]

    @property
    def occupancy(self) -> dict[str, float]:
        """The share of each unit's slots that is used."""
        return {
            unit: used / (self.capacity[unit] * self.bundles)
            for unit, used in self.used.items()
        }

    @property
    def floor(self) -> int:
        """Bundles that the busiest unit needs: no schedule of this work is shorter."""
        needed = (math.ceil(n / self.capacity[unit]) for unit, n in self.used.items())
        return max(needed, default=0)

    @property
    def spills(self) -> int:
        """Registers that are stored to memory for want of room, and loaded again."""
        return sum(self.used.get(unit, 0) for unit in _SPILLS)


@dataclasses.dataclass(frozen=True)
class KernelSchedule:
    """The schedule of one kernel.

    Attributes:
        name: As in the compiled program.
        bundles: All of them, in the order of addresses.
        vmem: Bytes of vector memory that it allocates, windows of operands included.
        hot: The block that does a full tile: of the innermost loops with much matrix
            work, of the blocks with the most of it, the shortest.
        blocks: All that have matrix work, in the order of addresses: what fills and
            drains a pipeline is beside its loop.
        units: Names of the columns of `rows`.
        rows: Slots that each bundle of `hot` occupies, by unit.
    """

    name: str
    bundles: int
    vmem: int
    hot: Block
    blocks: tuple[Block, ...]
    units: tuple[str, ...]
    rows: tuple[tuple[int, ...], ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON data, without `rows`."""
        hot = self.hot
        return {
            "name": self.name,
            "bundles": self.bundles,
            "vmem_bytes": self.vmem,
            "hot": {
                "first": hot.first,
                "bundles": hot.bundles,
                "floor": hot.floor,
                "share_of_floor": round(hot.floor / hot.bundles, 4),
                "spills": hot.spills,
                "used": hot.used,
                "capacity": hot.capacity,
                "occupancy": {u: round(x, 4) for u, x in hot.occupancy.items()},
            },
            "blocks": [
                {
                    "first": block.first,
                    "bundles": block.bundles,
                    "depth": block.depth,
                    "matrix": block.used[MATRIX],
                    "spills": block.spills,
                }
                for block in self.blocks
            ],
        }


def read_schedules(
    folder: Path, but: AbstractSet[Path] = frozenset()
) -> list[KernelSchedule]:
    """Returns the schedules of all custom calls that libtpu wrote to a folder.

    Args:
        folder: What `--xla_jf_dump_to` named.
        but: Files that were there before.

    Raises:
        ValueError: If a file is not as libtpu writes it.
    """
    found = []
    for path in sorted(folder.glob("*-final_bundles.txt")):
        if "schedule-analysis" in path.name or path in but:
            continue
        with path.open(encoding="utf-8", errors="replace") as lines:
            name, cuts, depths = _parts(lines)
        if name:
            found.append(_schedule(path, name, cuts, depths))
    return found


def _parts(lines: Iterable[str]) -> tuple[str, list[int], dict[int, int]]:
    """Reads a kernel.

    Returns:
        Its name, "" for XLA's own; where blocks begin; and in how many loops bundles
        are, by address: those that do nothing do not say it.
    """
    name, cuts, depths = "", {0}, {}
    for line in lines:
        bundle = _BUNDLE.match(line)
        if bundle is None:
            continue
        address = int(bundle[1], 16)
        depths[address] = len(bundle[3])
        if bundle[2]:
            cuts.add(address)
        if "sbr.rel" in line:  # a branch ends the block after its own bundle
            cuts.add(address + 1)
        entry = _ENTRY.search(line) if not name else None
        name = entry[1] if entry else name
    return name, sorted(cuts), depths


def _schedule(
    path: Path, name: str, cuts: Sequence[int], depths: Mapping[int, int]
) -> KernelSchedule:
    kernel = re.sub(r"-\d+-final_bundles\.txt$", "", path.name)
    units, capacity, rows = _utilisation(_beside(path, kernel, _UTILISATION))
    starts = [cut for cut in cuts if cut < len(rows)]
    blocks = [
        _block(units, capacity, rows, first, end, depths)
        for first, end in zip(starts, [*starts[1:], len(rows)], strict=True)
    ]
    hot = _hot(blocks)
    vmem = _vmem(_beside(path, kernel, _REGISTERS))
    part = tuple(rows[hot.first : hot.first + hot.bundles])
    working = tuple(block for block in blocks if block.used.get(MATRIX))
    return KernelSchedule(name, len(rows), vmem, hot, working, units, part)


def _hot(blocks: Sequence[Block]) -> Block:
    """Returns the block that does a full tile; without matrix work the longest."""

    def work(block: Block) -> int:
        return block.used.get(MATRIX, 0)

    def size(block: Block) -> int:
        return block.bundles

    most = max(map(work, blocks))
    if most == 0:
        return max(blocks, key=size)
    # What fills and drains a pipeline is outside of its loop, and may have more work.
    depth = max(block.depth for block in blocks if work(block) >= _MUCH * most)
    inner = [block for block in blocks if block.depth == depth]
    most = max(map(work, inner))
    return min((b for b in inner if work(b) >= _NEARLY * most), key=size)


def _beside(path: Path, kernel: str, stage: str) -> Path:
    """Returns the file of the same kernel that shows it at a stage."""
    wanted = re.compile(rf"{re.escape(kernel)}-\d+-{stage}\.txt")
    for other in path.parent.iterdir():
        if wanted.fullmatch(other.name):
            return other
    raise ValueError(
        f"inspect: expected libtpu to write {stage} of {kernel}, got none; "
        "another libtpu may name it otherwise"
    )


def _utilisation(
    path: Path,
) -> tuple[tuple[str, ...], tuple[int, ...], list[tuple[int, ...]]]:
    """Returns the units, the slots that each has in a bundle, and those in use."""
    units: tuple[str, ...] = ()
    numbers: list[tuple[int, ...]] = []
    for line in path.read_text("utf-8", errors="replace").splitlines():
        if MATRIX in line:
            units = tuple(unit.strip() for unit in line.split(","))
        elif units and re.fullmatch(r"[\s\d]+", line) and line.strip():
            numbers.append(tuple(map(int, line.split())))
    if not units or not numbers or any(len(row) != len(units) for row in numbers):
        raise ValueError(
            f"inspect: expected units and a row for each bundle, got {path.name}; "
            "another libtpu may write it otherwise"
        )
    return units, numbers[0], numbers[1:]


def _block(
    units: Sequence[str],
    capacity: Sequence[int],
    rows: Sequence[Sequence[int]],
    first: int,
    end: int,
    depths: Mapping[int, int],
) -> Block:
    used = {
        unit: sum(row[column] for row in rows[first:end])
        for column, unit in enumerate(units)
    }
    depth = max(depths.get(address, 0) for address in range(first, end))
    room = dict(zip(units, capacity, strict=True))
    return Block(first, end - first, depth, used, room)


def _vmem(path: Path) -> int:
    """Adds up what is allocated in vector memory; buffers of a window are in it."""
    total = 0
    for line in path.read_text("utf-8", errors="replace").splitlines():
        allocation = _ALLOCATION.search(line)
        if allocation and allocation[2] == "vmem":
            total += int(allocation[3], 16)
    return total
