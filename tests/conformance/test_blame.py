"""A failure is blamed on the rule that is broken, not on where it was first seen."""

import jax.numpy as jnp
import pytest
from tests.core.kernels import kernel

from switchax.testing.attention import AttentionCall, AttentionCase

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
