"""Names that several plugins claim, and names that one shares with another."""

import pytest

from .distributions import OURS, Site, operation


@pytest.fixture(scope="module")
def named(tmp_path_factory):
    """Plugins that claim each other's names."""
    site = Site(tmp_path_factory.mktemp("named"))

    def add(name, *sources):
        site.add(f"{name}-dist", {name: name}, **{name: "".join(sources)})

    fused = {"cost": "Cost.FUSED"}
    own = {"class_name": "Own"}
    add(
        "north",
        operation("compass", priority=2, **fused),
        operation("north_own", **own),
    )
    add(
        "south",
        operation("compass", priority=1, **fused),
        operation("south_own", **own),
    )
    add("east", operation("street", platforms={"tpu"}))
    add("west", operation("lane", "street"))
    add("left", operation("left_op", "side"))
    add("right", operation("right_op", "side"))
    add("here", operation("here_op", "split", platforms={"cpu"}))
    add("there", operation("there_op", "split", platforms={"tpu"}))
    for name in ("dup_one", "dup_two"):
        site.add(f"{name}-dist", {"dup": name}, **{name: operation("dup_op")})
    script = """
        names = [
            "north:compass", "south:compass", "south-dist:compass",
            "South_Dist:compass", "north_own", "south_own", "split",
            "dup_one-dist:dup_op", "east:street", "west:lane", "left_op",
        ]
        wrong = [
            "compass", "street", "side", "dup_op", "dup:dup_op", "nrth:compass",
            "nobody",
        ]
        from switchax.registry import find_entry
        from switchax.target import Target
        report(
            ours=ours(),
            modules={name: module_of(name) for name in names},
            errors={name: error_of(attend, name) for name in wrong},
            listed=OperationRegistry.list_implementations(),
            auto=explained().chosen,
            candidates=[c.entry.qualified for c in explained().candidates],
            on_tpu=find_entry("split", Target.parse("tpu:v5e")).name,
            on_rocm=error_of(find_entry, "split", Target("rocm")),
        )
    """
    answers = site.run(script)
    answers["doctor"] = site.doctor()
    return answers


@pytest.mark.parametrize(
    ("name", "spellings"),
    [
        ("compass", ["'north:compass' of north-dist 1.0", "'south:compass' of south-"]),
        ("street", ["'east:street'", "'west:lane'"]),
        ("side", ["'left:left_op'", "'right:right_op'", "on cpu"]),
        ("dup_op", ["'dup_one-dist:dup_op'", "'dup_two-dist:dup_op'"]),
        ("dup:dup_op", ["'dup_one-dist:dup_op'", "'dup_two-dist:dup_op'"]),
    ],
    ids=["canonical", "canonical_and_shared", "shared", "one_plugin_name", "qualified"],
)
def test_a_contested_name_is_an_error_that_says_how_to_choose(named, name, spellings):
    error = named["errors"][name]
    assert error.startswith("ContestedNameError: operation: expected one owner of")
    assert all(spelling in error for spelling in spellings)
    assert "use a qualified name, or block one plugin" in error


def test_qualified_names_mean_one_operation(named):
    modules = named["modules"]
    assert modules["north:compass"] == "north"
    for name in ("south:compass", "south-dist:compass", "South_Dist:compass"):
        assert modules[name] == "south"
    assert modules["dup_one-dist:dup_op"] == "dup_one"
    assert modules["east:street"] == "east"
    assert modules["west:lane"] == "west"


def test_a_contested_name_costs_nothing_else(named):
    assert named["ours"] == OURS
    modules = named["modules"]
    assert (modules["north_own"], modules["south_own"]) == ("north", "south")
    assert modules["left_op"] == "left"


def test_contested_names_are_not_listed(named):
    ours = ["chunked", "sdpa", "vanilla"]
    free = ["here_op", "lane", "left_op", "north_own", "right_op", "south_own", "split"]
    assert named["listed"] == sorted([*free, *ours])


def test_auto_still_ranks_every_claimant(named):
    assert named["auto"] == "north:compass"
    assert {"north:compass", "south:compass"} <= set(named["candidates"])


def test_a_shared_name_means_the_one_that_supports_the_target(named):
    assert named["modules"]["split"] == "here"
    assert named["on_tpu"] == "there_op"
    assert named["on_rocm"].startswith("UnsupportedError: ")
    assert "platform=rocm (allowed: tpu)" in named["on_rocm"]


def test_an_unknown_name_gets_the_near_miss(named):
    assert "(did you mean 'north:compass'?)" in named["errors"]["nrth:compass"]
    assert "UnknownOperationError" in named["errors"]["nobody"]


def test_doctor_reports_contested_names_and_exits_1(named):
    code, findings = named["doctor"]
    assert code == 1
    contested = {row["name"] for row in findings["contested"]}
    assert contested == {"compass", "dup_op", "side", "street"}
