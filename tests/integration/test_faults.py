"""What a plugin may do wrong, and that it costs nobody else anything.

Each world below is one folder of distributions and one process that was asked about
them; a test reads what it needs of the answers.
"""

import sys
import time
from types import ModuleType

import pytest

from switchax import Settings, loading
from switchax.discovery import FoundPlugin

from .distributions import OURS, Site, kind, operation


@pytest.fixture(scope="module")
def broken(tmp_path_factory):
    """Many broken plugins at once, first asked by several threads."""
    site = Site(tmp_path_factory.mktemp("broken"))
    later = Site(tmp_path_factory.mktemp("later"))

    def add(name, source="", **modules):
        site.add(f"{name}-dist", {name: name}, **{name: source}, **modules)

    add("raising", "raise ValueError('out of\\nluck')")
    add("halfway", operation("half") + "raise OSError('disk')")
    site.add(
        "hooked-dist",
        {"hooked": "hooked:plugin"},
        hooked=operation("hooked_good", class_name="Good", decorator=False)
        + operation("auto", class_name="Bad", decorator=False)
        + kind("hooked_kind")
        + """
from switchax import hookimpl

class Plugin:
    @hookimpl
    def switchax_kinds(self):
        return [Kind()]

    @hookimpl
    def switchax_operations(self):
        return [Good, Bad]

    @hookimpl
    def switchax_rank(self, request, candidates, target):
        raise AssertionError("a failed plugin is asked nothing")

plugin = Plugin()
""",
    )
    add("leaving", "import sys; sys.exit('bye')")
    add("newer", "SWITCHAX_CONTRACT = 2\n" + operation("newer_op"))
    site.add(
        "object-dist",
        {"objective": "objective:plugin"},
        objective="""
            class Plugin:
                SWITCHAX_CONTRACT = 7

            plugin = Plugin()
        """,
    )
    add("wordy", "SWITCHAX_CONTRACT = '1'")
    add("ahead", "from switchax import NotThereYet")
    site.add("gone-dist", {"gone": "gone_module"})
    site.add("part-dist", {"part": "part:nothing"}, part="")
    add("needy", "import a_library_that_is_missing")
    add("typo", "def broken(:")
    crowd = [operation("crowd", class_name=name) for name in ("First", "Second")]
    add("crowded", "".join(crowd))
    for name in ("shade", "shadow"):
        site.add(f"{name}-dist", {name: "shaded"}, shaded=operation("shaded_op"))

    site.add("bare-dist", {"bare": "bare"}, metadata="", bare=operation("bare_op"))
    site.add("twice-dist", {"twice": "twice_new"}, "2.0", twice_new="")
    later.add("twice_dist", {"twice": "twice_old", "old": "twice_old"}, twice_old="")
    site.add("moved-dist", b"[console_scripts]\nmoved = moved:main\n", "2.0")
    later.add("moved-dist", {"moved": "moved"}, moved="raise ValueError('stale')")
    add(
        "asking",
        operation("asking_op")
        + "SEEN = OperationRegistry.list_implementations()\n"
        + "OperationRegistry.get('asking_op')",
    )
    add("borrower", "import lender\n" + operation("borrower_op"))
    add("lender", operation("lender_op"))
    add("helped", "import helper_package", helper_package=operation("helped_op"))
    site.add("extra-dist", {"extra": "extra [fast]"}, extra=operation("extra_op"))
    for name in ("twin_a", "twin_b"):
        site.add(f"{name}-dist", {"twin": name}, **{name: operation(f"{name}_op")})
    site.add("brk-dist", {"vanilla": "m_brk"}, m_brk="raise ImportError('nope')")
    add(
        "calling",
        operation("calling_op")
        + "import jax.numpy as jnp, switchax\n"
        + "switchax.attention(*[jnp.ones((1, 1, 1, 1))] * 3, operation='vanilla')",
    )
    add(
        "configuring",
        operation("configuring_op")
        + "import switchax; switchax.configure(operation='vanilla')",
    )
    add("zz_slow", "import time; time.sleep(0.5)\n" + operation("slow_op"))

    script = """
        from concurrent.futures import ThreadPoolExecutor
        from threading import Barrier

        def choice():
            attend("auto")
            return switchax.decisions.recorded()[-1].chosen.entry.qualified

        first_call, second_call = choice(), choice()
        barrier = Barrier(3)

        def ask(_):
            barrier.wait()
            return OperationRegistry.list_implementations()

        with ThreadPoolExecutor(3) as pool:
            lists = list(pool.map(ask, range(3)))
        import asking
        report(
            ours=ours(),
            lists=lists,
            records=records(),
            kinds=sorted(registrations.kinds()),
            owners=owners(),
            seen=asking.SEEN,
            unknown=error_of(attend, "half"),
            first_call=first_call,
            second_call=second_call,
        )
    """
    answers = site.run(script, later)
    answers["doctor"] = site.doctor(later)
    return answers


def failure(world, key):
    record = world["records"][key]
    assert record["status"] == "failed"
    return record


def test_broken_plugins_cost_the_others_nothing(broken):
    assert broken["ours"] == OURS
    statuses = {key: record["status"] for key, record in broken["records"].items()}
    assert set(statuses.values()) == {"loaded", "failed"}
    loaded = {"asking", "bare", "borrower", "extra", "helped", "lender", "zz_slow"}
    loaded |= {"chunked", "configuring", "sdpa", "shade", "twice", "twin", "vanilla"}
    assert {
        key.partition(":")[2] for key, status in statuses.items() if status == "loaded"
    } == loaded


def test_discovery_from_several_threads_answers_them_alike(broken):
    first, *others = broken["lists"]
    assert "slow_op" in first
    assert others == [first, first]


def test_raising_at_import_is_kept_with_its_traceback(broken):
    record = failure(broken, "raising-dist:raising")
    assert record["reason"] == "ValueError: out of luck"
    assert "raising.py" in record["details"]
    assert "SWITCHAX_BLOCK=raising" in record["fix"]
    assert "SWITCHAX_BLOCK=brk-dist" in failure(broken, "brk-dist:vanilla")["fix"]


def test_a_plugin_that_asks_too_early_is_told_so(broken):
    reason = failure(broken, "calling-dist:calling")["reason"]
    assert "plugins after the one that asks while it is imported; ask later" in reason


def test_what_a_plugin_configures_holds_from_the_first_call(broken):
    assert broken["first_call"] == broken["second_call"] == "vanilla:vanilla"


EQUAL = """
class Provider:
    def __eq__(self, other):
        {answer}

provider = Provider()
"""


@pytest.mark.parametrize(
    "answer", ["return True", "raise ValueError", "return other.x"]
)
def test_a_provider_that_equals_others_is_still_one_of_its_own(tmp_path, answer):
    site = Site(tmp_path)
    equal = EQUAL.format(answer=answer)
    site.add("aaa-dist", {"aaa": "aaa:provider"}, aaa=equal)
    answers = site.run("report(ours=ours(), records=records())")
    assert answers["ours"] == OURS
    statuses = {record["status"] for record in answers["records"].values()}
    assert statuses == {"loaded"}


def test_who_names_another_s_module_does_not_take_it(tmp_path):
    site = Site(tmp_path)
    site.add("aaa-dist", {"aaa": "shipped"})
    shipped = operation("shipped_op")
    site.add("ships-dist", {"ships": "shipped"}, files=["shipped.py"], shipped=shipped)
    answers = site.run("report(records=records(), owners=owners())")
    assert answers["owners"]["shipped_op"] == ["ships", "ships-dist"]
    assert answers["records"]["ships-dist:ships"]["status"] == "loaded"
    assert (
        "which ships-dist:ships provides" in failure(answers, "aaa-dist:aaa")["reason"]
    )


def test_a_plugin_that_fails_leaves_no_setting_and_no_axis(tmp_path):
    site = Site(tmp_path)
    site.add(
        "leaver-dist",
        {"leaver": "leaver"},
        leaver="""
            import switchax
            from switchax import PartitionAxis

            switchax.configure(operation="gone", strict=True)
            PartitionAxis.register("__LEFT__", "tp")
            raise OSError("disk")
        """,
    )
    answers = site.run("""
        from switchax import PartitionAxis

        switchax.configure(force_native=True)
        attend("auto")
        settings = switchax.current_settings()
        report(
            operation=settings.operation,
            strict=settings.strict,
            native=settings.force_native,
            axes=sorted(PartitionAxis.get_registered_axes()),
        )
    """)
    assert answers == {"operation": [], "strict": False, "native": True, "axes": []}


def test_what_an_import_changes_for_all_is_said(tmp_path):
    site = Site(tmp_path)
    changing = "import jax\njax.config.update('jax_enable_x64', True)\n"
    site.add("wide-dist", {"wide": "wide"}, wide=changing + operation("wide_op"))
    _, findings = site.doctor()
    changes = {p["plugin"]: p["changes"] for p in findings["plugins"]}
    changed = "jax_enable_x64 from False to True"
    assert changes.pop("wide") == [changed]
    assert not any(changes.values())
    answers = site.run("""
        from switchax.testing import conform

        (failure,) = conform("wide_op", max_failures=1).failures
        report(rule=failure.rule, text=failure.text)
    """)
    text = f"changes what is global: {changed}, when it is imported"
    assert answers == {"rule": "R12", "text": text}


def test_raising_halfway_leaves_nothing_registered(broken):
    failure(broken, "halfway-dist:halfway")
    assert "half" not in broken["owners"]


def test_a_failing_hook_operation_leaves_nothing_registered(broken):
    assert "'auto'" in failure(broken, "hooked-dist:hooked")["reason"]
    assert "hooked_good" not in broken["owners"]
    assert "hooked_kind" not in broken["kinds"]


def test_leaving_at_import_does_not_end_the_process(broken):
    assert failure(broken, "leaving-dist:leaving")["reason"] == "SystemExit: bye"


@pytest.mark.parametrize(("name", "spoken"), [("newer", "2"), ("objective", "7")])
def test_another_contract_is_not_loaded(broken, name, spoken):
    key = {"newer": "newer-dist:newer", "objective": "object-dist:objective"}[name]
    reason = failure(broken, key)["reason"]
    distribution = key.partition(":")[0]
    assert "expected contract 1, which this switchax speaks, got " in reason
    assert f"SWITCHAX_CONTRACT={spoken}; install a {distribution} for " in reason
    assert f"for contract 1, or a switchax for contract {spoken}" in reason
    assert "newer_op" not in broken["owners"]


def test_a_contract_that_is_no_int_is_not_loaded(broken):
    reason = failure(broken, "wordy-dist:wordy")["reason"]
    assert "SWITCHAX_CONTRACT='1'; install a wordy-dist for contract 1" in reason
    assert "or a switchax" not in reason


def test_a_contract_that_is_not_stated_is_the_first(monkeypatch):
    monkeypatch.setitem(sys.modules, "quiet", ModuleType("quiet"))
    monkeypatch.setattr(loading, "CONTRACT", 2)
    record = loading._load(
        FoundPlugin("quiet", "quiet-dist", "1.0", "quiet"), Settings()
    )
    assert "expected contract 2" in record.reason
    assert "got SWITCHAX_CONTRACT=1" in record.reason


def test_a_plugin_whose_import_does_not_end_is_named(monkeypatch, caplog):
    module = ModuleType("slow")
    monkeypatch.setitem(sys.modules, "slow", module)
    monkeypatch.setattr(loading, "_LONG", 0.1)
    monkeypatch.setattr(loading, "_resolve", lambda plugin: time.sleep(0.4) or module)
    loading._load(FoundPlugin("slow", "slow-dist", "1.0", "slow"), Settings())
    loading.hooks.unregister(name="slow-dist:slow")
    assert caplog.messages == [
        "plugin slow-dist:slow: 0.1 s of importing slow, and not done"
    ]


@pytest.mark.parametrize(
    ("key", "reason", "fix"),
    [
        ("ahead-dist:ahead", "NotThereYet", "matching versions of it and switchax"),
        (
            "gone-dist:gone",
            "No module named 'gone_module'",
            "correct the entry point gone = 'gone_module'",
        ),
        ("part-dist:part", "no attribute 'nothing'", "upgrade or uninstall part-dist"),
        (
            "needy-dist:needy",
            "a_library_that_is_missing",
            "install what provides 'a_library_that_is_missing'",
        ),
        ("typo-dist:typo", "SyntaxError", "upgrade or uninstall typo-dist"),
        ("crowded-dist:crowded", "got 'crowd', which crowded.First", "uninstall"),
        ("shadow-dist:shadow", "shade-dist:shade provides already", "uninstall"),
    ],
)
def test_what_a_plugin_lacks_is_said_with_what_to_do(broken, key, reason, fix):
    record = failure(broken, key)
    assert reason in record["reason"]
    assert "\n" not in record["reason"]
    assert fix in record["fix"]


def test_a_plugin_without_metadata_is_loaded(broken):
    assert broken["owners"]["bare_op"] == ["bare", "bare_dist"]


def test_metadata_twice_on_the_path_counts_once(broken):
    found = [key for key in broken["records"] if key.startswith(("twice", "moved"))]
    assert found == ["twice-dist:twice"]


def test_a_plugin_may_ask_the_registry_while_it_is_imported(broken):
    assert "asking_op" in broken["seen"]


def test_ownership_follows_the_package_that_defines_a_class(broken):
    assert broken["owners"]["lender_op"] == ["lender", "lender-dist"]
    assert broken["owners"]["borrower_op"] == ["borrower", "borrower-dist"]
    assert broken["owners"]["helped_op"] == ["helped", "helped-dist"]


def test_one_entry_point_name_in_two_distributions_is_two_plugins(broken):
    assert broken["owners"]["twin_a_op"] == ["twin", "twin_a-dist"]
    assert broken["owners"]["twin_b_op"] == ["twin", "twin_b-dist"]


def test_the_final_error_names_what_failed_to_load(broken):
    assert broken["unknown"].startswith(
        "UnknownOperationError: operation: expected one"
    )
    assert (
        "not loaded: halfway-dist:halfway 1.0: failed, OSError: disk"
        in broken["unknown"]
    )
    assert "SWITCHAX_BLOCK=halfway" in broken["unknown"]


def test_doctor_reports_what_failed_and_exits_1(broken):
    code, findings = broken["doctor"]
    assert code == 1
    statuses = {row["plugin"]: row["status"] for row in findings["plugins"]}
    assert statuses["raising"] == "failed"
    assert statuses["vanilla"] == "loaded"


def test_an_interrupt_passes_and_the_next_question_goes_on(tmp_path):
    site = Site(tmp_path)
    site.add(
        "eager-dist",
        {"eager": "eager"},
        eager=operation("eager_op")
        + """
from switchax import hookimpl

@hookimpl
def switchax_rank(request, candidates, target):
    return ["eager:eager_op"]
""",
    )
    site.add(
        "stopped-dist",
        {"stopped": "stopped.plugin"},
        stopped____init__="",
        stopped__operation=operation("stopped_op"),
        stopped__plugin="""
            import os
            from . import operation

            if os.environ.pop("INTERRUPT", ""):
                raise KeyboardInterrupt
        """,
    )
    script = """
        try:
            ensure_loaded()
            interrupted = False
        except KeyboardInterrupt:
            interrupted = True
        report(
            interrupted=interrupted,
            ours=ours(),
            statuses=[record["status"] for record in records().values()],
            listed=OperationRegistry.list_implementations(),
        )
    """
    answers = site.run(script, INTERRUPT="1")
    assert answers["interrupted"]
    assert answers["ours"] == OURS
    assert answers["statuses"] == ["loaded"] * 5
    assert answers["listed"] == ["chunked", "eager_op", "sdpa", "stopped_op", "vanilla"]


MALFORMED = b"[switchax.plugins]\nthis is no entry point\n"
TORN = b"[switchax.plugins\nbad = torn\n"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("some-kernel", MALFORMED, "malformed entry_points.txt"),
        ("some-kernel", TORN, "malformed entry_points.txt"),
        ("switchax-kernel", b"\xff\xfe\x00", "cannot read entry_points.txt"),
        ("unrelated", b"[other]\nthis is no entry point\n", None),
        ("unrelated", b"\xff\xfe\x00", None),
    ],
    ids=["line", "section", "encoding", "unrelated_line", "unrelated_encoding"],
)
def test_a_damaged_entry_point_file_costs_one_distribution(
    tmp_path, name, text, problem
):
    site = Site(tmp_path)
    site.add(name, text)
    # JAX reads these files too, and may not start: so no arrays, and a target by name.
    answers = site.run(
        """
        report(
            records=records(),
            chosen={name: explained(name).chosen for name in ("vanilla", "sdpa")},
            unknown=explained("nobody").error,
        )
        """,
        arrays=False,
    )
    assert answers["chosen"] == {"vanilla": "vanilla:vanilla", "sdpa": "sdpa:sdpa"}
    failed = [r for r in answers["records"].values() if r["status"] == "failed"]
    if problem is None:
        assert not failed
        return
    assert problem in failed[0]["reason"]
    assert failed[0]["fix"] == f"reinstall {name}"
    assert f"not loaded: {name}:? 1.0: failed, {problem}" in answers["unknown"]


@pytest.mark.parametrize("text", [MALFORMED, b"[other]\nthis is no entry point\n"])
def test_the_first_call_names_the_damaged_file_that_stops_jax(tmp_path, text):
    site = Site(tmp_path)
    site.add("some-kernel", text)
    script = """
        import numpy as np

        x = np.ones((1, 2, 1, 8), "float32")
        report(
            call=error_of(switchax.attention, x, x, x),
            listed=error_of(OperationRegistry.list_implementations),
        )
        """
    answers = site.run(script, arrays=False)
    for answer in answers.values():
        assert answer.startswith("RuntimeError: JAX: expected a device to start on")
        assert "some_kernel-1.0.dist-info/entry_points.txt" in answer


def test_doctor_runs_beside_a_damaged_file(tmp_path):
    site = Site(tmp_path)
    site.add("some-kernel", MALFORMED)
    code, findings = site.doctor()
    assert code == 1
    statuses = {row["distribution"]: row["status"] for row in findings["plugins"]}
    assert statuses["some-kernel"] == "failed"
    assert statuses["switchax-vanilla"] == "loaded"
