"""`pytest --switchax-operation NAME`: a test for each case, in a process of its own."""

import subprocess
import sys

import pytest

CONFTEST = """
import dataclasses
import switchax
from switchax import BaseOperation, Capabilities, OperationRegistry, UnsupportedError
from switchax.kinds.attention import AttentionKind
from switchax.testing import Case, Finding, Suite

@dataclasses.dataclass(frozen=True)
class Number(Case):
    number: int
    rule: str = "N1"
    dtype: str = "float32"

    @property
    def title(self):
        return f"number {self.number}"

    def run(self, operation):
        if self.number == 2:
            raise UnsupportedError("not two")
        return Finding(self.number / 2, quantity="sum")

    def snippet(self, name):
        return f"{name}({self.number})"

class Numbers(Suite):
    rules = {"N1": "numbers"}

    def cases(self, operation, platform, level, seed):
        return map(Number, range(seed, 4))

class Kind(AttentionKind):
    name = "numbers"
    suite = Numbers()

@OperationRegistry.register
class Operation(BaseOperation):
    kind = Kind()
    capabilities = Capabilities()

    @classmethod
    def get_impl_name(cls):
        return "numbers"

    def forward_native(self, query, key, value, *, softmax_scale):
        return query

class Refusing(Number):
    claims = frozenset({"bias"})

    def run(self, operation):
        raise UnsupportedError("not ever")

class OneRefusing(Suite):
    rules = {"N1": "numbers"}

    def cases(self, operation, platform, level, seed):
        yield Refusing(0)

class OtherKind(AttentionKind):
    name = "refusals"
    suite = OneRefusing()

@OperationRegistry.register
class Declaring(Operation):
    kind = OtherKind()
    capabilities = Capabilities(features={"bias"}, platforms={"cpu"})

    @classmethod
    def get_impl_name(cls):
        return "refusing"

    def forward_native(self, query, key, value, *, softmax_scale, bias):
        return query
"""


@pytest.fixture(scope="module")
def ask(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "pytest.ini").write_text("[pytest]\n")

    def ask(*arguments):
        command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider"]
        done = subprocess.run(
            [*command, *arguments], cwd=folder, capture_output=True, text=True
        )
        return done.returncode, done.stdout

    return ask


def test_each_case_is_a_test_and_a_failure_shows_its_snippet(ask):
    code, text = ask("--switchax-operation", "numbers")
    assert code == 1
    assert "1 failed, 3 passed, 1 skipped" in text
    assert "  sum is off by 1.5 times what rounding explains" in text
    assert "    numbers(3)" in text
    assert "not two" in text


def test_level_and_seed_reach_the_suite(ask):
    options = ["--switchax-level", "full", "--switchax-seed", "3"]
    code, text = ask("--switchax-operation", "numbers", *options)
    assert code == 1
    assert "numbers[N1-0-number 3]" in text
    assert "1 failed, 1 passed in" in text


def test_what_is_declared_and_always_refused_is_a_failure(ask):
    code, text = ask("--switchax-operation", "refusing", "-n", "2")
    assert code == 1
    assert "1 failed, 1 skipped" in text
    assert "declares bias and refuses it: not ever" in text


def test_an_unknown_name_is_a_wrong_call(ask):
    code, text = ask("--switchax-operation", "nmbers")
    assert code == pytest.ExitCode.USAGE_ERROR
    assert "INTERNALERROR" not in text


def test_without_the_option_pytest_is_as_ever(ask):
    code, text = ask()
    assert code == 5
    assert "no tests ran" in text


def test_the_plugin_imports_nothing_of_jax(ask):
    command = "import sys, switchax_pytest; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command]).returncode == 0
