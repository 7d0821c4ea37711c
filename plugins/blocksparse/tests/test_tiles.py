"""Tiles that a pattern hides are not visited; those that are alike are kept once."""

import numpy as np
import pytest

from switchax import MaskPattern
from switchax_pallas_flash.patterns import (
    first_rows,
    packed_pairs,
    sees_of,
    table_of,
)
from switchax_pallas_flash.steps import Hidden, key_steps, row_steps

Q_LEN, KV_LEN = 300, 520
NOISE = np.random.default_rng(0).random((Q_LEN, KV_LEN)) < 0.01
PATTERNS = {
    "noise": MaskPattern(NOISE),
    "chunks": MaskPattern.chunked(100, Q_LEN, KV_LEN),
    "prefix": MaskPattern.prefix(70, Q_LEN, KV_LEN),
    "none": MaskPattern(lambda row, key: (row < 0) & (key < 0), Q_LEN, KV_LEN),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_maps_are_those_of_all_pairs(name):
    pattern = PATTERNS[name]
    shown = np.asarray(pattern)
    some, whole = sees_of(pattern, 128, 64)
    table = table_of(pattern, 128, 64)
    for i in range(3):
        for j in range(9):
            tile = shown[i * 128 : (i + 1) * 128, j * 64 : (j + 1) * 64]
            assert some[0, i, j] == tile.any()
            assert whole[0, i, j] == tile.all()
            kept = table.tiles[table.which[i, j]]
            np.testing.assert_array_equal(kept[: len(tile), : tile.shape[1]], tile)
            assert kept.sum() == tile.sum()
    bits = np.unpackbits(packed_pairs(pattern), axis=1)[:, :KV_LEN]
    np.testing.assert_array_equal(bits, shown)


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("bounded", [False, True])
def test_first_rows_are_those_that_see_a_key(name, bounded):
    row, key = np.arange(Q_LEN), np.arange(KV_LEN)
    first = np.maximum(row - 30, 0).astype("int32") if bounded else None
    end = (row + 5).astype("int32") if bounded else None
    shown = np.asarray(PATTERNS[name])
    if bounded:
        shown = shown & (key >= first[:, None]) & (key < end[:, None])
    expected = np.where(shown.any(axis=0), shown.argmax(axis=0), Q_LEN)
    np.testing.assert_array_equal(first_rows(PATTERNS[name], first, end), expected)


def test_tiles_that_are_alike_are_kept_once():
    causal = MaskPattern(lambda row, key: key <= row, 4096, 4096)
    table = table_of(causal, 512, 512)
    assert len(table.tiles) == 3  # nothing, the diagonal, all
    assert table.which.shape == (8, 8)


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("name", PATTERNS)
def test_no_tile_is_visited_that_nobody_sees(name, by_rows):
    pattern = PATTERNS[name]
    lists = row_steps if by_rows else key_steps
    steps = lists(Hidden(), Q_LEN, KV_LEN, 128, 64, 2, pattern)
    some, whole = sees_of(pattern, *((128, 64) if by_rows else (64, 128)))
    assert isinstance(steps.block, np.ndarray)
    assert steps.count.sum() == some.sum()
    if KV_LEN % 64 == 0 or not by_rows:
        assert steps.whole.sum() <= whole.sum()
