"""Inspects in a process of its own, as libtpu's settings and JAX's platform need."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from switchax.checks import fail_value
from switchax.errors import house_message, near_miss
from switchax.metadata import OperationMetadata
from switchax.target import Target

from .chips import GENERATIONS, environment
from .outcome import Inspection, NotCompiledError

__all__ = ["PASSES", "inspect_operation"]

PASSES = ("forward", "gradients")
_LINES = 8  # of what a process that died had said
_INSTALL = "pip install 'switchax[inspect]', or libtpu alone (Linux on x86)"


def inspect_operation(
    operation: str,
    arguments: Mapping[str, Any],
    target: str | Target,
    *,
    metadata: OperationMetadata | None = None,
    passes: Sequence[str] = PASSES,
    dumps: Path | None = None,
) -> Inspection:
    """Compiles a call for a TPU that need not be here, and reads its schedule.

    The call is compiled for one chip, by libtpu, in a process of its own; it takes
    seconds. Schedules say how many bundles a tile takes and what occupies them, not how
    long a chip waits for memory.

    Args:
        operation: Name of an operation of an installed plugin.
        arguments: Of the call, by name; arrays as `jax.ShapeDtypeStruct`.
        target: A generation such as "tpu:v6e".
        metadata: Of the operation, for instance with `operation_configs`.
        passes: "forward", "gradients" (the forward pass with the gradients of all that
            the operation declares), or both.
        dumps: A folder to keep what libtpu writes; None keeps nothing.

    Returns:
        What was found, for each pass.

    Raises:
        ValueError: If the target is no TPU generation that libtpu compiles for, for
            unknown passes, or for a wrong call.
        UnsupportedError: If the operation refuses the call there.
        ModuleNotFoundError: If libtpu is not installed; the text says how.
        NotCompiledError: If the compiler fails, for instance for want of vector memory.

    Example:
        >>> x = jax.ShapeDtypeStruct((1, 4096, 8, 128), "bfloat16")
        >>> call = {"query": x, "key": x, "value": x, "causal": True}
        >>> found = inspect_operation("pallas_flash", call, "tpu:v6e")
        >>> found.passes[0].kernels[0].hot.occupancy["MATMUL"]
    """
    there = _generation(target)
    wrong = [name for name in passes if name not in PASSES]
    if wrong or not passes:
        rule, got = f"passes of {', '.join(PASSES)}", f"passes={list(passes)!r}"
        raise fail_value("inspect", rule, got, "pass one or both")
    if importlib.util.find_spec("libtpu") is None:
        text = house_message("inspect", "the TPU's compiler", "no libtpu", _INSTALL)
        raise ModuleNotFoundError(text)
    with _folder(dumps) as folder:
        asked = operation, dict(arguments), there, metadata, tuple(passes)
        kind, value = _in_a_process(there, folder, asked)
    if kind == "raised":
        raise value
    found: Inspection = value
    return found


def _generation(target: str | Target) -> Target:
    there = Target.parse(target)
    if there.platform == "tpu" and there.generation in GENERATIONS:
        return there
    known = [f"tpu:{name}" for name in GENERATIONS]
    got = f"target={str(there)!r}{near_miss(str(there), known)}"
    rule = f"a generation of {', '.join(known)}"
    raise fail_value("inspect", rule, got, "libtpu compiles for these")


@contextlib.contextmanager
def _folder(dumps: Path | None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="switchax-inspect-") as made:
        if dumps is None:
            yield Path(made)
            return
        dumps.mkdir(parents=True, exist_ok=True)
        if any(dumps.iterdir()):
            got, todo = f"dumps={str(dumps)!r}, which is not empty", "name another"
            raise fail_value("inspect", "an empty folder, or none", got, todo)
        yield dumps


def _in_a_process(there: Target, folder: Path, asked: Any) -> tuple[str, Any]:
    with tempfile.TemporaryDirectory(prefix="switchax-inspect-") as between:
        question, answer = Path(between, "question"), Path(between, "answer")
        question.write_bytes(pickle.dumps(asked))
        process = subprocess.run(
            [sys.executable, "-m", "switchax.inspection.child", between, str(folder)],
            env={**os.environ, **environment(there.generation, str(folder))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
        if answer.is_file():
            found: tuple[str, Any] = pickle.loads(answer.read_bytes())
            return found
    said = "\n".join(process.stderr.strip().splitlines()[-_LINES:])
    got = f"a process that ended with {process.returncode} and said: {said}"
    todo = "see what libtpu says"
    text = house_message("inspect", "a program that compiles", got, todo)
    return "raised", NotCompiledError(text)
