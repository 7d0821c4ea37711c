"""The oracle against numbers worked by hand, a pure Python loop, and differences."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest

from switchax.kinds.attention.oracle import attention_oracle, attention_oracle_vjp

INF, NAN = math.inf, math.nan
BATCH, Q_LEN, KV_LEN, HEADS, KV_HEADS, DIM, V_DIM = 2, 4, 5, 4, 2, 3, 2
ARRAYS = ("query", "key", "value", "bias", "softmax_aux")


def one_head(*numbers):
    """[1, len, 1, 1]."""
    return np.array(numbers, dtype=np.float64).reshape(1, -1, 1, 1)


def rows(query_rows, values, **options):
    """Attend with all logits 0: each output is the mean of the values seen."""
    zeros, keys = one_head(*[0] * query_rows), one_head(*[0] * len(values))
    return attention_oracle(zeros, keys, one_head(*values), **options)


def flat(x):
    return np.asarray(x).ravel().tolist()


def draw(seed=0, **sizes):
    rng = np.random.default_rng(seed)
    b, t, s = sizes.get("batch", BATCH), sizes.get("q", Q_LEN), sizes.get("kv", KV_LEN)
    return (
        rng.normal(size=(b, t, HEADS, DIM)),
        rng.normal(size=(b, s, KV_HEADS, DIM)),
        rng.normal(size=(b, s, KV_HEADS, V_DIM)),
    )


# A second reading of the rules: one pair at a time, in pure Python, for arrays
# of full shape [b, h, i, j] only.


def sees(o, b, h, i, j):
    if "mask" in o and not o["mask"][b, h, i, j]:
        return False
    if "q_segment_ids" in o:
        mine, theirs = o["q_segment_ids"][b, i], o["kv_segment_ids"][b, j]
        if mine < 0 or mine != theirs:
            return False
    if "q_lengths" in o and i >= o["q_lengths"][b]:
        return False
    if "kv_lengths" in o and j >= o["kv_lengths"][b]:
        return False
    distance = j - i - (o["q_offset"][b] if "q_offset" in o else 0)
    if o.get("causal") and distance > 0:
        return False
    left, right = o.get("window", (None, None))
    if left is not None and distance < -left:
        return False
    return right is None or distance <= right


def brute_row(query, key, value, o, b, h, i):
    group = query.shape[2] // key.shape[2]
    scale = o.get("softmax_scale", 1 / math.sqrt(query.shape[3]))
    terms, seen = [], []
    for j in range(key.shape[1]):
        if sees(o, b, h, i, j):
            dims = range(query.shape[3])
            x = sum(query[b, i, h, d] * key[b, j, h // group, d] for d in dims) * scale
            x += o["bias"][b, h, i, j] if "bias" in o else 0.0
            cap = o.get("logits_soft_cap")
            terms.append(math.exp(cap * math.tanh(x / cap) if cap else x))
            seen.append(j)
    sinks = o["softmax_aux"][h] if "softmax_aux" in o else []
    total = sum(terms) + sum(math.exp(s) for s in sinks)
    weights = [0.0] * key.shape[1]
    for j, term in zip(seen, terms, strict=True):
        dropped = "dropout_keep" in o and not o["dropout_keep"][b, h, i, j]
        weights[j] = 0.0 if dropped else term / total / (1 - o.get("dropout_prob", 0))
    output = [
        sum(weights[j] * value[b, j, h // group, d] for j in seen)
        for d in range(value.shape[3])
    ]
    return output, weights, math.log(total) if total else -INF


def brute(query, key, value, **o):
    b, t, h, _ = query.shape
    output = np.zeros((b, t, h, value.shape[3]))
    weights, lse = np.zeros((b, h, t, key.shape[1])), np.zeros((b, h, t))
    for at in itertools.product(range(b), range(h), range(t)):
        out, weights[at], lse[at] = brute_row(query, key, value, o, *at)
        output[at[0], at[2], at[1]] = out
    return output, weights, lse


FULL = (BATCH, HEADS, Q_LEN, KV_LEN)
RNG = np.random.default_rng(7)
OFFSET = np.array([1, -1])
FEATURES = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "bias": {"bias": RNG.normal(size=FULL)},
    "soft_cap": {"logits_soft_cap": 0.7},
    "mask": {"mask": RNG.random(FULL) < 0.5},
    "segments": {
        "q_segment_ids": np.array([[0, 0, 1, -1], [2, 1, 1, 5]]),
        "kv_segment_ids": np.array([[0, 1, 1, 1, -1], [1, 1, 2, 2, 3]]),
    },
    "lengths": {"q_lengths": np.array([3, 0]), "kv_lengths": np.array([5, 2])},
    "causal": {"causal": True, "q_offset": OFFSET},
    "window": {"window": (1, 2), "q_offset": OFFSET},
    "left_window": {"window": (1, None), "q_offset": OFFSET},
    "right_window": {"window": (None, 0), "q_offset": OFFSET},
    "sinks": {"softmax_aux": RNG.normal(size=(HEADS, 3))},
    "dropout": {"dropout_keep": RNG.random(FULL) < 0.6, "dropout_prob": 0.4},
}
FEATURES["all"] = {k: v for f in FEATURES.values() for k, v in f.items()}
FEATURES["all"]["q_lengths"] = np.array([3, 4])
FEATURES["all"]["mask"] = RNG.random(FULL) < 0.8


@pytest.mark.parametrize("feature", FEATURES)
def test_agrees_with_a_loop_over_pairs(feature):
    arrays = draw()
    got = attention_oracle(*arrays, **FEATURES[feature])
    for mine, theirs in zip(got, brute(*arrays, **FEATURES[feature]), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-14)


def test_the_features_together_leave_something_to_compare():
    weights = attention_oracle(*draw(), **FEATURES["all"]).weights
    assert 5 < np.count_nonzero(weights) < weights.size / 2


# Numbers by hand.


def test_two_keys_by_hand():
    log3 = math.log(3)
    out = attention_oracle(one_head(2), one_head(0, log3 / 2), one_head(4, 8))
    assert flat(out.output) == pytest.approx([7.0])
    assert flat(out.weights) == pytest.approx([0.25, 0.75])
    assert flat(out.lse) == pytest.approx([math.log(4)])


def test_scale_defaults_to_the_inverse_root_of_head_dim():
    query = np.full((1, 1, 1, 4), 1.0)
    lse = attention_oracle(query, query, query).lse
    assert flat(lse) == pytest.approx([2.0])
    assert flat(attention_oracle(query, query, query, softmax_scale=3).lse) == [12.0]


def test_bias_is_added_before_the_cap_and_is_not_scaled():
    args = (one_head(1), one_head(2), one_head(0))
    out = attention_oracle(*args, bias=[[5.0]], softmax_scale=0.5, logits_soft_cap=2.0)
    assert flat(out.lse) == pytest.approx([2 * math.tanh(6 / 2)])


def test_groups_of_query_heads_are_neighbours():
    value = np.array([10.0, 20.0]).reshape(1, 1, 2, 1)
    out = attention_oracle(np.zeros((1, 1, 4, 1)), np.zeros((1, 1, 2, 1)), value)
    assert flat(out.output) == [10, 10, 20, 20]


@pytest.mark.parametrize(
    ("options", "means"),
    [
        ({"causal": True}, [1, 1.5, 7 / 3]),
        ({"causal": True, "q_offset": 1}, [1.5, 7 / 3, 7 / 3]),
        ({"causal": True, "q_offset": -1}, [0, 1, 1.5]),
        ({"causal": True, "q_offset": np.array([1])}, [1.5, 7 / 3, 7 / 3]),
        ({"window": (0, 0)}, [1, 2, 4]),
        ({"window": (1, 0)}, [1, 1.5, 3]),
        ({"window": (0, 1)}, [1.5, 3, 4]),
        ({"window": (None, 0)}, [1, 1.5, 7 / 3]),
        ({"window": (0, None)}, [7 / 3, 3, 4]),
        ({"window": (1, 1), "causal": True}, [1, 1.5, 3]),
        ({"window": (0, 0), "q_offset": 1}, [2, 4, 0]),
        ({"mask": np.array([True, False, True])}, [2.5, 2.5, 2.5]),
        ({"mask": np.array([[True], [False], [True]])}, [7 / 3, 0, 7 / 3]),
        ({"kv_lengths": np.array([1])}, [1, 1, 1]),
        ({"q_lengths": np.array([1])}, [7 / 3, 0, 0]),
        (
            {"q_segment_ids": [[3, 0, -1]], "kv_segment_ids": [[0, 0, -1]]},
            [0, 1.5, 0],
        ),
    ],
)
def test_each_row_means_what_it_sees(options, means):
    assert flat(rows(3, [1, 2, 4], **options).output) == pytest.approx(means)


def test_a_decode_step_sees_the_whole_cache():
    assert flat(rows(1, [1, 2, 4], causal=True, q_offset=2).output) == [
        pytest.approx(7 / 3)
    ]


def test_sinks_join_the_denominator_alone():
    args = (np.zeros((1, 1, 2, 1)), np.zeros((1, 1, 1, 1)), np.full((1, 1, 1, 1), 6.0))
    sinks = [[0.0, math.log(4)], [-INF, math.log(2)]]
    out = attention_oracle(*args, softmax_aux=sinks, logits_soft_cap=0.1)
    assert flat(out.output) == pytest.approx([1.0, 2.0])
    assert flat(out.lse) == pytest.approx([math.log(6), math.log(3)])
    out = attention_oracle(*args, softmax_aux=[0.0, math.log(2)], softmax_scale=9)
    assert flat(out.output) == pytest.approx([3.0, 2.0])


def test_dropout_rescales_what_it_keeps_and_leaves_lse():
    out = rows(1, [1, 3], dropout_keep=[False, True], dropout_prob=0.75)
    assert flat(out.output) == pytest.approx([6.0])
    assert flat(out.weights) == pytest.approx([0.0, 2.0])
    assert flat(out.lse) == pytest.approx([math.log(2)])


# Empty rows, dirty padding, zero-length axes.


@pytest.mark.parametrize(
    "hide", [{"mask": False}, {"bias": -INF}, {"kv_lengths": [0]}, {"q_lengths": [0]}]
)
def test_an_empty_row_is_zero(hide):
    options = {k: np.asarray(v) for k, v in hide.items()}
    out = rows(1, [1, 3], **options)
    assert (flat(out.output), flat(out.weights)) == ([0], [0, 0])
    assert flat(out.lse) == [-INF]
    out = rows(1, [1, 3], softmax_aux=[0.5], **options)
    assert flat(out.output) == [0]
    assert flat(out.lse) == pytest.approx([0.5])


@pytest.mark.parametrize("hide", [{"mask": np.array(False)}, {"bias": np.array(-INF)}])
def test_an_empty_row_gives_gradient_to_the_sinks_alone(hide):
    args = (one_head(1), one_head(1, 2), one_head(1, 3))
    sinks = np.array([[0.0, math.log(3)]])
    grads = attention_oracle_vjp(
        *args, softmax_aux=sinks, d_output=one_head(NAN), d_lse=[[[8.0]]], **hide
    )
    assert flat(grads.pop("softmax_aux")) == pytest.approx([2.0, 6.0])
    assert all(not g.any() for g in grads.values())
    grads = attention_oracle_vjp(
        *args, softmax_aux=[-INF], d_output=one_head(1), d_lse=[[[8.0]]], **hide
    )
    assert all(not g.any() for g in grads.values())


def test_a_soft_cap_turns_minus_infinity_into_a_finite_logit():
    out = rows(1, [1, 3], bias=np.array(-INF), logits_soft_cap=2.0)
    assert flat(out.output) == pytest.approx([2.0])
    assert flat(out.lse) == pytest.approx([math.log(2) - 2])


@pytest.mark.parametrize("dirt", [NAN, INF, -INF])
def test_dirty_padding_changes_nothing(dirt):
    clean, rng = draw(), np.random.default_rng(1)
    options = {
        "q_lengths": np.array([3, 2]),
        "kv_lengths": np.array([4, 1]),
        "softmax_aux": rng.normal(size=HEADS),
        "logits_soft_cap": 3.0,
        "causal": True,
        "q_offset": 1,
    }
    cotangents = {
        "d_output": rng.normal(size=(BATCH, Q_LEN, HEADS, V_DIM)),
        "d_lse": rng.normal(size=(BATCH, HEADS, Q_LEN)),
    }
    bias = rng.normal(size=(BATCH, 1, Q_LEN, KV_LEN))
    dirty, dirty_bias = [x.copy() for x in clean], bias.copy()
    dirty_d_output = cotangents["d_output"].copy()
    for b, (q, kv) in enumerate(zip((3, 2), (4, 1), strict=True)):
        dirty[0][b, q:] = dirty[1][b, kv:] = dirty[2][b, kv:] = dirt
        dirty_bias[b, :, q:] = dirty_bias[b, :, :, kv:] = dirt
        dirty_d_output[b, q:] = dirt
    got = attention_oracle(*dirty, bias=dirty_bias, **options)
    want = attention_oracle(*clean, bias=bias, **options)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-13)
    want = attention_oracle_vjp(*clean, bias=bias, **options, **cotangents)
    cotangents["d_output"] = dirty_d_output
    got = attention_oracle_vjp(*dirty, bias=dirty_bias, **options, **cotangents)
    for name in ARRAYS:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-12, err_msg=name)
        assert np.isfinite(got[name]).all()


@pytest.mark.parametrize("where", [1, 2])
def test_a_visible_nan_reaches_the_rows_that_see_it(where):
    args = [one_head(1, 2, 3), one_head(1, 2, 3), one_head(1, 2, 3)]
    args[where][0, 2] = NAN
    out = attention_oracle(*args, causal=True)
    assert np.isnan(out.output).ravel().tolist() == [False, False, True]
    assert np.isnan(out.lse).ravel().tolist() == [False, False, where == 1]
    grads = attention_oracle_vjp(*args, d_output=one_head(1, 1, 1), causal=True)
    assert np.isnan(grads["query"]).ravel().tolist() == [False, False, True]


def test_a_nan_query_reaches_its_own_row_and_the_keys_it_sees():
    args = (one_head(NAN, 2), one_head(1, 2), one_head(1, 2))
    out = attention_oracle(*args, window=(0, 0))
    assert np.isnan(out.output).ravel().tolist() == [True, False]
    assert np.isnan(out.weights).ravel().tolist() == [True, False, False, False]
    grads = attention_oracle_vjp(*args, d_output=one_head(1, 1), window=(0, 0))
    for name in ("query", "key", "value"):
        assert np.isnan(grads[name]).ravel().tolist() == [True, False], name


@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
@pytest.mark.parametrize(
    "sizes",
    list(itertools.product([0, 2], [0, 3], [0, 3], [(0, 0), (0, 2), (4, 2)], [0, 2])),
)
def test_zero_length_axes_are_legal(sizes, layout):
    b, t, s, (heads, kv_heads), d = sizes
    shapes = [(b, t, heads, d), (b, s, kv_heads, d), (b, s, kv_heads, 3)]
    args = [np.ones(shape) for shape in shapes]
    if layout == "bhtd":
        args = [x.swapaxes(1, 2) for x in args]
    options = {"bias": np.zeros((heads, 1, 1)), "softmax_aux": np.zeros((heads, 0))}
    options |= {"layout": layout, "causal": True, "q_offset": 0}
    out = attention_oracle(*args, **options)
    want = (b, t, heads, 3) if layout == "bthd" else (b, heads, t, 3)
    assert out.output.shape == want
    assert (out.weights.shape, out.lse.shape) == ((b, heads, t, s), (b, heads, t))
    assert np.isfinite(out.output).all()
    if s == 0:
        assert (out.lse == -INF).all()
    grads = attention_oracle_vjp(*args, d_output=np.ones(want), **options)
    for name, x in zip(ARRAYS, [*args, *map(options.get, ARRAYS[3:])], strict=True):
        assert grads[name].shape == x.shape
        assert np.isfinite(grads[name]).all()


def test_zero_tokens_are_legal_in_thd():
    args = [np.ones((0, 2, 3))] * 3
    out = attention_oracle(*args, layout="thd")
    assert [x.shape for x in out] == [(0, 2, 3), (2, 0, 0), (2, 0)]
    grads = attention_oracle_vjp(*args, d_output=out.output, layout="thd")
    assert [g.shape for g in grads.values()] == [(0, 2, 3)] * 3


# Layouts and dtypes.

LAYOUT_OPTIONS = {
    "bias": RNG.normal(size=(HEADS, 1, KV_LEN)),
    "mask": RNG.random((Q_LEN, KV_LEN)) < 0.9,
    "softmax_aux": RNG.normal(size=HEADS),
    "kv_lengths": np.array([4]),
    "window": (2, 1),
    "q_offset": 1,
}


def in_layouts(x):
    """A bthd array of one sample, in every layout."""
    return {"bthd": x, "bhtd": x.swapaxes(1, 2), "thd": x[0]}


@pytest.mark.parametrize("layout", ["bhtd", "thd"])
def test_layouts_agree(layout):
    ids = {"q_segment_ids": np.array([0, 0, 1, 1])}
    ids["kv_segment_ids"] = np.array([0, 0, 1, 1, 1])
    thd = layout == "thd"
    args, d_lse = draw(batch=1), RNG.normal(size=(1, HEADS, Q_LEN))
    d_output = RNG.normal(size=(1, Q_LEN, HEADS, V_DIM))
    mine = {**LAYOUT_OPTIONS, **(ids if thd else {k: v[None] for k, v in ids.items()})}
    theirs = {**LAYOUT_OPTIONS, **{k: v[None] for k, v in ids.items()}}
    moved = [in_layouts(x)[layout] for x in args]
    got = attention_oracle(*moved, layout=layout, **mine)
    want = attention_oracle(*args, **theirs)
    np.testing.assert_array_equal(got.output, in_layouts(want.output)[layout])
    np.testing.assert_array_equal(got.weights, want.weights[0] if thd else want.weights)
    np.testing.assert_array_equal(got.lse, want.lse[0] if thd else want.lse)
    got = attention_oracle_vjp(
        *moved,
        layout=layout,
        d_output=in_layouts(d_output)[layout],
        d_lse=d_lse[0] if thd else d_lse,
        **mine,
    )
    want = attention_oracle_vjp(*args, d_output=d_output, d_lse=d_lse, **theirs)
    for name in ("query", "key", "value"):
        np.testing.assert_array_equal(got[name], in_layouts(want[name])[layout])
    for name in ("bias", "softmax_aux"):
        np.testing.assert_array_equal(got[name], want[name])


def test_packing_samples_with_segments_equals_a_batch():
    query, key, value = draw(q=KV_LEN)
    ids = np.repeat(np.arange(BATCH), KV_LEN)
    packed = [x.reshape(-1, *x.shape[2:]) for x in (query, key, value)]
    got = attention_oracle(
        *packed, q_segment_ids=ids, kv_segment_ids=ids, causal=True, layout="thd"
    )
    want = attention_oracle(query, key, value, causal=True)
    np.testing.assert_allclose(got.output, want.output.reshape(-1, HEADS, V_DIM))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "float32"])
def test_jax_arrays_of_any_float_dtype_are_read_exactly(dtype):
    numbers = [one_head(0.5, 1.0), one_head(0.25, -2.0), one_head(1.5, 3.0)]
    got = attention_oracle(*[jnp.asarray(x, dtype=dtype) for x in numbers])
    want = attention_oracle(*numbers)
    assert got.output.dtype == got.lse.dtype == got.weights.dtype == np.float64
    np.testing.assert_array_equal(got.output, want.output)


def test_float64_keeps_its_digits():
    third = 1 / 3
    assert flat(rows(1, [third]).output) == [third]


# Gradients against central differences.


def differences(arrays, options, d_output, d_lse, d_weights, step=1e-5):
    named = dict(zip(ARRAYS, arrays, strict=False)) | options

    def loss(**changed):
        out = attention_oracle(**{**named, **changed})
        lse = np.where(out.lse == -INF, 0.0, out.lse)
        weights = (out.weights * d_weights).sum()
        return (out.output * d_output).sum() + (lse * d_lse).sum() + weights

    grads = {}
    for name in ARRAYS:
        if name not in named:
            continue
        grads[name] = np.zeros(named[name].shape)
        for at in np.ndindex(named[name].shape):
            up, down = named[name].copy(), named[name].copy()
            up[at] += step
            down[at] -= step
            slope = (loss(**{name: up}) - loss(**{name: down})) / (2 * step)
            grads[name][at] = slope
    return grads


BIAS_SHAPES = [(), (KV_LEN,), (HEADS, 1, 1), (BATCH, 1, Q_LEN, 1), FULL]
COMBINATIONS = {
    **{k: v for k, v in FEATURES.items() if k not in ("left_window", "right_window")},
    **{
        f"bias{list(shape)}": {
            "bias": RNG.normal(size=shape),
            "logits_soft_cap": 0.9,
            "softmax_aux": RNG.normal(size=HEADS),
        }
        for shape in BIAS_SHAPES
    },
    "sinks_dropout": {**FEATURES["sinks"], **FEATURES["dropout"]},
    "empty_rows_sinks": {**FEATURES["sinks"], **FEATURES["lengths"]},
    "cap_scale": {"logits_soft_cap": 0.5, "softmax_scale": 1.3},
}


@pytest.mark.parametrize("name", COMBINATIONS)
def test_gradients_equal_central_differences(name):
    arrays, rng = draw(3), np.random.default_rng(5)
    d_output = rng.normal(size=(BATCH, Q_LEN, HEADS, V_DIM))
    d_lse = rng.normal(size=(BATCH, HEADS, Q_LEN))
    d_weights = rng.normal(size=(BATCH, HEADS, Q_LEN, KV_LEN))
    options = COMBINATIONS[name]
    cotangents = {"d_output": d_output, "d_lse": d_lse, "d_weights": d_weights}
    got = attention_oracle_vjp(*arrays, **cotangents, **options)
    want = differences(arrays, options, **cotangents)
    assert got.keys() == want.keys()
    for argument, theirs in want.items():
        assert got[argument].shape == theirs.shape
        np.testing.assert_allclose(
            got[argument], theirs, rtol=1e-6, atol=1e-8, err_msg=argument
        )


def test_gradients_of_the_lse_by_hand():
    args = (one_head(2), one_head(0, math.log(3) / 2), one_head(4, 8))
    grads = attention_oracle_vjp(*args, d_output=one_head(0), d_lse=[[[4.0]]])
    assert flat(grads["key"]) == pytest.approx([2.0, 6.0])
    assert flat(grads["query"]) == pytest.approx([3 * math.log(3) / 2])
    assert flat(grads["value"]) == [0, 0]


# Mistakes in the call.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"causal": True}, r"q_offset.*use 0 .* or kv_len - q_len"),
        ({"window": (1, 1)}, "q_offset=None, q_len=2, kv_len=3"),
        ({"window": 3}, "window=3.*row's own"),
        ({"window": (-1, None)}, r"window=\(-1, None\)"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap=0.0"),
        ({"logits_soft_cap": INF}, "logits_soft_cap=inf"),
        ({"dropout_prob": 0.5}, "dropout_keep=None"),
        ({"dropout_prob": 1.0, "dropout_keep": True}, "dropout_prob=1.0"),
        ({"q_segment_ids": [[0, 0]]}, "both or neither"),
        ({"softmax_aux": [0.0, 0.0]}, "heads=1"),
        ({"bias": np.zeros((2, 2))}, "bias.shape="),
        ({"bias": np.zeros((1, 1, 1, 1, 1))}, "bias.shape="),
        ({"kv_lengths": [1, 2]}, "kv_lengths.shape="),
        ({"causal": True, "q_offset": [0, 1]}, "q_offset.shape="),
        ({"layout": "tbhd"}, "layout='tbhd'"),
        ({"layout": "thd"}, "query of rank 3"),
    ],
)
def test_a_wrong_call_is_a_value_error_with_the_value(options, message):
    with pytest.raises(ValueError, match=f"^attention_oracle: expected .*{message}"):
        rows(2, [1, 2, 3], **options)


@pytest.mark.parametrize("kv_heads", [0, 2])
def test_heads_must_divide(kv_heads):
    key = np.zeros((1, 1, kv_heads, 1))
    with pytest.raises(ValueError, match=f"heads=3, kv_heads={kv_heads}"):
        attention_oracle(np.zeros((1, 1, 3, 1)), key, key)


def test_masks_must_be_boolean():
    with pytest.raises(TypeError, match=r"mask\.dtype=float64; True takes part"):
        rows(1, [1], mask=np.ones((1, 1)))


def test_cotangents_have_the_shape_of_their_outputs():
    args = (one_head(1), one_head(1), one_head(1))
    with pytest.raises(ValueError, match="d_output"):
        attention_oracle_vjp(*args, d_output=one_head(1, 2))
    with pytest.raises(ValueError, match=r"d_lse\.shape=\[1\]"):
        attention_oracle_vjp(*args, d_output=one_head(1), d_lse=[1.0])
    with pytest.raises(TypeError, match="windows"):
        attention_oracle_vjp(*args, d_output=one_head(1), windows=(1, 1))


def test_weights_add_up_to_one_at_huge_logits():
    x = np.ones((1, 3, 1, 2))
    bias = np.full((1, 1, 3, 3), np.finfo(np.float32).min)
    out = attention_oracle(x, x, x * np.arange(3.0)[:, None, None], bias=bias)
    np.testing.assert_allclose(out.weights, 1 / 3)
    np.testing.assert_allclose(out.output, 1.0)
