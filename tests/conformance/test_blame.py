"""A failure is blamed on the rule that is broken, not on where it was first seen."""

import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from tests.core.kernels import kernel

from switchax.testing.attention import AttentionCall, AttentionCase, draw

CAUSAL = AttentionCase("R12", AttentionCall(causal=True), "refused", feature="causal")


class Transposes(kernel("transposes", {"mask"})):
    """Mixes up the axes of a mask where they are equal."""

    def forward_native(self, query, key, value, *, softmax_scale, mask):
        if mask is not None and mask.shape[2] == mask.shape[3]:
            mask = jnp.swapaxes(mask, 2, 3)
        given = {"softmax_scale": softmax_scale, "mask": mask}
        return super().forward_native(query=query, key=key, value=value, **given)


class Forgets(kernel("forgets", {"mask"})):
    """Takes causal, which core would compute by a mask, and drops it."""

    def __call__(self, *args, causal=False, **given):
        return super().__call__(*args, **given)


def test_what_core_computes_by_a_mask_is_not_blamed_on_what_was_asked():
    assert not CAUSAL.run(Transposes()).is_wrong
    finding = AttentionCase("R3", AttentionCall(mask="full")).run(Transposes())
    assert finding.is_wrong
    assert finding.rule == ""


def test_what_is_lost_is_still_blamed_on_being_accepted():
    finding = CAUSAL.run(Forgets())
    assert (finding.rule, finding.accepted) == ("R12", True)


@pytest.mark.parametrize(
    "returns", [lambda x: None, lambda x: x[0][:, :, :1]], ids=["none", "one head"]
)
def test_what_has_another_shape_is_blamed_on_shapes(returns):
    operation = kernel("other", returns=returns)()
    finding = AttentionCase("R2", AttentionCall(scale=0.3)).run(operation)
    assert finding.rule == "R1"
    assert "expected output of shape (2, 7, 4, 8)" in finding.text


def test_a_wrong_value_is_not_blamed_on_the_call_before_it():
    class IgnoresCausal(kernel("ignores", {"causal", "q_offset"})):
        def forward_native(self, query, key, value, *, softmax_scale, causal, q_offset):
            given = {"query": query, "key": key, "value": value, "causal": False}
            return super().forward_native(softmax_scale=softmax_scale, **given)

    call = AttentionCall(causal=True, offset="last", kv_len=9)
    finding = AttentionCase("R4", call, "in turn").run(IgnoresCausal())
    assert finding.is_wrong
    assert finding.rule == ""


def test_a_snippet_of_a_mesh_brings_its_devices():
    case = AttentionCase("R13", AttentionCall(batch=4, heads=2, kv_heads=2), "mesh")
    found = subprocess.run(
        [sys.executable, "-c", case.snippet("vanilla")],
        env={n: text for n, text in os.environ.items() if n != "XLA_FLAGS"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.stdout.startswith("right"), found.stderr


def test_a_key_is_dirty_only_where_no_head_sees_it():
    call = AttentionCall(mask="by_head", batch=1, q_len=1, kv_len=9, seed=1)
    drawn, clean = draw(call), draw(call, dirty=False)
    mask = drawn.arrays["mask"]
    seen = mask.any(axis=(0, 1, 2))
    assert (mask.any(axis=0) != seen).any(), "a head sees other keys"
    for name in ("key", "value"):
        kept = (drawn.arrays[name] == clean.arrays[name])[0].all(axis=(1, 2))
        np.testing.assert_array_equal(kept, seen)
