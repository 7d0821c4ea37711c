"""What dispatch costs: nothing at run time, one trace, adaptations that it lists."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import switchax
from switchax import (
    ATTENTION,
    BaseOperation,
    Capabilities,
    Cost,
    OperationMetadata,
    UnsupportedError,
)
from switchax.kinds.attention import position_mask
from switchax_vanilla.kernel import attend

from . import attention_cases as cases
from .attention_cases import Case
from .kernels import kernel
from .standins import registration


def normalised(compiled):
    """Optimised HLO without what names, places and numbers add to it."""
    text = compiled.as_text()
    text = re.sub(
        r"^(FileNames|FunctionNames|FileLocations|StackFrames)\n(.+\n)*",
        "",
        text,
        flags=re.M,
    )
    text = re.sub(r"^HloModule \S+", "HloModule", text)
    text = re.sub(r", (metadata|frontend_attributes)=\{[^{}]*\}", "", text)
    names = {}

    def rename(match):
        return names.setdefault(match[0], f"%{len(names)}")

    return re.sub(r"%[\w.\-]+", rename, text)


def programs(function, *arrays):
    """Of the function and of its gradient."""

    def loss(*arrays):
        return function(*arrays).sum()

    return [
        normalised(jax.jit(f).lower(*arrays).compile())
        for f in (function, jax.grad(loss, argnums=(0, 1, 2)))
    ]


def vanilla_directly(query, key, value):
    visible = position_mask(query.shape[1], key.shape[1], True, None)
    return attend(query, key, value, softmax_scale=0.125, visible=visible).output


DIRECT = {
    "vanilla": vanilla_directly,
    "sdpa": functools.partial(jax.nn.dot_product_attention, is_causal=True),
}


@pytest.mark.parametrize("name", DIRECT)
def test_the_compiled_program_is_that_of_a_direct_call(name):
    q, k = jnp.ones((2, 16, 4, 64)), jnp.ones((2, 16, 2, 64))
    through = functools.partial(switchax.attention, causal=True, operation=name)
    got, expected = programs(through, q, k, k), programs(DIRECT[name], q, k, k)
    assert got == expected
    # The comparison can fail:
    assert programs(functools.partial(through, softmax_scale=0.5), q, k, k) != expected


@pytest.fixture
def register(quick_compilation):
    with registration() as register:
        yield register


def test_equal_requests_are_traced_once(register):
    calls = []
    register(kernel("counted", {"causal", "gqa"}, calls))
    attend = functools.partial(switchax.attention, operation="counted", causal=True)
    x = jnp.ones((1, 4, 2, 8))
    for _ in range(3):
        attend(x, x, x)
    assert len(calls) == 1
    switchax.OperationRegistry.create("counted")(x, x, x, causal=True)
    assert len(calls) == 1
    jax.jit(attend)(x, x, x)
    assert len(calls) == 1

    @jax.jit
    @jax.grad
    def layers(x):
        for _ in range(5):
            x = attend(x, x, x)
        return x.sum()

    wide = jnp.ones((1, 5, 2, 8))
    layers(wide)
    assert len(calls) == 2
    attend(wide, wide, wide, softmax_scale=1.0)
    assert len(calls) == 3


def decision_of(name, call, **asked):
    request = ATTENTION.request(**call.arrays, **call.options, **asked)
    explained = switchax.explain(request, operation=name)
    (candidate,) = (c for c in explained.candidates if c.entry.name == name)
    return candidate


def adapted(register, case, features, weights=True, **capabilities):
    """Registers a stand-in, checks a case on it; its arguments and adaptations."""
    calls = []
    name = "adapted"
    features = {"lse", *features} | ({"weights"} if weights else set())
    register(kernel(name, features, calls, **capabilities))
    attend = functools.partial(switchax.attention, operation=name)
    cases.check(case, attend, weights=weights)
    call = cases.draw(case)
    candidate = decision_of(name, call, return_lse=True, return_weights=weights)
    assert not candidate.refusals
    return calls[0], {a.name: a for a in candidate.plan.adaptations}, candidate


def test_a_kernel_of_another_layout_gets_it(register):
    case = Case(bias="row", kv_heads=4, q_len=5)
    given, steps, _ = adapted(register, case, {"bias"}, layouts=("bhtd",))
    assert given["query"].shape == (2, 4, 5, 8)
    assert steps.keys() == {"layout"}
    assert "transposed" in steps["layout"].cost


def test_packed_tokens_become_a_batch_of_one(register):
    case = Case(layout="thd", segments=True, kv_heads=4)
    given, steps, _ = adapted(register, case, {"segment_ids"})
    assert given["query"].shape == (1, 7, 4, 8)
    assert given["q_segment_ids"].shape == (1, 7)
    assert steps.keys() == {"layout"}
    assert "free" in steps["layout"].cost


def test_a_kernel_without_groups_gets_every_head(register):
    given, steps, _ = adapted(register, Case(kv_heads=2), set())
    assert given["key"].shape == given["value"].shape == (2, 7, 4, 8)
    assert steps.keys() == {"repeat_kv"}
    assert "2 times" in steps["repeat_kv"].cost


MULTIPLES = {"q_len": 16, "kv_len": 128, "head_dim": 32}


@pytest.mark.parametrize(
    ("case", "features"),
    [
        (Case(lengths="both"), ("q_lengths",)),
        (Case(bias="full", mask="row", v_head_dim=5), ("bias", "mask", "v_head_dim")),
        # Padded rows come after the real ones: they must not see what these do not.
        (Case(causal=True, q_len=5, kv_len=9), ("causal", "q_offset")),
        (
            Case(causal=True, q_len=5, kv_len=9, offset="batch"),
            ("causal", "q_offset_per_batch"),
        ),
        (
            Case(window=(2, 1), q_len=5, kv_len=9, offset="traced"),
            ("window", "q_offset"),
        ),
        (Case(segments=True, window=(2, 1)), ("segment_ids", "window")),
    ],
    ids=str,
)
def test_a_kernel_of_multiples_gets_padded_arrays(register, case, features):
    given, steps, _ = adapted(
        register, case, {"gqa", "kv_lengths", *features}, multiples=MULTIPLES
    )
    assert given["query"].shape == (2, 16, 4, 32)
    assert given["key"].shape == (2, 128, 2, 32)
    assert given["kv_lengths"].shape == (2,)
    assert steps.keys() == {"pad"}
    assert "kv_len 7 to 128" in steps["pad"].detail or case.kv_len == 9
    assert "copy" in steps["pad"].cost


def test_padding_keeps_the_scale_of_the_callers_head_dim(register):
    given, _, _ = adapted(register, Case(), {"gqa"}, multiples={"head_dim": 32})
    assert given["softmax_scale"] == 8**-0.5


def test_packed_tokens_that_need_padding_are_refused(register):
    multiples = {"kv_len": 128}
    register(kernel("padded", {"segment_ids"}, layouts=("thd",), multiples=multiples))
    call = cases.draw(Case(layout="thd", segments=True, kv_heads=4))
    with pytest.raises(
        UnsupportedError, match=r"kv_len a multiple of 128, got kv_len=7"
    ):
        switchax.attention(**call.arrays, **call.options, operation="padded")


@pytest.mark.parametrize("segments", [False, True])
def test_lengths_become_segment_ids(register, segments):
    case = Case(lengths="both", segments=segments, causal=True)
    given, steps, candidate = adapted(
        register, case, {"gqa", "segment_ids", "causal"}, cost=Cost.FUSED
    )
    assert given["q_segment_ids"].shape == given["kv_segment_ids"].shape == (2, 7)
    assert steps.keys() == {"fold_segments"}
    assert candidate.cost is Cost.FUSED


def test_what_is_refused_beside_lengths_is_all_that_is(register):
    features, multiples = {"segment_ids", "gqa"}, {"kv_len": 128}
    register(kernel("tiled", features, multiples=multiples))
    call = cases.draw(Case(window=(2, 0)))
    with pytest.raises(UnsupportedError) as caught:
        switchax.attention(**call.arrays, **call.options, operation="tiled")
    (refusals,) = caught.value.refusals.values()
    assert [refusal.field for refusal in refusals] == ["window"]


def test_a_feature_that_no_argument_brings_is_not_to_be_left_out(register):
    register(kernel("square", {"gqa"}))
    call = cases.draw(Case(v_head_dim=5))
    with pytest.raises(UnsupportedError) as caught:
        switchax.attention(**call.arrays, **call.options, operation="square")
    (((refusal,)),) = caught.value.refusals.values()
    assert (refusal.field, refusal.actual) == ("v_head_dim", "5")
    assert refusal.hint == (
        "'v_head_dim', value of another head_dim than key, is not among its features: "
        "choose another operation"
    )


@pytest.mark.parametrize(
    ("case", "shape", "cost"),
    [
        (Case(lengths="kv"), (2, 1, 1, 7), Cost.FUSED),
        (Case(lengths="kv", mask="key"), (2, 1, 1, 7), Cost.FUSED),
        (Case(lengths="q"), (2, 1, 7, 1), Cost.FUSED),
        (Case(causal=True), (1, 1, 7, 7), Cost.MATERIALISES),
        (
            Case(window=(1, 1), offset="batch", bias="full"),
            (2, 1, 7, 7),
            Cost.MATERIALISES,
        ),
        (Case(segments=True, mask="row"), (2, 4, 7, 7), Cost.MATERIALISES),
    ],
    ids=str,
)
def test_visibility_becomes_a_mask_at_its_cost(register, case, shape, cost):
    given, steps, candidate = adapted(
        register, case, {"gqa", "mask", "bias"}, cost=Cost.FUSED
    )
    assert given["mask"].shape == shape
    assert steps.keys() == {"fold_mask"}
    assert steps["fold_mask"].materialises == (cost is Cost.MATERIALISES)
    assert candidate.cost is cost
    assert (
        str(candidate.plan.request.array("mask"))
        == f"bool[{','.join(map(str, shape))}]"
    )


def test_adaptations_add_up(register):
    case = Case(lengths="both", causal=True, layout="bhtd", v_head_dim=5, dropout=0.3)
    given, steps, candidate = adapted(
        register,
        case,
        {"mask", "v_head_dim", "dropout"},
        multiples={"q_len": 8, "kv_len": 8, "head_dim": 16},
        cost=Cost.CHUNKED,
    )
    assert given["value"].shape == (2, 8, 4, 16)
    assert list(steps) == ["layout", "repeat_kv", "pad", "fold_mask"]
    assert candidate.cost is Cost.MATERIALISES
    assert all(a.cost and a.detail for a in steps.values())


def test_the_request_that_an_operation_sees_has_the_shapes_that_it_gets(register):
    case = Case(layout="thd", segments=True, mask="full", bias="key", kv_heads=4)
    features = {"segment_ids", "mask", "bias", "kv_lengths"}
    given, _, candidate = adapted(
        register, case, features, multiples={"kv_len": 16, "q_len": 16}
    )
    for name, spec in candidate.plan.request.arrays:
        assert spec.shape == given[name].shape, name


@pytest.mark.usefixtures("standard_promotion")
def test_explain_answers_for_a_chip_that_is_not_here(register):
    register(
        kernel(
            "chip", {"causal"}, platforms={"tpu"}, cost=Cost.FUSED, multiples=MULTIPLES
        )
    )
    q = jax.ShapeDtypeStruct((1, 100, 8, 32), "bfloat16")
    k = jax.ShapeDtypeStruct((1, 100, 2, 32), "bfloat16")
    asked = {"query": q, "key": k, "value": k}
    here = switchax.explain(**asked, operation=("chip", "vanilla"))
    assert here.chosen.endswith(":vanilla")
    there = switchax.explain(**asked, target="tpu:v5e", operation="chip")
    assert there.chosen is None
    assert "kv_lengths" in there.error
    square = jax.ShapeDtypeStruct((1, 128, 8, 32), "bfloat16")
    there = switchax.explain(
        query=square, key=square, value=square, causal=True, target="tpu:v5e"
    )
    assert there.chosen.endswith(":chip")
    refused = {c.entry.name: c.refusals for c in there.candidates}
    assert refused["chip"] == refused["sdpa"] == refused["vanilla"] == ()
    assert [r.code for r in refused["cudnn"]] == ["platform"]
    assert "tpu:v5e" in str(there)


def test_an_instance_changed_after_its_call_spoils_no_other():
    class Scaled(kernel("scaled")):
        factor = 1.0

        def forward_native(self, query, key, value, *, softmax_scale):
            return self.factor * value

    with registration() as register:
        register(Scaled)
        x = jnp.ones((1, 2, 1, 8))
        first, second = Scaled(), Scaled()
        first(x, x, x)
        first.factor = second.factor = 3.0
        assert (second(x, x, x).attention_outputs == 3.0).all()
        assert (first(x, x, x).attention_outputs == 3.0).all()
        assert (Scaled()(x, x, x).attention_outputs == 1.0).all()


@dataclasses.dataclass(frozen=True)
class Numbers:
    number: float = 1
    hidden: float = dataclasses.field(default=1, compare=False)


def multiplying(factor):
    """An operation that multiplies the query by what it reads of itself."""

    class Multiplying(BaseOperation):
        kind = ATTENTION
        capabilities = Capabilities()
        config_class = Numbers

        def __init__(self, metadata=None, own=None):
            super().__init__(metadata)
            self.own = own

        @classmethod
        def get_impl_name(cls):
            return "multiplying"

        def forward_native(self, query, key, value, *, softmax_scale):
            return query * jnp.asarray(factor(self), "float32")

    return Multiplying


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (True, 2.0),
        (1.0, True),
        (0.0, -0.0),
        ((1, 2.0), (1, 2)),
        (Numbers(hidden=1), Numbers(hidden=3)),
        (np.ones(8, "float32"), np.full(8, 2, "float32")),
        (np.ones(8, "float32"), np.ones(8, "float32")),
    ],
)
def test_only_what_is_the_same_shares_a_program(first, second):
    seen = []
    x = jnp.ones((1, 3, 1, 8))
    operation = multiplying(lambda self: (seen.append(self.own), 1)[1])
    for own in (first, second, second):
        operation(own=own)(x, x, x)
    assert [id(own) for own in seen] == [id(first), id(second)]


def test_a_config_is_the_same_in_type_and_in_every_field():
    operation = multiplying(lambda self: self.config.number * self.config.hidden)
    x = jnp.ones((1, 3, 1, 8))
    for config, expected in ((Numbers(1), 1), (Numbers(True), 1), (Numbers(1, 3), 3)):
        metadata = OperationMetadata(operation_configs={"multiplying": config})
        output = operation(metadata)(x, x, x).attention_outputs
        assert (output == expected).all()


def test_a_base_config_cannot_be_read_in_a_program_that_others_share():
    read = multiplying(lambda self: self.metadata.base_config["k"])
    x = jnp.ones((1, 3, 1, 8))
    metadata = OperationMetadata(base_config={"k": 2.0})
    with pytest.raises(TypeError, match="NoneType"):
        read(metadata)(x, x, x)
    assert metadata.base_config == {"k": 2.0}
