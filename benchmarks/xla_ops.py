"""Where XLA spends the time of a compiled function on a CPU, from its own trace."""

import collections
import gzip
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(?P<name>[\w.\-]+) = \S+ (?P<code>[\w\-]+)\(")
COMPUTATION = re.compile(r"(?:ENTRY )?%(?P<name>[\w.\-]+) \(")


def primitives(text: str) -> dict[str, str]:
    """Name each instruction of a compiled program by what it computes.

    A fusion is named by its last primitive, or "dot" where it holds a product. What
    holds other instructions of its own, such as a loop, is left out.
    """
    found, products, calls, inside = {}, set(), {}, ""
    for line in text.splitlines():
        if computation := COMPUTATION.match(line):
            inside = computation["name"]
        elif instruction := INSTRUCTION.match(line):
            name, code = instruction.groups()
            if code in ("while", "conditional", "call"):
                continue
            if code == "dot":
                products.add(inside)
            called = re.search(r"calls=%([\w.\-]+)", line)
            calls[name] = called[1] if called else None
            path = re.search(r'op_name="([^"]*)"', line)
            found[name] = path[1].split("/")[-1] if path else code
    for name, called in calls.items():
        if called in products:
            found[name] = "dot"
    return found


def seconds_by_op(
    call: Callable[..., Any], operands: list[jax.Array], times: int
) -> dict[str, float]:
    """Sum what each kind of operation takes in one call, most first.

    Args:
        call: Jitted.
        operands: Of the call.
        times: Calls that are traced.

    Returns:
        Seconds by primitive. What runs on several threads counts once.
    """
    names = primitives(call.lower(*operands).compile().as_text())
    jax.block_until_ready(call(*operands))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(times):
                jax.block_until_ready(call(*operands))
        (file,) = Path(folder).rglob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    total: collections.Counter[str] = collections.Counter()
    for event in events:
        if event.get("ph") == "X" and event["name"] in names:
            total[names[event["name"]]] += event["dur"] / 1e6 / times
    return dict(total.most_common())
