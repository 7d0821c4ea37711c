"""`switchax new`: the files it writes, what it refuses, that its kernel is right."""

import importlib
import re
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from switchax import __version__
from switchax.cli import make_group
from switchax.kinds.attention.oracle import attention_oracle, attention_oracle_vjp

ROOT = Path(__file__).parents[2]
TEMPLATE = resources.files("switchax.cli") / "new_template"
HOUSE_FORM = re.compile(r"switchax new: expected [^\n]+, got [^\n]+; [^\n]+\n")
FILES = {
    ".github/workflows/ci.yml",
    ".gitignore",
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "src/switchax_my_flash/__init__.py",
    "src/switchax_my_flash/kernel.py",
    "src/switchax_my_flash/operation.py",
    "src/switchax_my_flash/plugin.py",
    "src/switchax_my_flash/py.typed",
    "tests/test_my_flash.py",
}
TEST = '''"""my-flash holds the contract of its kind."""

import os

import pytest

from switchax.testing import conform


def test_it_conforms(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("switchax_operation"):
        pytest.skip("its cases are asked one by one")
    # Read when JAX starts: a CPU stands for eight devices, so that meshes are tested.
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    report = conform("my-flash")
    assert report.passed, report
'''


@pytest.fixture
def new(tmp_path, monkeypatch):
    """Calls `switchax new` in an empty folder, with words for a pipe."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        runner = CliRunner(env={"FORCE_COLOR": None})
        return runner.invoke(make_group(), ["new", *arguments], prog_name="switchax")

    return call


def written(folder):
    return {
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()
    }


def test_writes_a_distribution_and_what_to_do_next(new, tmp_path):
    result = new("my-flash")
    folder = tmp_path / "switchax-my-flash"
    assert result.exit_code == 0, result.output
    assert written(folder) == FILES
    assert result.stdout.splitlines() == [
        "wrote 11 files to switchax-my-flash; next:",
        "  pip install ./core ./plugins/chunked  (in a clone of switchax)",
        "  pip install -e './switchax-my-flash[test]'",
        "  switchax list",
        "  switchax conform my-flash  (some minutes; pytest asks the same)",
    ]
    assert (folder / "tests/test_my_flash.py").read_text() == TEST
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    text = "".join((folder / name).read_text() for name in FILES)
    assert "newkernel" not in text.lower()
    assert "class MyFlashAttention(BaseOperation)" in text
    assert 'return "my-flash"' in text


def test_the_distribution_names_its_entry_point_and_this_core(new, tmp_path):
    assert new("my-flash", "--into", "here/there").exit_code == 0
    text = (tmp_path / "here/there/pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    assert project["name"] == "switchax-my-flash"
    assert project["entry-points"] == {
        "switchax.plugins": {"my-flash": "switchax_my_flash.plugin"}
    }
    assert project["optional-dependencies"] == {
        "test": ["switchax[testing]", "pytest-xdist"]
    }
    core, chunked = map(Requirement, project["dependencies"])
    version = Version(__version__)
    allowed = f">={version.major}.{version.minor},<{version.major}.{version.minor + 1}"
    assert (core.name, core.specifier) == ("switchax", SpecifierSet(allowed))
    assert chunked.name == "switchax-chunked"  # whose backward pass is borrowed
    own = tomllib.loads((ROOT / "core/pyproject.toml").read_text())["project"]
    for field in ("requires-python", "license", "license-files"):
        assert project[field] == own[field]


def test_what_it_writes_is_discovered_before_the_kernel_is_imported(new, tmp_path):
    assert new("my-flash", "--into", ".").exit_code == 0
    script = """
import sys
import switchax_my_flash.plugin
from switchax import OperationRegistry
print(OperationRegistry.get("my-flash").__name__)
assert "jax.experimental.pallas" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path / "src",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "MyFlashAttention\n"), done.stderr


def test_an_empty_folder_will_do(new, tmp_path):
    (tmp_path / "empty").mkdir()
    assert new("my-flash", "--into", "empty").exit_code == 0
    assert written(tmp_path / "empty") == FILES


def test_what_tools_leave_beside_the_template_is_not_copied(new, tmp_path, monkeypatch):
    copy = tmp_path / "package/new_template"
    (copy / "src/__pycache__").mkdir(parents=True)
    (copy / "src/__pycache__/kernel.pyc").write_bytes(b"\xff")
    (copy / ".ruff_cache").mkdir()
    (copy / ".ruff_cache/file").write_bytes(b"\xff")
    (copy / "README.md").write_text("newkernel")
    monkeypatch.setattr(resources, "files", lambda package: tmp_path / "package")
    assert new("my-flash").exit_code == 0
    assert written(tmp_path / "switchax-my-flash") == {"README.md"}


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("auto", "'auto'"),
        ("3d", "'3d'"),
        ("flash-", "'flash-'"),
        ("_flash", "'_flash'"),
        ("my.flash", "'my.flash'"),
        ("my flash", "'my flash'"),
        ("flásh", "'flásh'"),
        ("", "''"),
        ("vanilla", "'vanilla', which switchax-vanilla has"),
        ("cudnn", "'cudnn', which switchax-sdpa has"),
        ("chunked", "'chunked', which switchax-chunked has"),
        ("Vanilla", "'Vanilla', which switchax-vanilla has"),
        ("AUTO", "'AUTO'"),
        ("pytest", "'pytest'"),
        ("Switchax", "'Switchax'"),
        ("switchax-mine", "'switchax-mine'"),
        ("f" * 41, f"'{'f' * 41}'"),
    ],
)
def test_a_name_is_refused(new, tmp_path, name, got):
    result = new(name)
    assert result.exit_code == 2
    assert HOUSE_FORM.fullmatch(result.stderr), result.stderr
    assert f"got {got};" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_name_with_capitals_has_modules_without(new, tmp_path):
    assert new("MyFlash").exit_code == 0
    folder = tmp_path / "switchax-MyFlash"
    assert (folder / "src/switchax_myflash/operation.py").is_file()
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]["switchax.plugins"]
    assert points == {"MyFlash": "switchax_myflash.plugin"}
    assert 'return "MyFlash"' in (
        folder / "src/switchax_myflash/operation.py"
    ).read_text("utf-8")


def test_the_code_in_its_readme_is_formatted_by_the_longest_name(new, tmp_path):
    name = "f" * 40
    assert new(name).exit_code == 0
    readme = (tmp_path / f"switchax-{name}" / "README.md").read_text("utf-8")
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert blocks
    assert all(len(line) <= 88 for block in blocks for line in block.splitlines())


def test_a_folder_with_something_in_it_is_left_alone(new, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").write_text("kept")
    for into, got in (("mine", "mine, which holds notes"), ("mine/notes", "a file")):
        result = new("my-flash", "--into", into)
        assert result.exit_code == 2
        assert HOUSE_FORM.fullmatch(result.stderr), result.stderr
        assert got in result.stderr
    assert written(tmp_path) == {"mine/notes"}


def test_a_folder_that_pip_cannot_be_told_is_a_wrong_call(new, tmp_path):
    result = new("my-flash", "--into", "my[flash]")
    assert result.exit_code == 2
    assert HOUSE_FORM.fullmatch(result.stderr), result.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_a_wrong_call(new, tmp_path):
    (tmp_path / "file").write_text("")
    result = new("my-flash", "--into", "file/plugin")
    assert result.exit_code == 2
    assert HOUSE_FORM.fullmatch(result.stderr), result.stderr


IDS = (np.arange(64) // 32 - np.eye(64, dtype=int)[40], np.arange(128) // 50)
CASES = {
    "plain": {},
    "causal": {"causal": True, "q_offset": -2},
    "segments": {
        "q_segment_ids": IDS[0][None].astype("int32"),
        "kv_segment_ids": IDS[1][None].astype("int32"),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_its_kernel_agrees_with_the_oracle(name, monkeypatch):
    # The kit asks more, of what is installed: see .ci/check_wheels.py.
    monkeypatch.syspath_prepend(str(TEMPLATE / "src"))
    attend = importlib.import_module("switchax_newkernel.kernel").attend
    options = {"causal": False, "q_offset": 0} | CASES[name]
    ids = {
        f"{side}_segment_ids": options.pop(f"{side}_segment_ids", None)
        for side in ("q", "kv")
    }
    rng = np.random.default_rng(0)
    shapes = [
        (1, 4, 64, 8),
        (1, 2, 128, 8),
        (1, 2, 128, 16),
        (1, 4, 64, 16),
        (1, 4, 64),
    ]
    *arrays, d_output, d_lse = (rng.normal(size=s).astype("float32") for s in shapes)
    given = [jnp.asarray(array) for array in arrays]
    unseen = {"plain": 128, "causal": 62, "segments": 100}[name]
    given[1:] = [array.at[:, :, unseen:].set(jnp.nan) for array in given[1:]]

    def run(q, k, v):
        return attend(q, k, v, softmax_scale=0.3, interpret=True, **ids, **options)

    (output, lse), vjp = jax.vjp(jax.jit(run), *given)
    asked = {"softmax_scale": 0.3, "layout": "bhtd", **ids, **options}
    expected = attention_oracle(*arrays, **asked)
    np.testing.assert_allclose(output, expected.output, atol=2e-6)
    np.testing.assert_allclose(lse, expected.lse, atol=2e-6)
    wanted = attention_oracle_vjp(*arrays, d_output=d_output, d_lse=d_lse, **asked)
    found = vjp((jnp.asarray(d_output), jnp.asarray(d_lse)))
    for argument, gradient in zip(("query", "key", "value"), found, strict=True):
        np.testing.assert_allclose(gradient, wanted[argument], atol=1e-5)
