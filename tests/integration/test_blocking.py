"""Which plugins are loaded: blocked, allowed, left to whoever imports them."""

import pytest

from .distributions import Site, operation


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    """Plugins to be blocked, allowed or left alone."""
    site = Site(tmp_path_factory.mktemp("chosen"))
    site.add("first-dist", {"first": "first"}, first=operation("first_op"))
    site.add("second-dist", {"second": "second"}, second=operation("second_op"))
    site.add(
        "borrower-dist",
        {"borrower": "borrower"},
        borrower="import first\n"
        + operation("borrower_op", dtypes={"bfloat16"})
        + "from switchax import registrations\n"
        + "SEEN = [entry.name for entry in registrations.entries()]\n",
    )
    return site


ASK = """
import sys
report(
    listed=OperationRegistry.list_implementations(),
    records=records(),
    first=error_of(attend, "first_op"),
    auto=error_of(attend, "auto"),
    imported=sorted({"first", "second"} & set(sys.modules)),
    seen=getattr(sys.modules.get("borrower"), "SEEN", None),
)
"""


def test_blocked_plugins_are_not_loaded_and_stay_hidden(chosen):
    answers = chosen.run(ASK, SWITCHAX_BLOCK="first, second_dist")
    assert answers["listed"] == ["borrower_op", "chunked", "sdpa", "vanilla"]
    assert answers["records"]["second-dist:second"]["status"] == "blocked"
    assert answers["imported"] == ["first"], "the borrower imports it"
    assert "first_op" not in answers["seen"]
    assert "not loaded: first-dist:first 1.0: blocked" in answers["first"]
    assert "remove first from SWITCHAX_BLOCK" in answers["first"]


def test_only_allowed_plugins_are_loaded(chosen):
    answers = chosen.run(ASK, SWITCHAX_PLUGINS="borrower-dist")
    assert answers["listed"] == ["borrower_op"]
    assert answers["records"]["switchax-vanilla:vanilla"]["status"] == "not allowed"
    assert answers["auto"].startswith("UnsupportedError: auto: expected an operation")
    assert "borrower:borrower_op: dtype=float32 (allowed: bfloat16)" in answers["auto"]
    assert "add vanilla to SWITCHAX_PLUGINS" in answers["auto"]


def test_autoload_off_loads_nothing_but_what_is_imported(chosen):
    answers = chosen.run(
        f"error = error_of(attend, 'vanilla')\nimport second\n{ASK}".replace(
            "report(", "report(error=error,"
        ),
        SWITCHAX_AUTOLOAD="0",
    )
    assert answers["imported"] == ["second"]
    assert answers["listed"] == ["second_op"]
    assert "none loaded" in answers["error"]
    assert (
        "vanilla 0.1.0: not loaded, autoload is off; unset SWITCHAX_AUTOLOAD"
        in (answers["error"])
    )


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Two plugins, and a module of neither, in one namespace package."""
    site = Site(tmp_path_factory.mktemp("shared"))
    for letter in "ab":
        kernel, plugin = f"acme__{letter}_kernel", f"acme__{letter}_plugin"
        site.add(
            f"acme-{letter}",
            {letter: f"acme.{letter}_plugin"},
            files=[f"acme/{letter}_kernel.py", f"acme/{letter}_plugin.py"],
            **{
                kernel: operation(f"op_{letter}"),
                plugin: f"import acme.{letter}_kernel",
            },
        )
    (site.folder / "acme" / "model.py").write_text(operation("mine"))
    return site


OWNED = """
import acme.b_kernel, acme.model
report(mine=error_of(attend, "mine"), b=error_of(attend, "op_b"), owners=owners())
"""


@pytest.mark.parametrize("block", ["", "acme-a"])
def test_plugins_that_share_a_namespace_own_their_files_alone(shared, block):
    answers = shared.run(OWNED, SWITCHAX_BLOCK=block)
    owners = answers["owners"]
    assert owners["op_b"] == ["b", "acme-b"]
    assert owners["mine"] == ["acme", ""]
    assert ("op_a" in owners) is not bool(block)
    assert answers["mine"] == answers["b"] == "no error: 64.0"
