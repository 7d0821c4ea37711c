"""The example examples/rotary: a kind that core has never heard of."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from switchax import __version__

from .distributions import OURS, Site
from .test_layering import imports_of, tops

pytestmark = pytest.mark.heavy
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "rotary"
PACKAGE = FOLDER / "src" / "switchax_rotary"
PROJECT = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The distribution as an installer would leave it."""
    site = Site(tmp_path_factory.mktemp("rotary"))
    shutil.copytree(
        PACKAGE, site.folder / PACKAGE.name, ignore=shutil.ignore_patterns("__pyca*")
    )
    entry_points = PROJECT["entry-points"]["switchax.plugins"]
    site.add(PROJECT["name"], entry_points, version=PROJECT["version"])
    return site


@pytest.fixture(scope="module")
def answers(site):
    script = """
        import sys
        from click.testing import CliRunner
        from switchax.cli import make_group

        def command(*arguments):
            done = CliRunner().invoke(make_group(), arguments)
            return [done.exit_code, done.output]

        found = records()
        heavy = [name for name in sys.modules if "pallas" in name]

        import jax
        from switchax_rotary import rotary

        shapes = ["--arg", "x=float32[1,8,2,64]", "--arg", "positions=int32[8]"]
        places = jnp.arange(4, dtype="int32")
        explained = switchax.explain(
            kind="rotary", x=X, positions=places, rotary_dim=4
        )
        report(
            records=found,
            heavy=heavy,
            kinds=sorted(registrations.kinds()),
            owners=owners(),
            ours=ours(),
            listed=OperationRegistry.list_implementations("rotary"),
            explained=explained.to_dict(),
            turned=rotary(X, places).shape,
            interpreted=rotary(X, places, operation="rotary_pallas").shape,
            as_attention=error_of(attend, "rotary_xla"),
            command_list=command("list", "--json"),
            command_explain=command("explain", "--kind", "rotary", "--json", *shapes),
            command_wrong=command("explain", "--kind", "rotary", *shapes[:2]),
        )
    """
    return site.run(script)


def test_the_kind_and_its_operations_are_found(answers):
    record = answers["records"]["switchax-example-rotary:rotary"]
    assert record["status"] == "loaded", record
    assert answers["kinds"] == ["attention", "rotary"]
    assert answers["listed"] == ["rotary_pallas", "rotary_xla"]
    assert answers["owners"]["rotary_xla"] == ["rotary", "switchax-example-rotary"]
    assert answers["heavy"] == []


def test_attention_is_what_it_was(answers):
    assert answers["ours"] == OURS
    wrong = (
        "expected an operation of kind 'attention', got 'rotary_xla' of kind 'rotary'"
    )
    assert wrong in answers["as_attention"]


def test_calls_of_the_kind_are_dispatched_and_explained(answers):
    assert answers["turned"] == answers["interpreted"] == [1, 4, 2, 8]
    explained = answers["explained"]
    assert explained["chosen"] == "rotary:rotary_xla"
    assert explained["features"] == ["partial"]
    refusals = {c["operation"]: c["refusals"] for c in explained["candidates"]}
    (refusal,) = refusals["rotary:rotary_pallas"]
    assert (refusal["field"], refusal["actual"]) == ("partial", "4 of 8")


def test_the_command_line_knows_the_kind(answers):
    code, text = answers["command_list"]
    assert code == 0
    for name in ("rotary_xla", "rotary_pallas"):
        assert f'"operation": "{name}"' in text
    code, text = answers["command_explain"]
    assert code == 0
    assert '"chosen": "rotary:rotary_xla"' in text
    code, text = answers["command_wrong"]
    assert code == 2
    assert "expected positions to be an array" in text


def test_doctor_is_content(site):
    code, findings = site.doctor()
    assert code == 0
    assert findings["healthy"]


def test_it_uses_what_core_makes_public():
    names = set(imports_of(PACKAGE))
    assert {n for n in tops(names) if n.startswith("switchax")} == {"switchax"}
    modules = {n for n in names if n.startswith(("switchax.", "jax."))}
    assert not {n for n in modules if any(p.startswith("_") for p in n.split("."))}


def test_its_metadata_is_that_of_the_repository():
    assert PROJECT["version"] == __version__
    assert (FOLDER / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert len((FOLDER / "README.md").read_text().splitlines()) < 40


def test_its_own_tests_pass_where_it_is_installed(site):
    """Conformance of both operations and the broken ones, in a process of its own."""
    path = [str(site.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=FOLDER,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "skipped" not in done.stdout  # XLA_FLAGS of this process gives devices
