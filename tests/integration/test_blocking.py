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
    assert answers["listed"] == ["borrower_op", "sdpa", "vanilla"]
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
