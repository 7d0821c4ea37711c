"""The kit is fair to flash attention as it is published, and to no less than that."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest

import switchax
from switchax import ATTENTION, BaseOperation, Capabilities, UnsupportedError
from switchax.testing import conform
from switchax.testing.attention import AttentionCall, AttentionCase
from switchax.testing.attention.programs import Programs
from switchax.testing.conformance import cases_of
from switchax.testing.running import compiled_quickly

LONG = AttentionCall(
    batch=1, q_len=4, kv_len=4096, heads=1, kv_heads=1, dtype="bfloat16", alike=True
)
TALL = AttentionCall(
    batch=1, q_len=4096, kv_len=4, heads=1, kv_heads=1, dtype="bfloat16"
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend(kept, scale, q, k, v):
    """Flash attention 2 as published: backward starts from the output as stored."""
    return forward(kept, scale, q, k, v)[0]


product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def weights(scale, q, k):
    logits = scale * product("bthd,bshd->bhts", q, k)
    lse = jax.nn.logsumexp(logits, axis=-1)
    return jnp.exp(logits - lse[..., None]), lse


def forward(kept, scale, q, k, v):
    p, lse = weights(scale, q, k)
    output = product("bhts,bshd->bthd", p.astype(v.dtype), v).astype(q.dtype)
    return (output, lse), (q, k, v, output)


def backward(kept, scale, residuals, cotangents):
    q, k, v, output = residuals
    d_output, d_lse = cotangents
    p, _ = weights(scale, q, k)
    mean = (output.astype("float32") * d_output.astype("float32")).sum(-1)
    mean = jnp.swapaxes(mean, 1, 2).astype(kept).astype("float32")
    dv = product("bhts,bthd->bshd", p.astype(q.dtype), d_output)
    dp = product("bthd,bshd->bhts", d_output, v)
    ds = (p * (dp - mean[..., None] + d_lse[..., None])).astype(q.dtype)
    dq = scale * product("bhts,bshd->bthd", ds, k)
    dk = scale * product("bhts,bthd->bshd", ds, q)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)


attend.defvjp(forward, backward)


class Flash(BaseOperation):
    kind = ATTENTION
    kept = "float32"
    capabilities = Capabilities(
        dtypes={"bfloat16"},
        features={"lse"},
        differentiable={"query", "key", "value", "lse"},
    )

    @classmethod
    def get_impl_name(cls):
        return "flash"

    def forward_native(self, query, key, value, *, softmax_scale):
        return attend(self.kept, softmax_scale, query, key, value)


class RoundedMean(Flash):
    """What is taken from the cotangents of weights is rounded too."""

    kept = "bfloat16"


@pytest.mark.parametrize("call", [LONG, TALL], ids=["long", "tall"])
def test_backward_may_start_from_the_output_as_it_was_returned(call):
    finding = AttentionCase("R8", call, "accumulation").run(Flash())
    assert not finding.is_wrong, finding


def test_what_is_summed_from_it_is_summed_in_float32():
    finding = AttentionCase("R8", LONG, "accumulation").run(RoundedMean())
    assert finding.is_wrong
    assert finding.quantity == "d_query"


FEW = AttentionCall(batch=1, q_len=1, kv_len=3, head_dim=64, dtype="bfloat16")


@pytest.mark.parametrize(
    ("check", "call"),
    [
        ("accumulation", LONG),
        ("value", dataclasses.replace(FEW, kv_len=300, scale=0.9, plain=True)),
        ("value", dataclasses.replace(FEW, q_len=17, kv_len=33, factor=2.0)),
        ("alone", dataclasses.replace(FEW, kv_len=300, scale=0.9)),
        ("transforms", dataclasses.replace(FEW, scale=0.9)),
    ],
    ids=lambda asked: str(asked).replace(", ", ","),
)
def test_it_is_right_whatever_is_drawn(check, call):
    operation, programs = Flash(), Programs()
    for seed in range(2 if check == "transforms" else 40):
        drawn = dataclasses.replace(call, seed=seed)
        finding = AttentionCase("R8", drawn, check, programs=programs).run(operation)
        assert not finding.is_wrong, (seed, str(finding))


class OneByOne(Flash):
    """The online softmax of the textbook, a key at a time, in float32 throughout."""

    capabilities = Capabilities(dtypes={"float32"})
    carried = "float32"

    def forward_native(self, query, key, value, *, softmax_scale):
        query = jnp.swapaxes(query, 1, 2)

        def step(carry, pair):
            most, total, output = carry
            logit = softmax_scale * jnp.einsum("bhtd,bhd->bht", query, pair[0])
            larger = jnp.maximum(most, logit)
            before, now = jnp.exp(most - larger), jnp.exp(logit - larger)
            output = output * before[..., None] + now[..., None] * pair[1][:, :, None]
            total = total * before + now
            return jax.tree.map(
                lambda x: x.astype(self.carried).astype("float32"),
                (larger, total, output),
            ), None

        start = jnp.full(query.shape[:-1], -1e30), jnp.zeros(query.shape[:-1])
        pairs = jnp.swapaxes(key, 0, 1), jnp.swapaxes(value, 0, 1)
        (_, total, output), _ = jax.lax.scan(
            step, (*start, jnp.zeros_like(query)), pairs
        )
        return jnp.swapaxes(output / total[..., None], 1, 2)


class OneByOneInHalf(OneByOne):
    carried = "bfloat16"


@pytest.mark.parametrize("seed", range(6))
def test_a_sum_may_be_taken_one_by_one_in_float32(seed):
    call = dataclasses.replace(LONG, dtype="float32", seed=seed)
    finding = AttentionCase("R8", call, "accumulation").run(OneByOne())
    assert not finding.is_wrong, finding
    finding = AttentionCase("R8", call, "accumulation").run(OneByOneInHalf())
    assert finding.error > 50


@pytest.mark.parametrize("check", ["second order", "forward mode"])
@pytest.mark.parametrize("seed", range(2))
def test_derivatives_that_are_right_are_so_in_float64(check, seed):
    call = AttentionCall(dtype="float64", seed=seed)
    vanilla = switchax.OperationRegistry.create("vanilla")
    with compiled_quickly():
        finding = AttentionCase("R13", call, check).run(vanilla)
    assert not finding.is_wrong, finding


class Twice(Flash):
    def forward_cpu(self, query, key, value, *, softmax_scale):
        output, lse = super().forward_native(
            query, key, value, softmax_scale=softmax_scale
        )
        return 2 * output, lse


def test_settings_of_the_user_do_not_change_what_is_asked():
    with switchax.use(force_native=True):
        report = conform(Twice, max_failures=1)
    assert not report.passed


class OnTpu(Flash):
    capabilities = Capabilities(platforms={"tpu"}, dtypes={"bfloat16"})


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ((Flash, "nonsense"), "a level of quick, full"),
        ((Flash, "quick", -1), "a seed from 0 to"),
        ((OnTpu,), "a target of tpu, which it declares"),
    ],
    ids=["level", "seed", "platform"],
)
def test_cases_are_asked_for_as_conform_is(asked, says):
    with pytest.raises(ValueError, match=says):
        cases_of(*asked)


class Speechless(Flash):
    def __call__(self, *args, **kwargs):
        raise UnsupportedError("")


def test_a_refusal_without_text_is_one():
    report = conform(Speechless, max_failures=1)
    assert "UnsupportedError" in str(report.failures[0])


class Needy(Flash):
    def __init__(self, metadata=None, *, need):
        super().__init__(metadata)


def test_a_class_that_cannot_be_made_says_what_it_lacks():
    with pytest.raises(switchax.RegistrationError, match="__init__ to take metadata"):
        conform(Needy)
