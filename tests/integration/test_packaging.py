"""What every distribution of the repository has in common."""

import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from switchax import __version__

ROOT = Path(__file__).parents[2]
PLUGINS = sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml"))
DISTRIBUTIONS = [ROOT / "core", *PLUGINS]

# In pieces, so that this file is no match of its own.
REGISTRIES = re.compile(
    r"pypi\.[a-z]|pytho" + r"nhosted\.|arti" + r"factory|dev" + r"pi\b"
    r"|//\S+/sim" + r"ple\b|-index-" + r"url|--find-" + r"links|find-links *=",
    re.IGNORECASE,
)


def project(folder):
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def import_name(folder):
    return project(folder)["name"].replace("-", "_")


def each(folders):
    return pytest.mark.parametrize("folder", folders, ids=lambda folder: folder.name)


def test_every_plugin_is_seen():
    folders = {path for path in ROOT.glob("plugins/*") if any(path.rglob("*.py"))}
    assert folders == set(PLUGINS)
    assert {"_template", "chunked", "sdpa", "vanilla"} <= {
        folder.name for folder in PLUGINS
    }


def test_versions_agree():
    versions = {folder.name: project(folder)["version"] for folder in PLUGINS}
    assert set(versions.values()) == {__version__}, versions
    assert metadata.version("switchax") == __version__


@each(DISTRIBUTIONS)
def test_metadata_is_the_same_everywhere(folder):
    core, own = project(ROOT / "core"), project(folder)
    for field in ("requires-python", "license", "license-files", "readme"):
        assert own[field] == core[field]
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@each(PLUGINS)
def test_plugin_folder_has_the_same_five_things(folder):
    package = folder / "src" / import_name(folder)
    assert (folder / "README.md").is_file()
    assert (package / "__init__.py").is_file()
    assert (package / "plugin.py").is_file()
    assert (package / "py.typed").is_file()
    assert list((folder / "tests").glob("test_*.py"))
    assert {path.name for path in (folder / "src").iterdir()} == {package.name}


def test_plugins_are_named_after_their_folders():
    names = {folder.name: project(folder)["name"] for folder in PLUGINS}
    assert names.pop("_template") == "switchax-newkernel"
    assert names == {name: f"switchax-{name}" for name in names}


def test_the_template_is_the_one_that_switchax_new_copies():
    copied = ROOT / "core/src/switchax/cli/new_template"
    assert (ROOT / "plugins/_template").resolve() == copied


@each(PLUGINS)
def test_plugin_has_its_entry_point(folder):
    name = import_name(folder).removeprefix("switchax_")
    groups = project(folder)["entry-points"]
    assert groups == {"switchax.plugins": {name: f"{import_name(folder)}.plugin"}}


@each(PLUGINS)
def test_plugin_depends_on_this_core_and_no_other_but_for_its_kernels(folder):
    version = Version(__version__)
    allowed = f">={version.major}.{version.minor},<{version.major}.{version.minor + 1}"
    ours = [
        requirement
        for requirement in map(Requirement, project(folder)["dependencies"])
        if requirement.name.startswith("switchax")
    ]
    # The template borrows its backward pass, blocksparse has the kernels of the other.
    of = {"_template": "switchax-chunked", "blocksparse": "switchax-pallas-flash"}
    names = ["switchax", *[of[name] for name in (folder.name,) if name in of]]
    assert [requirement.name for requirement in ours] == names
    assert {requirement.specifier for requirement in ours} == {SpecifierSet(allowed)}


def test_root_cannot_be_installed():
    root = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "project" not in root
    assert "build-system" not in root


def test_ci_runs_the_test_command_of_the_readme():
    command = (ROOT / ".ci/run").read_text().splitlines()[-1]
    assert command.endswith(".venv/bin/tox")
    assert command in (ROOT / "README.md").read_text().splitlines()


def test_no_committed_file_names_a_registry():
    # safe.directory: CI may run as root on another user's clone.
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    assert ".ci/run" in listing
    found = {
        f"{name}: {match[0]}"
        for name in listing
        if (ROOT / name).is_file()
        for match in REGISTRIES.finditer((ROOT / name).read_text(errors="replace"))
    }
    assert found == set()


@pytest.mark.parametrize(
    "line",
    [
        "see https://" + "pypi." + "org/project/x",
        "--extra-index" + "-url file:///x",
        "https://files.pytho" + "nhosted.org/packages",
    ],
    ids=["page", "option", "files"],
)
def test_a_registry_is_recognised(line):
    assert REGISTRIES.search(line)
