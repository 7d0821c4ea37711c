"""Mask patterns: what they show, when they are equal, and what core makes of them."""

import copy
import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from switchax import MaskPattern, UnsupportedError, attention

from .kernels import kernel

NOISE = np.random.default_rng(0).random((13, 21)) < 0.5
ROW, KEY = np.arange(13)[:, None], np.arange(21)


def upper(row, key):
    return key >= row


class Unhashable:
    __hash__ = None

    def __call__(self, row, key):
        return key >= row


@pytest.mark.parametrize(
    ("pattern", "shown"),
    [
        (MaskPattern(NOISE), NOISE),
        (MaskPattern(NOISE.view(np.matrix)), NOISE),
        (MaskPattern(upper, 13, 21), ROW <= KEY),
        (MaskPattern(lambda row, key: key < 4, 13, 21), np.tile(KEY < 4, (13, 1))),
        (MaskPattern.prefix(3, 13, 21, 2), (KEY < 3) | (KEY <= ROW + 2)),
        (MaskPattern.chunked(4, 13, 21, 8), (ROW + 8) // 4 == KEY // 4),
        (MaskPattern(NOISE[:0]), NOISE[:0]),
        (MaskPattern(NOISE[:, :0]), NOISE[:, :0]),
    ],
    ids=range(8),
)
def test_what_it_shows_is_the_same_whole_by_tiles_and_elsewhere(pattern, shown):
    np.testing.assert_array_equal(np.asarray(pattern), shown)
    for rows in (slice(0, 5), slice(3, 13), slice(12, 40)):
        for keys in (slice(0, 8), slice(9, 17), slice(7, 40)):
            np.testing.assert_array_equal(pattern.tile(rows, keys), shown[rows, keys])
    for other in (pickle.loads(pickle.dumps(pattern)), MaskPattern(shown)):
        np.testing.assert_array_equal(np.asarray(other), shown)
        assert str(other) == str(pattern)
    assert copy.deepcopy(pattern) is copy.copy(pattern) is pattern
    larger = np.zeros((16, 32), bool)
    larger[: shown.shape[0], : shown.shape[1]] = shown
    np.testing.assert_array_equal(np.asarray(pattern.padded(16, 32)), larger)


def test_patterns_are_equal_by_array_or_function():
    same = MaskPattern(NOISE.copy())
    assert MaskPattern(NOISE) == same
    assert hash(MaskPattern(NOISE)) == hash(same)
    assert same.padded(16, 32) == MaskPattern(NOISE).padded(16, 32) != same
    assert MaskPattern(~NOISE) != same
    assert MaskPattern(NOISE[:5]) != same
    assert MaskPattern(upper, 5, 5) == MaskPattern(upper, 5, 5)
    assert MaskPattern(upper, 5, 5) != MaskPattern(upper, 5, 6)
    assert MaskPattern.chunked(4, 9, 9) == MaskPattern.chunked(4, 9, 9)
    assert MaskPattern.chunked(4, 9, 9) != MaskPattern.chunked(3, 9, 9)
    assert str(MaskPattern(~NOISE)) != str(same)


def test_it_is_a_copy():
    array = NOISE.copy()
    pattern = MaskPattern(array)
    array[:] = True
    np.testing.assert_array_equal(np.asarray(pattern), NOISE)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (
            lambda: MaskPattern(3),
            TypeError,
            "an array of numpy or a function, got a int",
        ),
        (lambda: MaskPattern(jnp.ones((2, 2), bool)), TypeError, "numpy.asarray"),
        (lambda: MaskPattern(NOISE.astype(int)), TypeError, "pass mask != 0"),
        (lambda: MaskPattern(np.ma.array(NOISE)), TypeError, "masked array"),
        (lambda: MaskPattern(NOISE[None]), ValueError, r"shape \(1, 13, 21\)"),
        (lambda: MaskPattern(NOISE, 12), ValueError, "q_len=13, got q_len=12"),
        (lambda: MaskPattern(upper), TypeError, "q_len as an int from 0 on"),
        (lambda: MaskPattern(upper, 3, -1), TypeError, "kv_len=-1"),
        (lambda: MaskPattern(Unhashable(), 3, 3), TypeError, "with a hash"),
        (lambda: MaskPattern.chunked(0, 3, 3), ValueError, "chunk=0"),
        (
            lambda: np.asarray(MaskPattern(lambda r, k: r - k, 3, 3)),
            TypeError,
            "return bools",
        ),
        (
            lambda: np.asarray(MaskPattern(lambda r, k: np.ones(7, bool), 3, 3)),
            ValueError,
            r"return \(3, 3\), got \(7,\)",
        ),
    ],
)
def test_what_is_no_pattern_is_an_error(make, error, said):
    with pytest.raises(error, match=said):
        make()


X = jax.random.normal(jax.random.key(0), (2, 13, 2, 8))
Y = jax.random.normal(jax.random.key(1), (2, 21, 2, 8))


@pytest.mark.parametrize("name", ["vanilla", "sdpa", "chunked"])
@pytest.mark.parametrize("layout", ["bthd", "bhtd"])
def test_any_operation_with_masks_honours_it(name, layout):
    q, k = (x if layout == "bthd" else jnp.swapaxes(x, 1, 2) for x in (X, Y))
    given = {"causal": True, "q_offset": 8, "operation": name, "layout": layout}
    found = attention(q, k, k, mask_pattern=MaskPattern(NOISE), **given)
    expected = attention(q, k, k, mask=NOISE, **given)
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_function_of_jax_is_asked_while_a_call_is_traced():
    pattern = MaskPattern(lambda row, key: jnp.equal(row // 4, key // 4), 13, 21)
    call = functools.partial(attention, mask_pattern=pattern, operation="vanilla")
    found = jax.jit(call)(X, Y, Y)
    expected = attention(X, Y, Y, mask=ROW // 4 == KEY // 4, operation="vanilla")
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_packed_tokens_have_one_too():
    q, k = X[0], Y[0]
    given = {"operation": "vanilla", "layout": "thd"}
    found = attention(q, k, k, mask_pattern=MaskPattern(NOISE), **given)
    np.testing.assert_allclose(
        found, attention(q, k, k, mask=NOISE, **given), atol=1e-6
    )


def test_what_takes_no_masks_refuses_it():
    plain = kernel("plain_only")
    with pytest.raises(UnsupportedError, match="mask_pattern=13x21"):
        plain()(X, Y, Y, mask_pattern=MaskPattern(NOISE))


def test_an_operation_that_declares_it_is_given_it_padded():
    calls = []
    takes = kernel(
        "takes", {"mask_pattern", "kv_lengths"}, calls, multiples={"kv_len": 8}
    )
    found = takes()(X, Y, Y, mask_pattern=MaskPattern(NOISE)).attention_outputs
    given = calls[0]["mask_pattern"]
    assert (given.q_len, given.kv_len) == (13, 24)
    expected = attention(X, Y, Y, mask=NOISE, operation="vanilla")
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "error"),
    [(NOISE, TypeError), (MaskPattern(NOISE[:5]), ValueError), (upper, TypeError)],
    ids=["array", "lengths", "function"],
)
def test_another_type_or_length_is_an_error(given, error):
    with pytest.raises(error, match="expected mask_pattern"):
        attention(X, Y, Y, mask_pattern=given, operation="vanilla")


def test_equal_patterns_are_traced_once_and_others_again():
    calls = []
    takes = kernel("counts", {"mask_pattern"}, calls)()
    for pattern in (NOISE, NOISE.copy(), ~NOISE):
        takes(X, Y, Y, mask_pattern=MaskPattern(pattern))
    assert len(calls) == 2


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 99))
def test_bits_are_those_of_any_length(q_len, kv_len, seed):
    shown = np.random.default_rng(seed).random((q_len, kv_len)) < 0.5
    pattern = MaskPattern(shown)
    np.testing.assert_array_equal(np.asarray(pattern), shown)
    assert pattern == pickle.loads(pickle.dumps(pattern))


@dataclasses.dataclass(frozen=True)
class Flagged:
    flag: object = dataclasses.field(compare=False)

    def __call__(self, row, key):
        return (key >= row) == bool(self.flag)


def test_functions_that_say_they_are_equal_are_not_taken_for_one():
    one, other = (MaskPattern(Flagged(flag), 4, 4) for flag in (True, False))
    assert one != other
    assert one == MaskPattern(Flagged(True), 4, 4)
    x = jnp.ones((1, 4, 1, 8)) * jnp.arange(4.0)[None, :, None, None]
    found = [
        attention(x, x, x, mask_pattern=p, operation="vanilla") for p in (one, other)
    ]
    assert not np.array_equal(*found)


def test_it_has_no_subclass_and_does_not_change():
    with pytest.raises(TypeError, match="no subclass, got Other"):
        type("Other", (MaskPattern,), {})
    with pytest.raises(AttributeError):
        MaskPattern(NOISE).q_len = 3


@pytest.mark.parametrize("within", ["plain", "mesh", "shard_map"])
@pytest.mark.parametrize(
    "function",
    [
        lambda row, key: jnp.asarray(row) >= jnp.asarray(key),
        lambda row, key: jnp.mod(row, 2) == jnp.mod(key, 2),
        lambda row, key: jnp.tri(4, dtype=bool)[jnp.asarray(row), jnp.asarray(key)],
    ],
    ids=["compare", "mod", "index"],
)
def test_functions_of_jnp_are_asked_wherever_a_call_is_traced(function, within):
    pattern = MaskPattern(function, 4, 4)
    x = jax.random.normal(jax.random.key(0), (4, 4, 2, 8))

    def call(x):
        return attention(x, x, x, mask_pattern=pattern, operation="vanilla")

    expected = attention(x, x, x, mask=np.asarray(pattern), operation="vanilla")
    mesh = jax.make_mesh((4, 2), ("dp", "tp"), (jax.sharding.AxisType.Auto,) * 2)
    if within == "plain":
        found = jax.jit(call)(x)
    else:
        if within == "shard_map":
            spec = jax.sharding.PartitionSpec("dp", None, "tp")
            call = jax.shard_map(call, mesh=mesh, in_specs=spec, out_specs=spec)
        with jax.set_mesh(mesh):
            found = jax.jit(call)(x)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: MaskPattern.prefix(0, 4, 4, 2**63 - 2), ValueError, "within 2"),
        (lambda: MaskPattern.chunked(2**70, 4, 4), ValueError, "within 2"),
        (lambda: MaskPattern.prefix(1.5, 4, 4), TypeError, "prefix_len as an int"),
        (lambda: MaskPattern.chunked(2, 4, 4, 0.5), TypeError, "q_offset as an int"),
        (lambda: MaskPattern(NOISE, 13.0), TypeError, "q_len as an int"),
        (
            lambda: np.asarray(MaskPattern(lambda r, k: np.ma.array(r >= k), 3, 4)),
            TypeError,
            "a masked array",
        ),
        (
            lambda: jax.jit(
                lambda t: np.asarray(MaskPattern(lambda r, k: r >= k + t, 3, 4))
            )(1),
            TypeError,
            "a traced value",
        ),
    ],
    ids=range(7),
)
def test_what_a_pattern_cannot_be_made_of_is_said(make, error, said):
    with pytest.raises(error, match=said):
        make()
