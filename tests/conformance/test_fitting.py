"""Calls have the sizes that an operation takes, whatever it declares."""

import pytest
from tests.core.kernels import kernel

from switchax import Refusal
from switchax.testing import conform
from switchax.testing.attention.calls import AttentionCall
from switchax.testing.attention.fitting import Fitting
from switchax.testing.attention.suite import AttentionSuite
from switchax.testing.conformance import cases_of
from switchax.testing.run import Run, refused_here

from .narrow_mutants import declaring

FLASH = {"causal", "window", "q_offset", "gqa", "lse"}


def head_dims(*taken):
    """Refuses any other head_dim by a rule of its own."""

    def refusals(cls, request, target):
        if request.head_dim not in taken:
            yield Refusal("rule", "head_dim", str(request.head_dim), f"{taken}", "pad")

    return classmethod(refusals)


def windows_beside_causal():
    def refusals(cls, request, target):
        if request.window is not None and not request.causal:
            yield Refusal("rule", "window", str(request.window), "causal", "set causal")

    return classmethod(refusals)


def only(taken, allowed, field="sizes"):
    """Refuses calls by a rule of its own, which it tells by a text alone."""

    def refusals(cls, request, target):
        if not taken(request):
            yield Refusal("rule", field, "others", allowed, "choose another")

    return classmethod(refusals)


def one_by_one(**sizes):
    """Refuses other sizes, telling of one axis at a time."""

    def refusals(cls, request, target):
        for axis, size in sizes.items():
            if getattr(request, axis) != size:
                yield Refusal("rule", axis, "another", str(size), "pad")
                return

    return classmethod(refusals)


def needing(features, field=None, **sizes):
    """Refuses calls without features, and other sizes; by a text alone with a field."""

    def refusals(cls, request, target):
        lacking = [(name, "none", "given") for name in features - request.features]
        lacking += [
            (axis, str(getattr(request, axis)), " or ".join(map(str, allowed)))
            for axis, allowed in sizes.items()
            if getattr(request, axis) not in allowed
        ]
        for name, actual, allowed in lacking:
            text = allowed if field is None else "what the paper says"
            yield Refusal("rule", field or name, actual, text, "pass it")

    return classmethod(refusals)


def with_rule(name, features, refusals, **capabilities):
    bases = (kernel(name, features, **capabilities),)
    return type(name.capitalize(), bases, {"refusals": refusals})


LATENT = {"head_dim": 576, "v_head_dim": 512, "kv_heads": 1}
LATENT_FEATURES = {"causal", "gqa", "v_head_dim"}


def is_latent(request):
    return all(getattr(request, axis) == size for axis, size in LATENT.items())


def is_square(request):
    q_len, kv_len = request.q_len, request.kv_len
    grouped = request.heads >= 2 * request.kv_heads
    return q_len == kv_len and q_len % 1024 == 0 and grouped


def is_decoder_s(request):
    """Whether a kernel of packed tokens would take it, which always has ids."""
    features = {"causal", "segment_ids"} <= request.features
    return features and request.q_len == request.kv_len


DECLARATIONS = {
    "blocks": kernel(
        "blocks", FLASH, multiples=dict.fromkeys(["q_len", "kv_len", "head_dim"], 128)
    ),
    "decode": kernel("decode", {"kv_lengths", "gqa"}, limits={"q_len": 1}),
    "fixed": type("Fixed", (kernel("fixed", FLASH),), {"refusals": head_dims(64, 128)}),
    "heads": kernel("heads", multiples={"heads": 8}),
    "batch": kernel("batch", {"mask"}, multiples={"batch": 4, "kv_heads": 2}),
    "alone": kernel("alone", {"causal"}, limits={"batch": 1}),
    "packed": kernel("packed", {"segment_ids", "causal"}, layouts=("thd",)),
    "varlen": type(
        "Varlen",
        (kernel("varlen", {"segment_ids", "causal"}, layouts=("thd",)),),
        {"refusals": only(is_decoder_s, "causal self attention with ids")},
    ),
    "swapped": kernel("swapped", {"bias", "dropout"}, layouts=("bhtd",)),
    "beside": type(
        "Beside", (kernel("beside", FLASH),), {"refusals": windows_beside_causal()}
    ),
    "few": kernel("few", {"causal", "mask"}, limits={"heads": 2}),
    "wide": type("Wide", (kernel("wide", FLASH),), {"refusals": head_dims(192, 256)}),
    "odd": type(
        "Odd",
        (kernel("odd", {"causal"}),),
        {"refusals": only(lambda r: r.head_dim == 72, "head_dim == 72")},
    ),
    "latent": type(
        "Latent",
        (kernel("latent", LATENT_FEATURES),),
        {"refusals": only(is_latent, "head_dim 576, v 512, one kv head")},
    ),
    "told": type(
        "Told",
        (kernel("told", LATENT_FEATURES),),
        {"refusals": one_by_one(**LATENT)},
    ),
    "square": type(
        "Square",
        (kernel("square", {"causal", "gqa"}),),
        {"refusals": only(is_square, "self attention of 1024, heads in groups")},
    ),
    # Each needs a feature beside a size.
    "cached": with_rule(
        "cached",
        {"kv_lengths", "gqa"},
        needing({"kv_lengths"}, q_len=(1,), head_dim=(64, 128)),
        differentiable=(),
    ),
    "windowed": with_rule(
        "windowed",
        {"window", "causal", "gqa"},
        needing({"window"}, head_dim=(64, 128)),
    ),
    "sunk": with_rule(
        "sunk",
        {"softmax_aux", "causal", "gqa"},
        needing({"softmax_aux"}, head_dim=(64,)),
    ),
    "masked": with_rule(
        "masked", {"mask", "bias"}, needing({"mask", "bias"}, head_dim=(32,))
    ),
    "paged": with_rule(
        "paged",
        {"causal", "q_offset_per_batch", "kv_lengths", "gqa"},
        needing({"q_offset_per_batch", "kv_lengths"}, head_dim=(64, 128)),
    ),
    "placed": with_rule("placed", {"window", "q_offset"}, needing({"q_offset"})),
    "unsaid": with_rule(
        "unsaid",
        {"kv_lengths", "lse"},
        needing({"kv_lengths"}, "sizes", q_len=(1,), head_dim=(128,)),
        differentiable=(),
    ),
    "half": kernel("half", {"causal"}, dtypes={"float16"}, differentiable=()),
    "nothing": kernel("nothing"),
}


LONG = {"square", "latent", "unsaid"}  # of which many forms are tried


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.further) if name in LONG else name
        for name in DECLARATIONS
    ],
)
def test_what_is_declared_is_asked_in_sizes_that_are_taken(name):
    operation = DECLARATIONS[name]
    fitting = Fitting(operation, "cpu")
    cases = list(AttentionSuite().cases(operation, "cpu", "quick", 0))
    asked = [case for case in cases if case.check != "refused"]
    taken = [case for case in asked if fitting._is_taken(case.call)]
    features = {f for case in taken if case.computes for f in case.call.features}
    untold = {"lse", "weights", "q_lengths"}
    assert operation.capabilities.features - untold <= features
    assert len(taken) > 0.8 * len(asked), [str(c) for c in asked if c not in taken]
    checks = {case.check for case in taken}
    assert {"transforms", "mesh", "in turn", "accumulation"} <= checks


@pytest.mark.parametrize("name", ["fixed", "cached", "heads"])
def test_what_is_not_declared_is_refused_for_no_size(name):
    operation = DECLARATIONS[name]
    fitting = Fitting(operation, "cpu")
    cases = AttentionSuite().cases(operation, "cpu", "quick", 0)
    asked = {c.feature: c.call for c in cases if c.check == "refused"}
    assert {"bias", "q_offset_per_batch", "v_head_dim", "dtype float16"} <= asked.keys()
    for feature, call in asked.items():
        codes = {refusal.code for refusal in fitting._refusals(call)}
        assert codes <= {"feature", "dtype"}, (feature, call)
        assert call.dtype != "float32" or feature in call.features | {"lse"}


@pytest.mark.parametrize("name", ["alone", "packed"])
def test_a_batch_that_cannot_be_split_is_asked_whole_on_each_device(name):
    operation = DECLARATIONS[name]
    cases = AttentionSuite().cases(operation, "cpu", "quick", 0)
    run = Run(operation)
    run.all(list(enumerate(case for case in cases if case.check == "shard_map"))[:1])
    assert not run.outcome.failures
    assert [result.passed for result in run.outcome.results.values()] == [1]


def test_a_dtype_that_is_refused_is_not_looked_for_in_other_sizes():
    asked = []

    def refusals(cls, request, target):
        asked.append(request)
        if request.dtype == "float16" and "bias" in request.features:
            yield Refusal("rule", "dtype with a bias", "float16", "float32", "cast")

    biased = kernel("biased", {"bias"}, dtypes=("float16", "float32"))
    biased = type("Biased", (biased,), {"refusals": classmethod(refusals)})
    call = AttentionCall(dtype="float16", bias="full", bias_level=-200.0)
    assert Fitting(biased, "cpu").fitted(call) == call
    assert len(asked) < 20


def test_rules_that_raise_are_a_failure():
    def refusals(cls, request, target):
        if request.kv_len == 65:
            raise RuntimeError("not thought of")
        return ()

    raising = kernel("raising", differentiable=())
    raising = type("Raising", (raising,), {"refusals": classmethod(refusals)})
    cases = AttentionSuite().cases(raising, "cpu", "quick", 0)
    run = Run(raising)
    run.all(list(enumerate(case for case in cases if case.call.kv_len == 65))[:1])
    (failure,) = run.outcome.failures
    assert (failure.rule, failure.kind) == ("R12", "raised")
    assert "not thought of" in failure.text


@pytest.mark.further
def test_a_failure_says_how_to_state_sizes_where_none_was_found():
    unsaid = type(
        "Unsaid",
        (kernel("unsaid", {"causal"}),),
        {"refusals": only(lambda r: r.head_dim == 72, "what the paper says")},
    )
    cases = AttentionSuite().cases(unsaid, "cpu", "quick", 0)
    run = Run(unsaid)
    run.all(list(enumerate(case for case in cases if case.check == "value"))[:2])
    failure, _ = refused_here(unsaid, run.outcome)
    assert (failure.rule, failure.kind) == ("R12", "refused")
    assert "no size was found that it takes: `limits` and `multiples`" in failure.text


@pytest.mark.further
@pytest.mark.heavy
@pytest.mark.parametrize("name", DECLARATIONS)
def test_what_is_right_conforms_whatever_it_declares(name):
    report = conform(DECLARATIONS[name])
    assert report.passed, str(report)


@pytest.mark.usefixtures("quick_compilation")
def test_what_samples_share_is_not_split_over_devices():
    right = declaring("causal", "q_offset", "lse")
    cases = [case for case in cases_of(right)[1] if case.check == "shard_map"]
    assert any(case.call.offset == "traced" for case in cases)
    for case in cases:
        finding = case.run(right())
        assert not finding.is_wrong, str(finding)


def test_lengths_of_one_side_are_asked_wherever_those_of_both_are():
    cases = cases_of(declaring("kv_lengths", "lse"))[1]
    asked = {case.check for case in cases if case.call.lengths == "kv"}
    assert {"mesh", "shard_map", "sequence mesh", "mapped operands", "x64"} <= asked
