"""Regenerates what README.md shows: outputs of its code, and the plugin table.

    python tools/readme.py           rewrites the README
    python tools/readme.py --check   exits 1 if that would change it

A python block followed by a text block is run, and the text is what it prints. The
table stands between two comments and is read from the installed plugins.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import sys
from pathlib import Path

# Read once, when JAX starts its backend.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import switchax
from switchax.loading import ensure_loaded
from switchax.registrations import entries

README = Path(__file__).resolve().parents[1] / "README.md"
_EXAMPLE = re.compile(r"```python\n(.*?)```\n(\n*)```text\n.*?```\n", re.DOTALL)
_TABLE = re.compile(r"(<!-- plugins -->\n).*?(<!-- /plugins -->)", re.DOTALL)
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu", "tt")


def run(code: str) -> str:
    """Returns what a block of code prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    return printed.getvalue()


def with_outputs(text: str) -> str:
    """Returns the text with the output of every example as it is now."""

    def fill(match: re.Match[str]) -> str:
        code, gap = match.group(1), match.group(2)
        return f"```python\n{code}```\n{gap}```text\n{run(code)}```\n"

    return _EXAMPLE.sub(fill, text)


def plugin_table() -> str:
    """Returns the table of operations, as Markdown."""
    ensure_loaded()
    rows = [
        "| operation | install | platforms | dtypes | cost class | it refuses |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for entry in entries():
        capabilities = entry.operation.capabilities
        platforms = ", ".join(p for p in _PLATFORMS if p in capabilities.platforms)
        dtypes = ", ".join(sorted(capabilities.dtypes))
        lacking = _lacking(entry.operation)
        rows.append(
            f"| `{'`, `'.join(entry.names)}` | `{entry.distribution}` | {platforms} | "
            f"{dtypes} | {capabilities.cost} | {lacking} |"
        )
    return "\n".join(rows) + "\n"


def _lacking(operation: type[switchax.BaseOperation]) -> str:
    """Features refused even after core has adapted the call."""
    have = set(operation.capabilities.features)
    if "mask" in have:  # core folds the rest of visibility into the mask
        have |= {"segment_ids", "q_lengths", "kv_lengths", "causal", "window"}
        have |= {"q_offset", "q_offset_per_batch", "mask_pattern"}
    names = sorted(set(operation.kind.features) - have - {"gqa"})
    return ", ".join(names) or "nothing"


def regenerated(text: str) -> str:
    """Returns the README as it should be."""
    text = with_outputs(text)
    return _TABLE.sub(lambda match: f"{match[1]}{plugin_table()}{match[2]}", text)


def main() -> int:
    """Rewrites or checks the README; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args().check
    before = README.read_text(encoding="utf-8")
    after = regenerated(before)
    if check:
        if before != after:
            sys.stderr.write("README.md is stale: run python tools/readme.py\n")
        return int(before != after)
    README.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
