"""`switchax new`: the files it writes, what it refuses, and that its kernel is right."""

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

from switchax import ATTENTION, __version__
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

from switchax.testing import conform


def test_it_conforms() -> None:
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
        "  pip install -e './switchax-my-flash[test]'",
        "  pytest ./switchax-my-flash",
        "  switchax list",
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
    assert project["optional-dependencies"] == {"test": ["switchax[testing]"]}
    (core,) = map(Requirement, project["dependencies"])
    version = Version(__version__)
    allowed = f">={version.major}.{version.minor},<{version.major}.{version.minor + 1}"
    assert (core.name, core.specifier) == ("switchax", SpecifierSet(allowed))
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
        ("Vanilla", "'Vanilla', which switchax-vanilla has"),
    ],
)
def test_a_name_is_refused(new, tmp_path, name, got):
    result = new(name)
    assert result.exit_code == 2
    assert HOUSE_FORM.fullmatch(result.stderr), result.stderr
    assert f"got {got};" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_left_alone(new, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes").write_text("kept")
    for into, got in (("mine", "mine, which holds notes"), ("mine/notes", "a file")):
        result = new("my-flash", "--into", into)
        assert result.exit_code == 2
        assert HOUSE_FORM.fullmatch(result.stderr), result.stderr
        assert got in result.stderr
    assert written(tmp_path) == {"mine/notes"}


def test_a_folder_that_cannot_be_written_is_a_wrong_call(new, tmp_path):
    (tmp_path / "file").write_text("")
    result = new("my-flash", "--into", "file/plugin")
    assert result.exit_code == 2
    assert HOUSE_FORM.fullmatch(result.stderr), result.stderr


# The kit does the rest, in .ci/check_wheels.py: a kernel of its own has to be right.
CASES = {
    "causal": {"causal": True, "q_offset": -2},
    "segments": {
        "q_segment_ids": jnp.array([[0, 0, 1, -1, 1] + 60 * [5]]),
        "kv_segment_ids": jnp.array([100 * [0] + 29 * [1] + [-1]]),
    },
}


@pytest.mark.parametrize("name", CASES)
def test_its_kernel_agrees_with_the_oracle(name, monkeypatch):
    monkeypatch.syspath_prepend(str(TEMPLATE / "src"))
    attend = importlib.import_module("switchax_newkernel.kernel").attend
    call = ATTENTION  # the kernel takes padded blocks: what core does is done by hand
    assert call.name == "attention"
