"""The runner: it counts, makes failures small, and says what could not be tested."""

import dataclasses
import inspect
import json
import math
import os
import time
from types import MappingProxyType

import jax
import numpy as np
import pytest
from click.testing import CliRunner

import switchax
from switchax import (
    BaseOperation,
    Capabilities,
    UnsupportedError,
    __version__,
    registrations,
)
from switchax.cli import make_group, shipped
from switchax.discovery import FoundPlugin
from switchax.kinds.attention import AttentionKind
from switchax.loading import PluginRecord
from switchax.testing import Case, Finding, Report, Suite, conform
from switchax.testing.report import Failure, Result
from switchax.testing.run import Run, with_changes
from switchax.testing.running import devices, shortened


class Mute(Exception):
    def __str__(self):
        return str(1 / 0)


@dataclasses.dataclass(frozen=True)
class Number(Case):
    """What comes of it depends on a number, which can be made smaller."""

    number: int
    does: str = "pass"
    rule: str = "N1"
    dtype: str = "float32"
    claims: frozenset = frozenset()

    @property
    def title(self):
        return f"number {self.number}"

    def run(self, operation):
        if self.does == "refuse":
            raise UnsupportedError("no")
        if self.does == "raise above 3" and self.number > 3:
            raise KeyError("boom")
        if self.does == "wrong above 3" and self.number > 3:
            return Finding(float(self.number), quantity="sum")
        if self.does == "mute":
            raise Mute
        if self.does == "wrong after a call":
            calls = vars(operation).setdefault("calls", [])
            calls.append(self.number)
            return Finding(2.0 * (len(calls) > 1), quantity="sum")
        if self.does == "change":
            os.environ["SWITCHAX_CHANGED"] = "yes"
            jax.config.update("jax_default_matmul_precision", "bfloat16")
            np.random.seed(self.number)
        if self.does == "linger":
            time.sleep(0.5)
        if self.does == "accept":
            return Finding(math.inf, "takes it", "N2", "sum", accepted=True)
        if self.does == "nan":
            return Finding(math.nan, quantity="sum")
        return Finding(0.25 * self.number % 1, quantity="sum")

    def simpler(self):
        if self.number:
            yield dataclasses.replace(self, number=self.number // 2)
            yield dataclasses.replace(self, number=self.number - 1)

    def snippet(self, name):
        return f"{name}({self.number})"


def operation_with(*cases, platforms=("cpu",), features=()):
    class Numbers(Suite):
        rules = MappingProxyType({"N1": "numbers", "N2": "others"})

        def cases(self, operation, platform, level, seed):
            yield from cases

    class Kind(AttentionKind):
        suite = Numbers()

    class Operation(BaseOperation):
        kind = Kind()
        capabilities = Capabilities(platforms=set(platforms), features=set(features))

        @classmethod
        def get_impl_name(cls):
            return "numbers"

        def forward_native(self, query, **others):
            return query

        forward_native.__signature__ = inspect.Signature(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in ("self", "query", "key", "value", "softmax_scale", *features)
        )

    return Operation


def test_what_passes_is_counted_with_its_largest_error():
    report = conform(operation_with(Number(1), Number(3), Number(2)))
    assert report.passed
    assert report.complete
    (result,) = report.results
    assert (result.rule, result.passed, result.failed) == ("N1", 3, 0)
    assert (result.error, result.quantity) == (0.75, "sum")
    assert str(report).startswith("numbers conforms (quick, 3 cases on cpu x 8 in")


@pytest.mark.parametrize(
    ("does", "kind", "text"),
    [
        ("wrong above 3", "wrong", "sum is off by 4 times what rounding explains"),
        ("raise above 3", "raised", "KeyError: 'boom'"),
    ],
)
def test_a_failure_is_made_small(does, kind, text):
    report = conform(operation_with(Number(1), Number(33, does)))
    assert not report.passed
    (failure,) = report.failures
    assert (failure.kind, failure.text.partition(" (at ")[0]) == (kind, text)
    assert (failure.title, failure.smallest) == ("number 33", "number 4")
    assert failure.snippet == "numbers(4)"
    assert "does not conform" in str(report)
    # What is wrong is said of the smallest, not of the first.
    lines = ["N1 number 33", "  smallest: number 4", f"  {failure.text}"]
    lines += ["    numbers(4)"]
    assert str(failure).splitlines() == lines


def test_a_failure_that_needs_the_calls_before_says_so():
    cases = Number(1, "wrong after a call"), Number(2, "wrong after a call")
    (failure,) = conform(operation_with(*cases)).failures
    assert failure.text.endswith(
        "; passes by itself: it depends on the calls before it"
    )
    (failure,) = conform(operation_with(Number(9, "wrong above 3"))).failures
    assert "by itself" not in failure.text


def test_what_is_global_is_set_back_and_its_change_a_failure():
    before = np.random.get_state()[1]
    cases = Number(1), Number(2, "change"), Number(3, "change")
    report = conform(operation_with(*cases))
    (failure,) = report.failures
    assert (failure.rule, failure.title) == ("R12", "number 2")
    changed = "jax_default_matmul_precision from None to 'bfloat16'"
    changed += ", os.environ['SWITCHAX_CHANGED'], the state of numpy.random"
    assert failure.text == f"changes what is global: {changed}"
    assert "SWITCHAX_CHANGED" not in os.environ
    assert jax.config.jax_default_matmul_precision is None
    assert np.array_equal(np.random.get_state()[1], before)


def test_the_snippet_of_a_change_shows_it(capsys):
    (failure,) = conform(operation_with(Number(2, "change"))).failures
    shown = failure.snippet.replace("numbers(2)", "import os; os.environ['JAX_'] = ''")
    assert shown != failure.snippet
    exec(shown, {})
    assert capsys.readouterr().out == "[\"os.environ['JAX_']\"]\n"
    assert "JAX_" not in os.environ


def test_the_devices_that_a_snippet_asks_for_are_no_change(capsys, monkeypatch):
    monkeypatch.setitem(os.environ, "XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    exec(with_changes("\n".join([*devices(), "import math"])), {})
    assert capsys.readouterr().out == "[]\n"


def test_the_snippet_of_a_change_by_an_import_imports_the_plugin(named, monkeypatch):
    entry = named(operation_with(Number(1)))
    plugin = FoundPlugin("numbers", "switchax-numbers", "1.2", "numbers_plugin:made")
    record = PluginRecord(plugin, "loaded", changes=("jax_enable_x64 to True",))
    records = {"switchax-numbers:numbers": record}
    monkeypatch.setattr("switchax.testing.run.ensure_loaded", lambda: records)
    (failure,) = conform(entry.operation).failures
    assert failure.title == "the import of its plugin"
    assert Run(entry.operation).check_declaration([]) == (failure,)
    assert failure.text.endswith("jax_enable_x64 to True, when it is imported")
    assert "\nimport numbers_plugin\n" in failure.snippet


def test_of_a_long_error_both_ends_are_told():
    error = ValueError(f"begins{'x' * 1000}ends")
    assert shortened(error).startswith("ValueError: beginsxxx")
    assert shortened(error).endswith("xxxends")
    assert len(shortened(error)) < 700


def test_an_error_is_told_with_its_place_in_the_operation():
    class Failing(Number):
        def run(self, operation):
            operation.forward_native(None, None, None, softmax_scale=1.0)

    operation = operation_with(Failing(1))

    def forward_native(self, query, key, value, *, softmax_scale):
        raise KeyError("boom")

    operation.forward_native = forward_native
    (failure,) = conform(operation).failures
    line = forward_native.__code__.co_firstlineno + 1
    assert failure.text == f"KeyError: 'boom' (at test_runner.py, line {line})"


def test_a_case_that_does_not_end_is_named(caplog, monkeypatch):
    monkeypatch.setattr("switchax.testing.run._LONG", 0.2)
    conform(operation_with(Number(1), Number(2, "linger"), Number(3)))
    assert caplog.messages == ["numbers: 0.2 s at N1: number 2"]


def test_the_snippet_names_the_plugin_where_another_has_the_name(monkeypatch):
    cases = [Number(9, "wrong above 3")]
    one, other = (
        registrations.Entry(operation_with(*cases), ("numbers",), plugin)
        for plugin in ("one", "other")
    )
    found = "switchax.testing.run.find_entry"
    monkeypatch.setattr(registrations, "entries", lambda: [one, other])
    monkeypatch.setattr(found, lambda name, target: one)
    snippets = [conform(e.operation).failures[0].snippet for e in (one, other)]
    assert snippets == ["numbers(4)", "other:numbers(4)"]


@pytest.mark.parametrize(("error", "said"), [(1.003, "1.003"), (1.00004, "1.00004")])
def test_an_error_that_is_a_failure_does_not_read_as_none(error, said):
    assert f"sum is off by {said} times what" in str(Finding(error, quantity="sum"))


def test_an_error_that_is_no_number_fails():
    report = conform(operation_with(Number(0, "nan")))
    assert not report.passed
    assert Report.from_json(report.to_json()) == report


def test_a_finding_may_name_another_rule():
    report = conform(operation_with(Number(1, "accept"), Number(2)))
    (failure,) = report.failures
    assert (failure.rule, failure.kind, failure.text) == ("N2", "accepted", "takes it")
    assert [(r.rule, r.failed) for r in report.results] == [("N1", 0), ("N2", 1)]


def test_a_rule_of_which_every_case_is_refused_is_said_not_to_be_tested():
    cases = Number(1), Number(2, "refuse", rule="N2"), Number(3, "refuse", rule="N2")
    report = conform(operation_with(*cases))
    assert report.not_tested["rule N2"] == "all of its cases (2) were refused"
    assert report.not_asked == ["N2"]
    assert str(report).splitlines()[0].endswith(" s; not asked: N2)")


def test_a_long_run_does_not_keep_its_programs(monkeypatch):
    dropped = []
    monkeypatch.setattr("switchax.testing.run._KEPT", 2)
    monkeypatch.setattr(jax, "clear_caches", lambda: dropped.append(True))
    assert conform(operation_with(*map(Number, range(5)))).passed
    assert len(dropped) == 2


def test_max_failures_stops_and_says_so():
    cases = Number(9, "wrong above 3"), Number(1)
    report = conform(operation_with(*cases), max_failures=1)
    assert not report.complete
    assert report.cases == 1


def test_a_feature_that_every_case_refuses_is_declared_wrongly():
    cases = [
        Number(0, "refuse", claims=frozenset({"bias"})),
        Number(1, claims=frozenset({"mask"})),
        Number(2, "refuse", claims=frozenset({"mask"})),
    ]
    report = conform(operation_with(*cases, features=("bias", "mask")))
    (failure,) = report.failures
    assert (failure.rule, failure.kind) == ("R12", "refused")
    assert failure.text == "declares bias and refuses it: no"
    assert failure.snippet == "numbers(0)"


def test_all_that_every_case_refuses_is_one_failure_in_one_order():
    cases = [Number(0, "refuse", claims=frozenset({name})) for name in ("mask", "bias")]
    report = conform(operation_with(*cases, features=("bias", "mask")))
    (failure,) = report.failures
    declared = "bias", "mask", "dtype float32"
    said = [f"declares {name} and refuses it: no" for name in declared]
    assert failure.text.startswith("; ".join(said))


@pytest.mark.parametrize(("platforms", "passes"), [(["cpu"], False), (["any"], True)])
def test_a_dtype_that_is_refused_here_may_be_honoured_elsewhere(platforms, passes):
    cases = Number(0, "refuse", dtype="float16"), Number(1)
    report = conform(operation_with(*cases, platforms=platforms))
    assert report.passed is passes
    assert report.not_tested["dtype float16"] == "no"


def test_progress_is_told_before_each_case():
    told = []
    conform(operation_with(Number(1), Number(2)), progress=lambda *a: told.append(a))
    assert [(n, total, case.number) for n, total, case in told] == [
        (0, 2, 1),
        (1, 2, 2),
    ]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"operation": "vanila"}, ValueError, "did you mean 'vanilla'"),
        ({"operation": 3}, TypeError, "a name or an operation class"),
        ({"operation": "vanilla", "level": "slow"}, ValueError, "level of quick, full"),
        ({"operation": "vanilla", "target": "tqu"}, ValueError, "did you mean 'tpu'"),
    ],
)
def test_wrong_arguments(arguments, error, match):
    with pytest.raises(error, match=match):
        conform(**arguments)


def test_a_kind_without_a_suite_says_so():
    operation = operation_with()
    type(operation.kind).suite = switchax.OperationKind.suite
    with pytest.raises(ValueError, match="kind with a conformance suite"):
        conform(operation)


FAILURE = [field.name for field in dataclasses.fields(Failure)]
DAMAGED = [
    "",
    "[]",
    "{}",
    "[" * 100_000,
    '{"switchax_conformance": 1}',
    '{"switchax_conformance": true}',
    '{"switchax_conformance": 1, "results": [3], "failures": []}',
    '{"switchax_conformance": 1, "results": 3, "failures": []}',
]


def test_what_a_report_says_does_not_move_a_terminals_cursor():
    report = conform(operation_with(Number(1)))
    hostile = dataclasses.replace(report, device="cpu\x1b[2J")
    assert "\x1b" not in str(Report.from_json(hostile.to_json()))


def test_refused_cases_are_told_apart():
    report = conform(operation_with(Number(1), Number(2, "refuse")))
    assert "(quick, 2 cases, of which 1 were refused, on" in str(report)


@pytest.mark.parametrize("text", DAMAGED, ids=range(len(DAMAGED)))
def test_damaged_reports_are_one_clear_error(text):
    with pytest.raises(ValueError, match=r"Report\.from_json: expected a report, got"):
        Report.from_json(text)


def test_fields_of_other_types_are_damaged():
    data = conform(operation_with(Number(1))).to_dict()
    for field, value in [
        ("operation", 3),
        ("versions", {"jax": 1}),
        ("complete", "yes"),
        ("not_tested", []),
        ("seed", []),
        ("seconds", "x"),
        ("seconds", math.inf),
        ("results", [{"rule": 1, "dtype": "float32"}]),
        ("results", [{"rule": "N1", "dtype": "float32", "passed": "x"}]),
        ("failures", [dict.fromkeys(FAILURE, 1)]),
        ("failures", {}),
        ("failures", ""),
        ("results", {}),
    ]:
        with pytest.raises(ValueError, match=f"wrong type of {field}"):
            Report.from_json(json.dumps({**data, field: value}))


def test_a_number_beyond_floats_is_damage():
    data = conform(operation_with(Number(1))).to_dict()
    with pytest.raises(ValueError, match=r"Report\.from_json: expected a report, got"):
        Report.from_json(json.dumps({**data, "seconds": 10**400}))


def test_an_error_that_cannot_say_its_text_is_a_failure_like_others():
    report = conform(operation_with(Number(1, "mute")))
    (failure,) = report.failures
    assert failure.kind == "raised"
    assert failure.text.startswith("Mute: (its text raised ZeroDivisionError) (at ")


def test_a_report_of_another_level_is_damaged():
    data = conform(operation_with(Number(1))).to_dict()
    with pytest.raises(ValueError, match="level 'certified' is none of"):
        Report.from_json(json.dumps({**data, "level": "certified"}))


@pytest.mark.parametrize("seed", [-1, 1.5, True, "0", 2**30 + 1])
def test_a_seed_is_a_number_from_0_on(seed):
    with pytest.raises(ValueError, match=f"a seed from 0 to {2**30}, got"):
        conform(operation_with(Number(1)), seed=seed)


@pytest.mark.parametrize("number", [0, -1, 1.5, True, "a"])
def test_a_number_of_failures_is_one_from_1_on(number):
    with pytest.raises(ValueError, match="max_failures from 1 on, or None, got"):
        conform(operation_with(Number(1)), max_failures=number)


@pytest.fixture
def named(monkeypatch):
    """Puts an operation class under the name "numbers" for the command line."""

    def put(operation):
        entry = registrations.Entry(
            operation, ("numbers",), "numbers", "switchax-numbers", "1.2"
        )
        module = "switchax.testing.conformance"
        monkeypatch.setattr(f"{module}.find_entry", lambda name, target: entry)
        monkeypatch.setattr(registrations, "entries", lambda: [entry])
        return entry

    return put


def run(*arguments):
    return CliRunner().invoke(
        make_group(), ["conform", "numbers", "--jobs", "1", *arguments]
    )


def test_the_command_shows_a_table_and_writes_a_report(named, tmp_path):
    named(operation_with(Number(1), Number(2)))
    path = tmp_path / "numbers.json"
    result = run("--report", str(path))
    assert result.exit_code == 0
    assert "N1    numbers  float32  2" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("numbers conforms")
    report = Report.from_json(path.read_text())
    assert report.versions["switchax-numbers"] == "1.2"
    assert run("--json").exit_code == 0


def test_a_report_is_written_though_nobody_reads(named, tmp_path, monkeypatch):
    def gone(*anything):
        raise BrokenPipeError

    named(operation_with(Number(1)))
    monkeypatch.setattr("switchax.cli.conform.show_table", gone)
    assert run("--report", str(tmp_path / "numbers.json")).exit_code
    assert Report.from_json((tmp_path / "numbers.json").read_text()).passed


def test_a_report_is_written_where_the_command_was_called(named, tmp_path, monkeypatch):
    class Wandering(Number):
        def run(self, operation):
            os.chdir("/")
            return super().run(operation)

    monkeypatch.chdir(tmp_path)
    named(operation_with(Wandering(1)))
    assert run("--report", "numbers.json").exit_code == 0
    assert (tmp_path / "numbers.json").is_file()


def test_the_command_says_how_far_it_is_where_nobody_sees_a_bar(named, monkeypatch):
    monkeypatch.setattr("switchax.cli.conform._SECONDS", 0)
    named(operation_with(Number(1), Number(2)))
    assert run().stderr == "numbers: 0 of 2 cases\nnumbers: 1 of 2 cases\n"


def test_the_command_fails_with_the_snippet(named):
    named(operation_with(Number(9, "wrong above 3")))
    result = run("--full")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    at = lines.index("smallest: number 4")
    assert lines[at - 1] == "N1 numbers: number 9"
    assert lines[at + 1].startswith("sum is off by 4 times")
    assert lines[at + 2] == "numbers(4)"
    assert "does not conform (full" in result.stdout


def test_wrong_calls_of_the_command_are_one_line(named, tmp_path):
    named(operation_with(Number(1)))
    result = run("--report", str(tmp_path / "no" / "file.json"))
    assert result.exit_code == 2
    assert "make the folder first" in result.stderr
    assert "name a file" in run("--report", "").stderr
    assert run("--report", "").exit_code == run("--seed", "-1").exit_code == 2
    assert run("--seed", str(2**30 + 1)).exit_code == 2
    full = run("--report", "/dev/full")
    assert (full.exit_code, "name another" in full.stderr) == (1, True)
    assert "numbers conforms" in full.stdout  # what was found is not lost
    folder = run("--report", str(tmp_path))
    assert (folder.exit_code, folder.stdout) == (2, "")
    assert "is a directory" in folder.stderr
    assert CliRunner().invoke(make_group(), ["conform"]).exit_code == 2


def test_a_name_that_is_not_installed_is_told_how_a_class_is_asked():
    result = CliRunner().invoke(make_group(), ["conform", "vanila"])
    assert result.exit_code == 2
    assert "did you mean 'vanilla'" in result.stderr
    assert "switchax.testing.conform(MyOperation)" in result.stderr


@pytest.mark.parametrize(
    ("change", "level"),
    [
        ({}, "quick on cpu x 8"),
        ({"level": "full"}, "full on cpu x 8"),
        (
            {"versions": {"switchax-numbers": "1.1", "switchax": __version__}},
            "quick on cpu x 8, of 1.1",
        ),
        ({"complete": False}, "failed quick on cpu x 8"),
        ({"operation": "other"}, "failed quick on cpu x 8"),
        ({"kind": "rotary"}, "failed quick on cpu x 8"),
        ({"results": ()}, "failed quick on cpu x 8"),
        ({"results": (Result("N1", "float32", 1, 1),)}, "failed quick on cpu x 8"),
        (
            {"versions": {"switchax-numbers": "1.2", "switchax": "0.0.1"}},
            "quick on cpu x 8, of 0.0.1 of switchax",
        ),
        ({"computed": False}, "quick on cpu x 8, compiled only"),
        (None, "damaged report"),
    ],
)
def test_list_shows_the_level_of_a_shipped_report(
    named, tmp_path, monkeypatch, change, level
):
    entry = named(operation_with(Number(1)))
    monkeypatch.setattr(shipped.importlib.resources, "files", lambda package: tmp_path)
    assert shipped.shipped_level(entry) == ""
    (tmp_path / "conformance").mkdir()
    text = "{"
    if change is not None:
        report = conform(entry.operation)
        text = dataclasses.replace(report, **change).to_json()
    (tmp_path / "conformance" / "numbers.json").write_text(text)
    assert shipped.shipped_level(entry) == level


def test_list_shows_a_report_that_is_no_text_as_damaged(named, tmp_path, monkeypatch):
    entry = named(operation_with(Number(1)))
    monkeypatch.setattr(shipped.importlib.resources, "files", lambda package: tmp_path)
    (tmp_path / "conformance").mkdir()
    (tmp_path / "conformance" / "numbers.json").write_bytes(b"\xff\xfe{}")
    assert shipped.shipped_level(entry) == "damaged report"
