"""Calls kernels: which arrays they see, under which names, if they fit the chip."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from switchax import MaskPattern

from .memory import check_fits
from .patterns import table_of
from .static import Static
from .steps import Steps
from .windows import Window

__all__ = [
    "Refs",
    "Step",
    "either_way",
    "launch",
    "listed",
    "listed_place",
    "step_of",
    "with_table",
]

Refs = dict[str, Any]
"""The arrays of one step of a kernel, by name."""


class Step(NamedTuple):
    """One entry of `Steps`, read within a kernel; int32 scalars.

    Attributes:
        block: As there, likewise the next four.
        span: Of the other side.
        ends: FIRST, LAST, both or none.
        whole: How many chunks are seen whole.
        count: How many are visited.
        chunk_of: From a number below `count` to a chunk's in its span.
    """

    block: Any
    span: Any
    ends: Any
    whole: Any
    count: Any
    chunk_of: Callable[[Any], Any]


def step_of(lists: Steps) -> Step:
    """Returns the step that a kernel is at, from references to the lists."""
    step = pl.program_id(2)
    of = pl.program_id(0) if lists.ends.shape[0] > 1 else 0
    scalars = (x[of, step] for x in lists[:5])
    return Step(*scalars, lambda number: lists.chunk[of, step, number])


def either_way(hides: bool, is_whole: Any, act: Callable[[bool], None]) -> None:
    """Lets a kernel act on a tile that is seen whole, or on one that is not.

    Args:
        hides: Whether anything hides keys in this call; else every tile is whole.
        is_whole: False where it never is, else a bool of the kernel.
        act: Takes whether it is, when the kernel is traced; both are compiled.
    """
    if not hides or is_whole is False:
        act(not hides)
        return
    pl.when(is_whole)(lambda: act(True))
    pl.when(jnp.logical_not(is_whole))(lambda: act(False))


def listed_place(steps: Steps, by_rows: bool) -> Callable[..., tuple[Any, ...]]:
    """Returns where a step of a list is, for `window`.

    Args:
        steps: The list.
        by_rows: Whether blocks are of rows, and spans of keys.
    """
    many = steps.block.shape[0] > 1

    def place(b: Any, h: Any, s: Any, block: Any, span: Any, *rest: Any) -> Any:
        of = b if many else 0
        at = block[of, s], span[of, s]
        return b, h, *(at if by_rows else at[::-1])

    return place


def listed(steps: Steps) -> list[Any]:
    """Returns what a kernel reads of a list of steps, as `Steps` takes it."""
    return [x for x in steps if x is not None]


def with_table(
    steps: Steps, pattern: MaskPattern | None, rows: int, keys: int, by_rows: bool
) -> tuple[Steps, dict[str, Window]]:
    """Says of each step which tile of a pattern it has; and the tiles' window, by name.

    Args:
        steps: The list.
        pattern: The pattern, or None: then there is no table.
        rows: Rows of a step.
        keys: Keys of a step.
        by_rows: As in `listed_place`.
    """
    if pattern is None:
        return steps, {}
    table = table_of(pattern, rows, keys)
    which: Any = table.which if by_rows else table.which.T
    if not isinstance(steps.block, np.ndarray):
        which = jnp.asarray(which)
    many = steps.block.shape[0] > 1
    place = list(Steps._fields).index("tile")

    def index(b: Any, h: Any, s: Any, *lists: Any) -> tuple[Any, ...]:
        return lists[place][b if many else 0, s], 0, 0

    tiles = jnp.asarray(table.tiles), pl.BlockSpec((None, rows, keys), index)
    return steps._replace(tile=which[steps.block, steps.span]), {"table": tiles}


def launch(
    body: Callable[..., None],
    name: str,
    static: Static,
    *,
    grid: Sequence[int],
    scalars: Sequence[Any] = (),
    inputs: Mapping[str, Window],
    outputs: Mapping[str, Window],
    scratch: Mapping[str, Any],
    parallel: int,
    values: int = 0,
) -> list[Array]:
    """Runs a kernel.

    Args:
        body: Takes references to the scalars, and then `Refs`.
        name: Of the kernel.
        static: Of the call.
        grid: Numbers of steps, outermost first.
        scalars: What it reads from scalar memory, as its windows do.
        inputs: Arrays with their windows, by name.
        outputs: Shapes with their windows, by name.
        scratch: What it holds beside them, by name.
        parallel: How many axes of the grid, from the first on, may run in any order.
        values: As in `check_fits`.

    Raises:
        UnsupportedError: If it does not fit the memories of the chip.
    """
    names = (*inputs, *outputs, *scratch)
    windows = [*inputs.values(), *outputs.values()]
    limit = None
    if not static.interpret:
        held = windows, scratch.values(), scalars, values
        limit = check_fits(static.operation, name, static.generation, *held)

    def kernel(*refs: Any) -> None:
        listed, held = refs[: len(scalars)], refs[len(scalars) :]
        body(*listed, dict(zip(names, held, strict=True)))

    semantics = ("parallel",) * parallel + ("arbitrary",) * (len(grid) - parallel)
    call: Callable[..., list[Array]] = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=tuple(grid),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in outputs.values()],
            scratch_shapes=list(scratch.values()),
        ),
        out_shape=[x for x, _ in outputs.values()],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=limit
        ),
        interpret=static.interpret,
        name=name,
    )
    return call(*map(jnp.asarray, scalars), *(x for x, _ in inputs.values()))
