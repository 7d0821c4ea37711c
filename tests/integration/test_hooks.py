"""Plugins that are objects with hooks, and hooks that raise when called."""

import jax.numpy as jnp
import pytest

import switchax
from switchax import dispatch

from .distributions import OURS, Site, kind, operation

HOOKS = """
from switchax import hookimpl

class Plugin:
    @hookimpl
    def switchax_kinds(self):
        return [Kind()]

    @hookimpl
    def switchax_operations(self):
        return [Operation, Quick]

    @hookimpl
    def switchax_rank(self, request, candidates, target):
        return ["vanilla", "slow_op", "second_op"] if request.q_len > 2 else None

plugin = Plugin()
"""


@pytest.fixture(scope="module")
def hooked(tmp_path_factory):
    """Plugins with hooks, among them some that raise when called."""
    site = Site(tmp_path_factory.mktemp("hooked"))
    site.add(
        "object-dist",
        {"objective": "objective:plugin"},
        objective=operation("second_op", decorator=False, cost="Cost.FUSED")
        + operation(
            "first_op",
            class_name="Quick",
            decorator=False,
            cost="Cost.FUSED",
            priority=1,
        )
        + kind("object_kind")
        + HOOKS,
    )
    site.add(
        "zealous-dist",
        {"zealous": "zealous"},
        zealous="""
            from switchax import hookimpl

            @hookimpl
            def switchax_rank(request, candidates, target):
                raise LookupError(f"no idea about {request.q_len}")

            @hookimpl
            def switchax_decision(decision):
                raise OSError("disk is full")
        """,
    )
    script = """
        import warnings

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            answers = ours()
            ranked = [attend("auto", length) for length in (1, 2, 3, 4)]
        report(
            ours=answers,
            chosen=[d.chosen.entry.name for d in switchax.decisions.recorded()],
            warnings=[str(w.message) for w in caught],
            records=records(),
            kinds=sorted(registrations.kinds()),
            owners=owners(),
        )
    """
    answers = site.run(script)
    answers["doctor"] = site.doctor()
    return answers


def test_an_object_with_hooks_is_a_plugin(hooked):
    assert hooked["records"]["object-dist:objective"]["status"] == "loaded"
    assert hooked["owners"]["first_op"] == ["objective", "object-dist"]
    assert hooked["kinds"] == ["attention", "object_kind"]


def test_a_rank_hook_chooses_among_equals_only(hooked):
    by_core, by_hook = ["first_op"] * 2, ["second_op"] * 2
    assert hooked["chosen"] == ["vanilla", "sdpa", *by_core, *by_hook]


def test_a_hook_that_raises_is_said_once_and_passed_over(hooked):
    assert hooked["ours"] == OURS
    problems = [
        "switchax_decision raised OSError: disk is full",
        "switchax_rank raised LookupError: no idea about 1",
    ]
    assert hooked["records"]["zealous-dist:zealous"]["hook_problems"] == problems
    assert hooked["warnings"] == [
        f"plugin zealous-dist:zealous: {problem}; it is passed over"
        for problem in problems
    ]


@pytest.mark.parametrize(
    ("length", "order"), list(enumerate(["vanilla", [object()], {"vanilla"}, 3], 51))
)
def test_a_rank_that_is_no_list_of_names_is_passed_over(length, order, monkeypatch):
    monkeypatch.setattr(dispatch, "first_result", lambda *_, **__: order)
    x = jnp.ones((1, length, 1, 4))  # of its own: what is equal is chosen once
    with pytest.warns(UserWarning, match="switchax_rank: expected a list of names"):
        switchax.attention(x, x, x)
    recorded = switchax.decisions.recorded()[-1]
    assert recorded.chosen.entry.name == "chunked"


def test_doctor_is_content_with_sound_plugins(hooked):
    code, findings = hooked["doctor"]
    assert code == 0
    assert findings["healthy"]
