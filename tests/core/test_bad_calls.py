"""Wrong calls of attention: one clear error each, before any kernel is traced."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import switchax
from switchax import (
    MaskPattern,
    OperationMetadata,
    UnknownOperationError,
    UnsupportedError,
)

from .kernels import ALL, kernel
from .standins import registration

B, T, H, K, D = 2, 3, 4, 2, 8
FULL = (B, H, T, T)


def zeros(*shape, dtype="float32"):
    return jnp.zeros(shape, dtype)


@pytest.fixture(scope="module", autouse=True)
def calls():
    """What reached the stand-in "picky", which declares every feature."""
    seen = []
    with registration() as register:
        features = set(switchax.ATTENTION.features)
        register(kernel("picky", features, seen, differentiable=ALL))
        yield seen


def good():
    return {
        "query": zeros(B, T, H, D),
        "key": zeros(B, T, K, D),
        "value": zeros(B, T, K, D),
    }


THD = {
    "query": zeros(T, H, D),
    "key": zeros(T, K, D),
    "value": zeros(T, K, D),
    "layout": "thd",
}
KEY = jax.random.key(0)
DELETED = zeros(B, T, K, D)
DELETED.delete()


class NoArray:
    """Promises an array and gives a number."""

    def __jax_array__(self):
        return 3


# What is wrong: the arguments, the kind of error, and what its message says.
VALUE = {
    "rank": ({"query": zeros(T, H, D)}, r"query \[batch, .*\(3, 4, 8\)"),
    "rank_of_value": ({"value": zeros(T, K)}, r"value \[batch, .*\(3, 2\)"),
    "rank_thd": ({"layout": "thd"}, r"query \[tokens, heads, head_dim\] in layout"),
    "heads": ({"query": zeros(B, T, 3, D)}, "multiple of kv_heads, got heads=3"),
    "no_kv_heads": (
        {"key": zeros(B, T, 0, D), "value": zeros(B, T, 0, D)},
        "heads=4, kv_heads=0",
    ),
    "kv_heads": ({"value": zeros(B, T, 1, D)}, "key kv_heads=2, value kv_heads=1"),
    "kv_len": ({"value": zeros(B, 4, K, D)}, "key kv_len=3, value kv_len=4"),
    "batch": ({"query": zeros(1, T, H, D)}, "query batch=1, key batch=2"),
    "head_dim": ({"key": zeros(B, T, K, 4)}, "query head_dim=8, key head_dim=4"),
    "layout": ({"layout": "bhdt"}, r"layout='bhdt' \(did you mean '.+'\?\)"),
    "mode": ({"mode": "train"}, r"mode='train' \(did you mean '__train__'\?\)"),
    "window_negative": ({"window": (-1, 0)}, r"window=\(-1, 0\)"),
    "offset_missing": (
        {"causal": True, "query": zeros(B, 2, H, D)},
        "q_offset=0 to align .*q_offset=kv_len - q_len=1",
    ),
    "offset_missing_window": (
        {"window": (1, 1), "query": zeros(B, 2, H, D)},
        "q_offset=None, q_len=2, kv_len=3",
    ),
    "offset_shape": (
        {"causal": True, "q_offset": jnp.zeros(3, "int32")},
        r"q_offset of shape \(3,\)",
    ),
    "offset_huge": (
        {"causal": True, "q_offset": 2**40},
        r"from -536870911 to 536870911, got q_offset=1099511627776",
    ),
    "soft_cap_zero": ({"logits_soft_cap": 0.0}, "logits_soft_cap=0.0"),
    "soft_cap_negative": ({"logits_soft_cap": -3.0}, "logits_soft_cap=-3.0"),
    "soft_cap_infinite": ({"logits_soft_cap": np.inf}, "logits_soft_cap=inf"),
    "scale_nan": ({"softmax_scale": np.nan}, "softmax_scale=nan"),
    "scale_infinite": ({"softmax_scale": -np.inf}, "softmax_scale=-inf"),
    "dropout_key": ({"dropout_prob": 0.5}, "dropout_key=None; pass dropout_key="),
    "dropout_one": ({"dropout_prob": 1.0, "dropout_key": KEY}, "dropout_prob=1.0"),
    "dropout_negative": ({"dropout_prob": -0.1, "dropout_key": KEY}, "prob=-0.1"),
    "bias_shape": ({"bias": zeros(H, T, 2)}, r"bias broadcastable .*\(4, 3, 2\)"),
    "bias_rank": ({"bias": zeros(1, *FULL)}, r"bias of shape \(1, 2, 4, 3, 3\)"),
    "mask_shape": ({"mask": zeros(B, T, dtype=bool)}, r"mask of shape \(2, 3\)"),
    "mask_thd": ({**THD, "mask": zeros(2, 1, T, T, dtype=bool)}, r"\(4, 3, 3\)"),
    "one_segment_q": (
        {"q_segment_ids": zeros(B, T, dtype="int32")},
        "kv_segment_ids=None",
    ),
    "one_segment_kv": (
        {"kv_segment_ids": zeros(B, T, dtype="int32")},
        "q_segment_ids=None",
    ),
    "segment_shape": (
        {
            "q_segment_ids": zeros(T, dtype="int32"),
            "kv_segment_ids": zeros(B, T, dtype="int32"),
        },
        r"q_segment_ids \[batch, q_len\]=\(2, 3\), got .*\(3,\)",
    ),
    "lengths_shape": (
        {"kv_lengths": zeros(T, dtype="int32")},
        r"kv_lengths of shape \(3,\)",
    ),
    "lengths_scalar": ({"q_lengths": jnp.int32(2)}, r"q_lengths of shape \(\)"),
    "sinks_shape": ({"softmax_aux": zeros(K)}, r"softmax_aux of shape \(2,\)"),
    "sinks_scalar": ({"softmax_aux": zeros()}, r"softmax_aux of shape \(\)"),
    "deleted": ({"value": DELETED}, "value, which was deleted or donated"),
    "devices": (
        {
            "query": jax.device_put(zeros(B, T, H, D), jax.devices("cpu")[0]),
            "key": jax.device_put(zeros(B, T, K, D), jax.devices("cpu")[1]),
        },
        "query on .*, key on .*device_put",
    ),
}
TYPE = {
    "no_query": ({"query": None}, "no query"),
    "list": ({"query": [[[[0.0]]]]}, r"query=\[\[\[\[0.0\]\]\]\]"),
    "integers": ({"key": zeros(B, T, K, D, dtype="int32")}, "key of dtype int32"),
    "dtypes": (
        {"key": zeros(B, T, K, D, dtype="bfloat16")},
        "query=float32, key=bfloat16, value=float32; .*runtime_dtype",
    ),
    "near_miss": (
        {"softmax_scal": 1.0},
        r"'softmax_scal' \(did you mean 'softmax_scale'",
    ),
    "of_jax": ({"scale": 1.0}, r"'scale' \(here it is 'softmax_scale'\)"),
    "of_torch": ({"is_causal": True}, r"'is_causal' \(here it is 'causal'\)"),
    "of_flash": ({"alibi_slopes": 1}, r"'alibi_slopes' \(here it is 'bias'\)"),
    "unknown": ({"zzz": None}, "unknown keyword 'zzz'; known are query,"),
    "layout": ({"layout": 3}, "layout=3"),
    "mode": ({"mode": None}, "mode=None"),
    "window_int": ({"window": 4}, r"window=4; .*\(4, 4\).*\(3, 0\)"),
    "window_float": ({"window": 4.0}, "window=4.0"),
    "window_floats": ({"window": (1.0, 2.0)}, r"window=\(1.0, 2.0\)"),
    "window_bools": ({"window": (True, False)}, r"window=\(True, False\)"),
    "window_three": ({"window": (1, 2, 3)}, r"window=\(1, 2, 3\)"),
    "window_bool": ({"window": True}, "window=True"),
    "window_array": ({"window": (jnp.int32(1), 0)}, "window=.*static"),
    "causal_int": ({"causal": 1}, r"causal=1 \(int\)"),
    "causal_array": ({"causal": jnp.bool_(True)}, "causal="),
    "return_lse": ({"return_lse": "yes"}, "return_lse='yes'"),
    "return_weights": ({"return_weights": None}, "return_weights=None"),
    "offset_float": ({"causal": True, "q_offset": 1.5}, "q_offset=1.5"),
    "offset_floats": (
        {"causal": True, "q_offset": zeros(B)},
        "q_offset of dtype float32",
    ),
    "offset_bool": ({"causal": True, "q_offset": True}, "q_offset=True"),
    "soft_cap_text": ({"logits_soft_cap": "30"}, "logits_soft_cap='30'"),
    "soft_cap_bool": ({"logits_soft_cap": True}, "logits_soft_cap=True"),
    "scale_array": ({"softmax_scale": zeros(H)}, "softmax_scale="),
    "scale_complex": ({"softmax_scale": np.complex64(1j)}, "softmax_scale="),
    "dropout_text": ({"dropout_prob": "0.5"}, "dropout_prob='0.5'"),
    "dropout_seed": ({"dropout_prob": 0.5, "dropout_key": 3}, "dropout_key=3"),
    "dropout_keys": (
        {"dropout_prob": 0.5, "dropout_key": jax.random.split(KEY)},
        r"one PRNG key, got .*\[2\]; split it",
    ),
    "dropout_key_size": (
        {"dropout_prob": 0.5, "dropout_key": np.zeros(3, "uint32")},
        r"typed or uint32\[2\], got dropout_key uint32\[3\]; make one with",
    ),
    "dropout_key_unused": (
        {"dropout_key": np.zeros(4, "uint32")},
        r"got dropout_key uint32\[4\]; make one with",
    ),
    "dropout_key_floats": (
        {"dropout_key": np.zeros(2, "float32")},
        r"typed or uint32\[2\], got dropout_key float32\[2\]",
    ),
    "dropout_key_list": ({"dropout_key": [0, 1]}, r"dropout_key=\[0, 1\] \(list\)"),
    "dropout_key_seed": ({"dropout_key": 3}, r"dropout_key=3 .*jax.random.key\(seed"),
    "dropout_key_raw_two": (
        {"dropout_key": np.zeros((2, 2), "uint32")},
        r"got dropout_key uint32\[2, 2\]; split it",
    ),
    "masked_array": (
        {"query": np.ma.array(np.zeros((B, T, H, D), "float32"))},
        "query, which is a masked array .*pass query.filled",
    ),
    "masked_wide_bias": (
        {"bias": np.ma.array(np.zeros(T), mask=[1] + [0] * (T - 1))},
        "bias, which is a masked array .*pass bias.filled",
    ),
    "masked_wide_sinks": ({"softmax_aux": np.ma.zeros(H)}, "softmax_aux, which is a"),
    "masked_mask": ({"mask": np.ma.ones(FULL, dtype=bool)}, "mask, which is a masked"),
    "masked_lengths": ({"kv_lengths": np.ma.array([1, 2])}, "kv_lengths, which is"),
    "masked_offset": ({"causal": True, "q_offset": np.ma.array(1)}, "q_offset, which"),
    "masked_scale": ({"softmax_scale": np.ma.array(1.0)}, "softmax_scale=masked_array"),
    "objects": (
        {"query": np.zeros((B, T, H, D), object)},
        "query of dtype object; cast it",
    ),
    "records": ({"query": np.zeros((B, T, H, D), [("a", "f4")])}, "query of dtype"),
    "strings": ({"key": np.full((B, T, K, D), "1")}, "key of dtype <U1; cast it"),
    "times": ({"bias": np.zeros(FULL, "m8[s]")}, "bias of dtype timedelta64"),
    "no_array_at_all": ({"key": NoArray()}, r"key=3 \(int\)"),
    "scale_of_text": ({"softmax_scale": np.array("1")}, "softmax_scale=array"),
    "scale_of_objects": ({"softmax_scale": np.array(1, object)}, "softmax_scale=array"),
    "scale_of_time": ({"softmax_scale": np.timedelta64(1, "s")}, "softmax_scale="),
    "scale_of_bools": ({"softmax_scale": np.array(True)}, "softmax_scale="),
    "offset_of_time": (
        {"causal": True, "q_offset": np.timedelta64(1, "s")},
        "q_offset of",
    ),
    "window_of_time": ({"window": (np.timedelta64(1, "s"), 0)}, "window="),
    "mask_floats": ({"mask": zeros(*FULL)}, "mask of dtype float32; pass mask != 0"),
    "mask_integers": ({"mask": zeros(*FULL, dtype="int32")}, "mask of dtype int32"),
    "bias_bool": ({"bias": zeros(*FULL, dtype=bool)}, "bias of dtype bool"),
    "bias_integers": ({"bias": zeros(*FULL, dtype="int8")}, "bias of dtype int8"),
    "bias_number": ({"bias": 1.0}, "bias=1.0"),
    "sinks_integers": (
        {"softmax_aux": zeros(H, dtype="int32")},
        "softmax_aux of dtype",
    ),
    "segment_floats": (
        {"q_segment_ids": zeros(B, T), "kv_segment_ids": zeros(B, T)},
        "q_segment_ids of dtype float32",
    ),
    "lengths_floats": ({"kv_lengths": zeros(B)}, "kv_lengths of dtype float32"),
    "lengths_list": ({"q_lengths": [1, 2]}, r"q_lengths=\[1, 2\]"),
}
CALLS = [
    *((name, ValueError, *row) for name, row in VALUE.items()),
    *((name, TypeError, *row) for name, row in TYPE.items()),
]
HOUSE = r"^{}: expected .+, got .+; .+"


def the_error(kind, calls, where, attend, arguments):
    before = len(calls)
    with pytest.raises(kind) as caught:
        attend(**arguments)
    assert type(caught.value) is kind
    assert len(calls) == before, "a kernel was traced"
    text = str(caught.value)
    assert re.match(HOUSE.format(where), text, re.DOTALL), text
    return text


@pytest.mark.parametrize(
    ("kind", "changed", "says"),
    [row[1:] for row in CALLS],
    ids=[f"{row[0]}-{row[1].__name__}" for row in CALLS],
)
def test_a_wrong_call_is_one_clear_error(kind, changed, says, calls):
    arguments = {**good(), **changed}
    operation = switchax.OperationRegistry.create("picky")
    for where, attend in (
        ("attention", lambda **a: switchax.attention(operation="picky", **a)),
        ("picky", operation),
    ):
        text = the_error(kind, calls, where, attend, arguments)
        assert re.search(says, text), text


@pytest.mark.usefixtures("quick_compilation")
def test_keys_are_typed_or_raw_traced_or_mapped(calls):
    def attend(key):
        arguments = good() | {"dropout_prob": 0.5, "dropout_key": key}
        return switchax.attention(**arguments, operation="picky")

    typed, raw = jax.random.key(3), jax.random.PRNGKey(3)
    expected = attend(typed)
    for key in (raw, np.asarray(raw)):
        np.testing.assert_array_equal(attend(key), expected)
    for key in (typed, raw):
        mapped = jax.jit(jax.vmap(attend))(jnp.stack([key, key]))
        np.testing.assert_array_equal(mapped[1], expected)
    with jax.default_prng_impl("rbg"):
        wide = jax.eval_shape(attend, jax.random.PRNGKey(3))
        assert wide.shape == expected.shape
        with pytest.raises(TypeError, match=r"typed or uint32\[4\], got"):
            attend(raw)
    with pytest.raises(TypeError, match=r"^attention: .*got dropout_key uint32\[3\]"):
        jax.jit(attend)(jnp.zeros(3, "uint32"))
    calls.clear()


def test_a_traced_scale_says_what_to_do(calls):
    def attend(scale):
        return switchax.attention(**good(), softmax_scale=scale, operation="picky")

    before = len(calls)
    with pytest.raises(TypeError, match=r"multiply query by it and pass 1.0"):
        jax.jit(attend)(1.0)
    assert len(calls) == before


def test_an_unknown_operation_names_the_near_miss(calls):
    with pytest.raises(UnknownOperationError, match=r"did you mean 'vanilla'"):
        switchax.attention(**good(), operation="vanila")


@pytest.mark.parametrize("operation", [None, 3, (), ("vanilla", 3)], ids=repr)
def test_an_operation_that_is_no_name_is_a_type_error(operation, calls):
    arguments = {**good(), "operation": operation}
    the_error(TypeError, calls, "attention", switchax.attention, arguments)


def test_auto_stands_alone_among_names(calls):
    arguments = {**good(), "operation": ("auto", "vanilla")}
    text = the_error(ValueError, calls, "attention", switchax.attention, arguments)
    assert "'auto' alone" in text
    assert switchax.attention(**good(), operation=("auto",)).shape == (B, T, H, D)


def test_metadata_of_a_wrong_type_is_a_type_error(calls):
    arguments = {**good(), "operation": "picky", "metadata": {"backend": "cpu"}}
    text = the_error(TypeError, calls, "attention", switchax.attention, arguments)
    assert "metadata={'backend': 'cpu'} (dict)" in text
    picky = switchax.OperationRegistry.get("picky")
    the_error(TypeError, calls, "picky", picky, {"metadata": "bfloat16"})


def test_an_operation_is_called_with_its_arrays_and_keywords_only(calls):
    operation = switchax.OperationRegistry.create("picky")
    query, key, value = good().values()
    with pytest.raises(TypeError, match=r"^picky: expected at most 3 positional"):
        operation(query, key, value, None)
    with pytest.raises(
        TypeError, match=r"^picky: expected each argument once, got query"
    ):
        operation(query, query=query, key=key, value=value)
    with pytest.raises(
        TypeError, match=r"^picky: expected query, key and value, got no"
    ):
        operation(query, key)
    with pytest.raises(TypeError, match=r"^picky: .*unknown keyword 'metadata'"):
        operation(query, key, value, metadata=OperationMetadata())
    assert not calls


# A legal call that is not supported here (R12).

USES = {
    "bias": {"bias": zeros(*FULL)},
    "mask": {"mask": zeros(*FULL, dtype=bool)},
    "mask_pattern": {"mask_pattern": MaskPattern.prefix(1, T, T)},
    "segment_ids": {
        "q_segment_ids": zeros(B, T, dtype="int32"),
        "kv_segment_ids": zeros(B, T, dtype="int32"),
    },
    "q_lengths": {"q_lengths": zeros(B, dtype="int32")},
    "kv_lengths": {"kv_lengths": zeros(B, dtype="int32")},
    "causal": {"causal": True},
    "window": {"window": (1, 1)},
    "q_offset": {"causal": True, "q_offset": 1},
    "q_offset_per_batch": {"causal": True, "q_offset": zeros(B, dtype="int32")},
    "logits_soft_cap": {"logits_soft_cap": 2.0},
    "softmax_aux": {"softmax_aux": zeros(H)},
    "dropout": {"dropout_prob": 0.5, "dropout_key": KEY},
    "v_head_dim": {"value": zeros(B, T, K, 4)},
    "lse": {"return_lse": True},
    "weights": {"return_weights": True},
}


@pytest.fixture(scope="module")
def plain_calls():
    """What reached the stand-ins "plain", with no feature, and "only_<feature>"."""
    seen = []
    with registration() as register:
        register(kernel("plain", calls=seen, dtypes={"float32"}))
        yield seen


def test_every_feature_is_tried():
    assert {*USES, "gqa"} == set(switchax.ATTENTION.features)


@pytest.mark.parametrize("feature", USES)
def test_an_undeclared_feature_is_refused_before_any_kernel(feature, plain_calls):
    arguments = {**good(), **USES[feature]}
    operation = switchax.OperationRegistry.create("plain")
    for attend in (
        lambda **a: switchax.attention(operation="plain", **a),
        operation,
    ):
        with pytest.raises(UnsupportedError) as caught:
            attend(**arguments)
        assert type(caught.value) is UnsupportedError
        (refusals,) = caught.value.refusals.values()
        assert feature in {r.field for r in refusals if r.code == "feature"}
        assert all(r.actual and r.allowed and r.hint for r in refusals)
        assert re.match(HOUSE.format("plain"), str(caught.value), re.DOTALL)
    assert not plain_calls


def test_undeclared_dtypes_and_platforms_are_refused(plain_calls):
    halves = {n: a.astype("bfloat16") for n, a in good().items()}
    with pytest.raises(UnsupportedError) as caught:
        switchax.attention(**halves, operation="plain")
    (refusals,) = caught.value.refusals.values()
    assert [(r.code, r.actual, r.allowed) for r in refusals] == [
        ("dtype", "bfloat16", "float32")
    ]
    with registration() as register:
        register(kernel("chip", {"gqa"}, plain_calls, platforms={"tpu"}))
        with pytest.raises(UnsupportedError) as caught:
            switchax.attention(**good(), operation="chip")
        (refusals,) = caught.value.refusals.values()
        assert [(r.code, r.actual, r.allowed) for r in refusals] == [
            ("platform", "cpu", "tpu")
        ]
    assert not plain_calls


def test_neutral_arguments_use_no_feature(plain_calls):
    arguments = good() | {"dropout_key": KEY, "window": (None, None), "q_offset": 3}
    arguments["key"] = arguments["value"] = arguments["query"]
    switchax.attention(**arguments, operation="plain")
    assert plain_calls.pop().keys() == {"query", "key", "value", "softmax_scale"}


# What a feature changes, so that none is dropped in silence.
CHANGES = {
    **USES,
    "bias": {"bias": jnp.arange(float(T))},
    "mask": {"mask": jnp.eye(T, dtype=bool)},
    "segment_ids": {
        "q_segment_ids": jnp.array([[0, 0, 1]] * B),
        "kv_segment_ids": jnp.array([[0, 1, 1]] * B),
    },
    "q_lengths": {"q_lengths": jnp.array([1, 2])},
    "kv_lengths": {"kv_lengths": jnp.array([1, 2])},
    "logits_soft_cap": {"logits_soft_cap": 0.1},
    "softmax_scale": {"softmax_scale": 0.1},
}


@pytest.mark.parametrize("feature", [f for f in CHANGES if f not in ("lse", "weights")])
def test_every_feature_changes_the_result_of_vanilla(feature):
    rng = np.random.default_rng(0)
    arrays = {n: rng.normal(size=a.shape).astype("float32") for n, a in good().items()}
    base = {"causal": True} if feature.startswith("q_offset") else {}
    changes = dict(CHANGES[feature])
    if feature == "v_head_dim":
        changes = {"value": arrays["value"][..., :4]}
    plain = switchax.attention(**arrays, **base, operation="vanilla")
    if feature == "q_offset_per_batch":
        changes["q_offset"] = jnp.array([1, 0])
    changed = switchax.attention(**{**arrays, **base, **changes}, operation="vanilla")
    assert plain.shape != changed.shape or jnp.abs(plain - changed).max() > 1e-2


def test_lse_and_weights_come_when_asked_for():
    result = switchax.attention(**good(), operation="vanilla", return_lse=True)
    assert result.lse.shape == (B, H, T)
    assert result.attention_weights is None
    result = switchax.attention(**good(), operation="vanilla", return_weights=True)
    assert result.attention_weights.shape == FULL
    assert result.lse is None


def test_wide_integers_never_wrap():
    x = jnp.ones((1, 2, 1, 4))
    v = jnp.arange(8.0).reshape(1, 2, 1, 4)
    wide = np.array([[1, 2**32 + 1]])
    with pytest.raises(ValueError, match="q_segment_ids within int32"):
        switchax.attention(x, x, v, q_segment_ids=wide, kv_segment_ids=wide)
    full = switchax.attention(x, x, v)
    lengths = np.array([2**40])
    np.testing.assert_array_equal(switchax.attention(x, x, v, kv_lengths=lengths), full)
    for far in (jnp.int32(2**31 - 1), np.array([2**40]), np.array(2**32)):
        seen = switchax.attention(
            x, x, v, causal=True, q_offset=far, operation="vanilla"
        )
        np.testing.assert_allclose(seen, full, atol=1e-6)
    with jax.enable_x64(True):
        ids = jnp.array([[1, 2]], jnp.int64)
        np.testing.assert_allclose(
            switchax.attention(x, x, v, q_segment_ids=ids, kv_segment_ids=ids), v
        )
        with pytest.raises(TypeError, match="cast it to int32"):
            jax.jit(
                lambda i: switchax.attention(x, x, v, q_segment_ids=i, kv_segment_ids=i)
            )(ids)


def test_a_window_side_beyond_positions_is_an_error_that_names_none():
    x = jnp.ones((1, 2, 1, 4))
    with pytest.raises(ValueError, match="None on a side is unlimited"):
        switchax.attention(x, x, x, window=(None, 2**30), q_offset=0)


def test_wide_numpy_ids_are_looked_at_under_jit_too():
    x = jnp.ones((1, 4, 1, 8))
    ids = np.array([[0, 0, 1, 1]], "int64")

    def attend(x, ids=ids):
        both = {"q_segment_ids": ids, "kv_segment_ids": ids}
        return switchax.attention(x, x, x, operation="vanilla", **both)

    assert jax.jit(attend)(x).shape == x.shape
    with pytest.raises(ValueError, match="q_segment_ids within int32"):
        jax.jit(lambda x: attend(x, ids + 2**40))(x)


def test_a_later_name_that_nobody_has_is_no_fallback():
    x = jnp.ones((1, 4, 1, 8))
    with pytest.raises(switchax.UnknownOperationError, match="got 'nope'"):
        switchax.attention(x, x, x, operation=("vanilla", "nope"))


def test_auto_and_names_may_have_spaces_around():
    x = jnp.ones((1, 2, 1, 4))
    for operation in (" auto ", " vanilla ", [" vanilla "]):
        assert switchax.attention(x, x, x, operation=operation).shape == x.shape


def test_what_others_call_the_operation_is_answered_by_the_call_that_takes_one():
    says = r"'implementation' \(here it is 'operation'\).* operation, metadata$"
    with pytest.raises(TypeError, match=says):
        switchax.attention(**good(), implementation="cudnn")
    with pytest.raises(TypeError, match=r"'implementation'; known are"):
        switchax.OperationRegistry.create("picky")(**good(), implementation="cudnn")
