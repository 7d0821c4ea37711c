"""Does the kit find each bug, and name the rule that it breaks?"""

import functools
import inspect
import re

import jax
import numpy as np
import pytest

from switchax import ATTENTION, BaseOperation
from switchax.testing import conform
from switchax.testing.attention import AttentionCase, draw
from switchax.testing.suite import Finding

from .block_mutants import BLOCK_MUTANTS
from .cache_mutants import CACHE_MUTANTS
from .meeting_mutants import MEETING_MUTANTS
from .mutants import MEETINGS, MUTANTS, Right, WideLeft
from .narrow_mutants import NARROW_MUTANTS
from .pattern_mutants import PATTERN_MUTANTS
from .rare_mutants import RARE_MUTANTS
from .serving_mutants import SERVING_MUTANTS
from .shape_mutants import SHAPE_MUTANTS
from .way_mutants import WAY_MUTANTS

pytestmark = pytest.mark.heavy


# The others are asked by `tox -e conform`.
IN_CI = {
    "InterleavedHeads",
    "LastBlockUnmasked",
    "WideLeft",
    "AccumulatesInBfloat16",
    "CausalityLostUnderAutodiff",
    "BiasGradientZero",
    "SwallowsKeywords",
    "ScaleCaptured",
    "HeadDimInWholeBlocks",
    "LengthsOfWholeBlocks",
    "MaximumBeforeTheScale",
}


@pytest.fixture
def only_what_differs(monkeypatch):
    """Passes the cases in which a mutant's forward method is traced as Right's is.

    Equal programs have equal derivatives, and Right conforms, which is a test of its
    own.
    """
    run = AttentionCase.run

    def run_if_it_differs(case, operation):
        if _forward_is_its_own(operation) and case.check in ("value", "accumulation"):
            asked = case.call, case.dirty
            if _forward_program(operation, *asked) == _right_program(*asked):
                return Finding()
        return run(case, operation)

    monkeypatch.setattr(AttentionCase, "run", run_if_it_differs)


@pytest.fixture
def not_made_small(monkeypatch):
    """Leaves failures as they are found; their rule and kind are those of the small."""
    monkeypatch.setattr(AttentionCase, "simpler", lambda case: iter(()))


def _forward_is_its_own(operation):
    return isinstance(operation, Right) and (
        type(operation).__call__ is BaseOperation.__call__
    )


@functools.cache
def _right_program(call, dirty):
    return _forward_program(Right(), call, dirty)


def _forward_program(operation, call, dirty):
    """The forward method, traced on what core hands it for a call, as text."""
    drawn = draw(call, dirty)
    asked = {"return_lse": not call.plain, "return_weights": not call.plain}
    given = {**drawn.arrays, **drawn.options, **asked}
    bound = ATTENTION.bind("test", given, operation.metadata)
    plan = ATTENTION.plan(bound.request, operation.capabilities)
    if plan.skip:
        return "answered by core"
    operands, static = ATTENTION.operands(bound, plan)
    given = dict.fromkeys(inspect.signature(operation.forward_native).parameters)
    given |= {name: x for name, x in {**static, **operands}.items() if name in given}
    arrays = {name: x for name, x in given.items() if isinstance(x, jax.Array)}
    forward = operation.forward_native
    program = jax.make_jaxpr(lambda x: forward(**{**given, **x}))(arrays)
    consts = [np.asarray(x).tobytes() for x in program.consts]
    return f"{program} {consts}"


@pytest.mark.further  # minutes; where it fails, those in CI are found under other rules
@pytest.mark.usefixtures("quick_compilation")
def test_what_they_are_made_of_conforms():
    report = conform(Right)
    assert report.passed, str(report)


def each(mutants):
    params = [
        cls if cls.__name__ in IN_CI else pytest.param(cls, marks=pytest.mark.further)
        for cls in mutants
    ]
    return pytest.mark.parametrize("mutant", params, ids=lambda cls: cls.__name__)


@each(MUTANTS)
@pytest.mark.usefixtures("only_what_differs", "not_made_small", "quick_compilation")
def test_each_mutant_is_found_under_its_rule(mutant):
    report = conform(mutant, max_failures=1)
    first = report.failures[0]
    assert (first.rule, first.kind) == MUTANTS[mutant], str(first)


MISTAKES = BLOCK_MUTANTS | RARE_MUTANTS | SHAPE_MUTANTS | MEETING_MUTANTS
MISTAKES |= CACHE_MUTANTS | NARROW_MUTANTS | WAY_MUTANTS | SERVING_MUTANTS
MISTAKES |= PATTERN_MUTANTS


@each(MISTAKES)
@pytest.mark.usefixtures("only_what_differs", "quick_compilation")
def test_each_mistake_of_kernels_is_found_under_its_rule(mutant):
    (failure,) = conform(mutant, max_failures=1).failures
    assert failure.rule in MISTAKES[mutant], str(failure)
    assert failure.kind == "wrong", str(failure)


@each(MEETINGS)
@pytest.mark.usefixtures("only_what_differs", "quick_compilation")
def test_where_two_things_meet_the_smallest_failure_shows_no_third(mutant):
    (failure,) = conform(mutant, max_failures=1).failures
    assert failure.kind == "wrong", str(failure)
    shown = set(re.findall(r"(\w+)=", failure.smallest))
    sizes = {"batch", "q_len", "kv_len", "head_dim", "heads", "kv_heads", "seed"}
    assert shown - sizes <= MEETINGS[mutant], str(failure)
    assert MEETINGS[mutant] - {"offset", "heads"} <= shown, str(failure)


@pytest.mark.usefixtures("only_what_differs", "quick_compilation")
def test_a_failure_is_made_small():
    report = conform(WideLeft, max_failures=1)
    smallest = "value, batch=1, kv_len=3, heads=1, kv_heads=1, window=(2, 0)"
    assert report.failures[0].smallest == smallest
