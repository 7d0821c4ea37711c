"""README.md shows what is: outputs, the table, and code that runs."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np

import switchax

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_outputs_and_table_are_as_generated():
    command = [sys.executable, ROOT / "tools" / "readme.py", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_is_short_and_shows_output_early():
    lines = README.splitlines()
    assert len(lines) < 150
    assert "```text" in lines[:30]


def test_the_kernel_to_publish_registers():
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
        if "class MyFlash" in block
    ]
    names = {"__name__": "readme_kernel"}
    exec(compile(code, "README.md", "exec"), names)
    try:
        assert switchax.OperationRegistry.get("my_flash") is names["MyFlash"]
    finally:
        switchax.OperationRegistry.unregister(names["MyFlash"])


def test_the_examples_of_chunked_run():
    text = (ROOT / "plugins" / "chunked" / "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names = {}
    for block in blocks:
        exec(compile(block, "plugins/chunked/README.md", "exec"), names)
    assert len(blocks) == 2
    np.testing.assert_allclose(names["output"], names["out"], atol=1e-5)
