"""A run of conformance that several processes divide among them."""

import json
import os
import re
import time

import pytest

from .distributions import Site

_COUNTING = """
import dataclasses
import multiprocessing
import os
import signal
import time

from switchax import BaseOperation, Capabilities, OperationRegistry, UnsupportedError
from switchax.kinds.attention import AttentionKind
from switchax.testing import Case, Finding, Suite


@dataclasses.dataclass(frozen=True)
class Number(Case):
    number: int
    rule: str
    dtype: str = "float32"
    claims: frozenset = frozenset()

    @property
    def title(self):
        return f"number {self.number}"

    def run(self, operation):
        return operation.count(self.number)

    def snippet(self, name):
        return f"{name}({self.number})"


class Numbers(Suite):
    rules = {"N1": "numbers", "N2": "others", "N3": "never"}

    def cases(self, operation, platform, level, seed):
        for number in range(9):
            claims = frozenset({"mask"} if number == 4 else {"bias"} & {number})
            rule = "N3" if number == 8 else f"N{1 + number // 4}"
            yield Number(number, rule, claims=claims)


class Kind(AttentionKind):
    name = "counting"
    suite = Numbers()


class Counting(BaseOperation):
    kind = Kind()
    capabilities = Capabilities(platforms={"cpu"}, features={"mask"})

    @classmethod
    def get_impl_name(cls):
        return cls.__name__.lower()

    def forward_native(self, query, key, value, *, softmax_scale, mask=None):
        return query

    def count(self, number):
        return Finding((1 + number) / 16, quantity=f"number {number}")


@OperationRegistry.register
class Right(Counting):
    pass


@OperationRegistry.register
class Wrong(Counting):
    def count(self, number):
        if number == 8:
            raise UnsupportedError("never")
        if number in (2, 3, 5, 7):
            return Finding(float(number), quantity="count")
        return super().count(number)


@OperationRegistry.register
class Maskless(Counting):
    def count(self, number):
        if number == 4:
            raise UnsupportedError("no masks")
        return super().count(number)


@OperationRegistry.register
class Killed(Counting):
    def count(self, number):
        if number == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().count(number)


@OperationRegistry.register
class Interrupted(Counting):
    def count(self, number):
        raise KeyboardInterrupt("by itself")


@OperationRegistry.register
class Forking(Counting):
    def count(self, number):
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=len, args=((),))
        process.start()
        process.join()
        return super().count(number if process.exitcode == 0 else 100)


@OperationRegistry.register
class Hanging(Counting):
    def count(self, number):
        print(f"at {os.getpid()}.", flush=True)
        time.sleep(60)


@OperationRegistry.register
class Torn(Counting):
    def __init__(self, metadata=None):
        if os.getpid() != int(os.environ.get("ASKED_BY", os.getpid())):
            os._exit(0)
        super().__init__(metadata)
"""


_SCRIPT = """
from switchax.cli import main

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("counting"))
    site.add("counting-dist", {"counting": "counting"}, counting=_COUNTING)
    return site


@pytest.fixture(scope="module")
def answers(site):
    """Reports by operation and number of jobs, and what was told meanwhile."""
    return site.run(
        """
        import os
        from switchax.testing import conform
        from switchax.testing.jobs import Died

        os.environ["ASKED_BY"] = str(os.getpid())
        reports, told = {}, []

        def asked(name, jobs, **others):
            found = conform(name, jobs=jobs, **others).to_dict()
            del found["seconds"]
            reports[f"{name} {jobs}"] = found

        for name in ("right", "wrong", "maskless"):
            asked(name, 1)
        asked("right", 3, progress=lambda *one: told.append([*one[:2], one[2].number]))
        for name in ("wrong", "maskless", "killed", "interrupted", "forking"):
            asked(name, 2)
        wrong = [error_of(lambda jobs=jobs: conform("right", jobs=jobs))
            for jobs in (0, True, 2.0)]

        @OperationRegistry.register
        class Here(OperationRegistry.get("right")):
            get_impl_name = classmethod(lambda cls: "here")

        wrong += [error_of(lambda: conform("here", jobs=2)),
            error_of(lambda: conform("torn", jobs=2))]
        report(reports=reports, told=told, wrong=wrong)
        """,
        arrays=False,
    )


@pytest.mark.parametrize(
    ("name", "jobs"), [("right", 3), ("wrong", 2), ("maskless", 2)]
)
def test_a_report_is_the_same_of_several_processes(answers, name, jobs):
    alone, divided = (answers["reports"][f"{name} {count}"] for count in (1, jobs))
    assert divided == alone
    assert alone["complete"]


def test_what_is_divided_is_asked_once_each(answers):
    report = answers["reports"]["right 3"]
    passed = {result["rule"]: result["passed"] for result in report["results"]}
    assert passed == {"N1": 4, "N2": 4, "N3": 1}
    assert [result["error"] for result in report["results"]] == [0.25, 0.5, 9 / 16]
    assert [count for count, _, _ in answers["told"]] == list(range(9))
    assert sorted(number for _, _, number in answers["told"]) == list(range(9))
    assert {total for _, total, _ in answers["told"]} == {9}


def test_the_first_failure_of_a_rule_is_the_one_of_the_least_number(answers):
    report = answers["reports"]["wrong 2"]
    titles = [failure["title"] for failure in report["failures"]]
    assert titles == ["number 2", "number 5"]
    said = report["not_tested"]["rule N3"]
    assert said == "all of its cases (1) were refused"


def test_what_is_refused_in_one_process_is_a_wrong_declaration(answers):
    (failure,) = answers["reports"]["maskless 2"]["failures"]
    assert failure["text"] == "declares mask and refuses it: no masks"
    assert failure["snippet"] == "maskless(4)"


def test_a_process_that_dies_fails_the_case_that_it_was_at(answers):
    report = answers["reports"]["killed 2"]
    (failure,) = report["failures"]
    assert (failure["title"], failure["kind"]) == ("number 5", "raised")
    ended = "a process of the run ended by SIGKILL, which stopped the run"
    assert failure["text"] == ended
    assert sum(result["passed"] for result in report["results"]) >= 2
    assert failure["snippet"] == "killed(5)"
    assert not report["complete"]


def test_an_operation_may_start_processes(answers):
    report = answers["reports"]["forking 2"]
    assert not report["failures"]
    assert report["complete"]


def test_nothing_is_left_when_the_command_is_killed(site):
    asked = ["-m", "switchax", "conform", "hanging", "--jobs", "2"]
    with site.start(*asked) as command:
        said = ""
        while said.count("at ") < 2 or not said.endswith(".\n"):
            said += command.stderr.readline()
        command.kill()
    numbers = [int(number) for number in re.findall(r"at (\d+)", said)]
    end = time.monotonic() + 30
    while any(map(is_running, numbers)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(is_running, numbers))


def is_running(number):
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_operation_that_interrupts_itself_fails(answers):
    (failure,) = answers["reports"]["interrupted 2"]["failures"]
    assert "ended with KeyboardInterrupt: by itself" in failure["text"]


def test_what_cannot_be_divided_is_refused(answers):
    *numbers, here, torn = answers["wrong"]
    for text in numbers:
        assert text.startswith("ValueError: conform: expected jobs from 1 on")
    assert "an operation of an installed plugin, for several jobs" in here
    assert torn == "Died: a process of the run ended with exit code 0"


def test_the_command_divides_by_itself(site, tmp_path):
    # A script does not look into the folder, and nor do the processes that it starts.
    (tmp_path / "pickle.py").write_text("raise SystemExit('not the library')")
    script = site.folder / "command.py"
    script.write_text(_SCRIPT)
    done = site.python(str(script), "conform", "wrong", "--json", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["complete"]


def test_the_command_says_where_a_run_ended(site):
    done = site.command("conform", "torn", "--jobs", "2", ASKED_BY="0")
    assert done.returncode == 1
    assert "expected a run to its end" in done.stderr
    assert "Traceback" not in done.stderr
