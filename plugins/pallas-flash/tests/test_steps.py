"""Which tiles are visited: all that anybody sees, and no others where it is static."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchax_pallas_flash.steps import (
    FIRST,
    LAST,
    Hidden,
    bounds,
    key_steps,
    row_steps,
)

Q_LEN, KV_LEN, BLOCK, CHUNK, CHUNKS = 300, 520, 128, 64, 3


def positions(**given):
    default = {"causal": False, "window": None, "q_offset": 0}
    lengths = {"q_lengths": None, "kv_lengths": None}
    first, end = bounds(Q_LEN, KV_LEN, **{**default, **lengths, **given})
    return Hidden(first, end)


def visible(hidden):
    """Which rows see which keys, `[batch, q_len, kv_len]`."""
    key = np.arange(KV_LEN)
    if hidden.end is None:
        return np.ones((1, Q_LEN, KV_LEN), bool)
    first, end = (np.asarray(x)[..., None] for x in (hidden.lower, hidden.end))
    return (key >= first) & (key < end)


CALLS = {
    "all": {},
    "causal": {"causal": True, "q_offset": 100},
    "window": {"window": (70, 5), "q_offset": 60},
    "nothing": {"causal": True, "q_offset": -1000},
    "far": {"window": (2**28, 2**28), "q_offset": 2**29},
    "traced": {"causal": True, "q_offset": jnp.int32(30)},
    "per batch": {"causal": True, "q_offset": jnp.array([0, 200], jnp.int32)},
    "lengths": {
        "q_lengths": jnp.array([130, 300, 0], jnp.int32),
        "kv_lengths": jnp.array([64, 2**31 - 1, 9], jnp.int32),
    },
}


@pytest.mark.parametrize("traced", [True, False])
@pytest.mark.parametrize(
    ("offset", "window"),
    [
        (1000, (900, None)),  # from far beyond all keys back to some
        (-1000, (None, 1100)),
        (2**28 + 100, (2**28, 0)),
        (-(2**29), (2**28, 2**28)),
        (100, (0, 3)),
    ],
)
def test_bounds_are_those_of_positions_that_do_not_wrap(offset, window, traced):
    given = jnp.int32(offset) if traced else offset
    found = visible(positions(window=window, q_offset=given))
    row, key = np.arange(Q_LEN)[:, None] + offset, np.arange(KV_LEN)
    left, right = (2**40 if side is None else side for side in window)
    np.testing.assert_array_equal(found[0], (row - left <= key) & (key <= row + right))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("by_rows", [True, False])
def test_what_is_seen_is_visited_once_and_what_is_whole_is_told(name, by_rows):
    hidden = positions(**CALLS[name])
    seen = visible(hidden)
    lists = row_steps if by_rows else key_steps
    steps = lists(hidden, Q_LEN, KV_LEN, BLOCK, CHUNK, CHUNKS)
    lengths = (Q_LEN, KV_LEN) if by_rows else (KV_LEN, Q_LEN)
    seen = seen if by_rows else seen.swapaxes(1, 2)
    for sample in range(len(seen)):
        of = sample if len(steps.block) > 1 else 0
        visits = np.zeros(lengths, int)
        order = []
        for n in range(steps.block.shape[1]):
            block, span, whole, count = (
                int(x[of, n])
                for x in (steps.block, steps.span, steps.whole, steps.count)
            )
            order.append(block)
            for i in range(count):
                chunk = span * CHUNKS + int(steps.chunk[of, n, i])
                tile = (
                    slice(block * BLOCK, (block + 1) * BLOCK),
                    slice(chunk * CHUNK, (chunk + 1) * CHUNK),
                )
                visits[tile] += 1
                if i < whole:
                    assert seen[sample][tile].all()
        assert visits.max() <= 1
        assert not (seen[sample] & (visits == 0)).any()
        # All steps of a block follow each other, and every block has some.
        blocks = -(-lengths[0] // BLOCK)
        assert order == sorted(order)
        assert set(order) == set(range(blocks))
        ends = np.asarray(steps.ends[of])
        firsts = [n for n, block in enumerate(order) if n == order.index(block)]
        assert np.flatnonzero(ends & FIRST).tolist() == firsts
        assert (ends & LAST > 0).sum() == blocks


def test_what_is_static_has_no_step_in_vain():
    hidden = positions(causal=True)
    steps = row_steps(hidden, Q_LEN, KV_LEN, BLOCK, CHUNK, 1)
    assert isinstance(steps.block, np.ndarray)
    assert (steps.count > 0).all()
    assert steps.block.shape[1] == 2 + 4 + 5  # of 3 blocks of 9 chunks


def test_ids_and_masks_decide_too():
    ids = jnp.repeat(jnp.arange(4, dtype=jnp.int32), 64)[None]
    hidden = Hidden(q_ids=ids, kv_ids=ids)
    steps = jax.jit(lambda h: row_steps(h, 256, 256, 128, 64, 4))(hidden)
    assert steps.count.tolist() == [[2, 2]]
    assert steps.whole.tolist() == [[0, 0]]  # two documents are in a block of rows
    mask = jnp.zeros((1, 2, 256, 256), bool).at[:, :, :128, 64:128].set(True)
    steps = row_steps(Hidden(mask=mask), 256, 256, 128, 64, 4)
    assert steps.count.tolist() == [[1, 0]]
    assert steps.whole.tolist() == [[1, 0]]
    assert steps.chunk[0, 0, 0] == 1
