"""Who imports whom: core nobody, a plugin core's public modules, and nothing heavy."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent for path in ROOT.glob("plugins/*/src/*/plugin.py"))
HEAVY = ("pallas", "triton")
BORROWED = {"switchax_chunked.borrow_backward"}  # by the template, for its gradients
KERNELS = {"switchax_blocksparse": "switchax_pallas_flash"}  # which it depends on


def imported(program):
    """The modules that a process has after a program."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SWITCHAX_")}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            f"{program}\nimport json, sys; print(json.dumps([*sys.modules]))",
        ],
        env=environment | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def tops(modules):
    return {module.partition(".")[0] for module in modules}


@pytest.fixture(scope="module")
def jax_alone():
    return imported("import jax, jax.numpy, numpy")


def test_importing_core_imports_no_plugin_and_nothing_heavy(jax_alone):
    more = imported("import switchax") - jax_alone
    unwanted = {"flax", "rich", "click", "hypothesis", "pytest"}
    assert not tops(more) & unwanted
    assert not {name for name in tops(more) if name.startswith("switchax_")}
    assert not {name for name in more if any(word in name for word in HEAVY)}
    assert not {name for name in more if name.startswith("switchax.testing")}


def test_discovery_imports_nothing_heavy(jax_alone):
    discovery = "import switchax; switchax.OperationRegistry.list_implementations()"
    more = imported(discovery) - jax_alone
    ours = {"switchax_chunked", "switchax_sdpa", "switchax_vanilla"}
    assert ours <= tops(more), "they were loaded"
    assert not tops(more) & {"flax", "rich", "click"}
    assert not {name for name in more if any(word in name for word in HEAVY)}


def imports_of(package):
    """Every module that a package's source imports, also inside functions."""
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_plugin_imports_no_other_plugin(package):
    modules = set(imports_of(package))
    if package.name == "switchax_newkernel":
        modules -= BORROWED
    ours = {name for name in tops(modules) if name.startswith("switchax")}
    assert ours <= {"switchax", package.name, KERNELS.get(package.name)}
    assert "switchax" in ours


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_plugin_imports_nothing_private_of_core_or_jax(package):
    private = {
        module
        for module in imports_of(package)
        if module.startswith(("switchax.", "jax."))
        and any(part.startswith("_") for part in module.split("."))
    }
    assert private == set()


def test_core_imports_no_plugin():
    modules = set(imports_of(ROOT / "core/src/switchax")) - BORROWED
    assert {name for name in tops(modules) if "switchax" in name} == {"switchax"}
