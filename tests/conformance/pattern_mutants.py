"""Mistakes of kernels that make maps of a mask pattern; see `mutants`."""

import jax
import jax.numpy as jnp
import numpy as np

from switchax import MaskPattern

from .block_mutants import BLOCK, blocks, hidden, mutants_of
from .mutants import Right, gradient_of

__all__ = ["PATTERN_MUTANTS"]

PATTERN_MUTANTS = {}
mutant = mutants_of(PATTERN_MUTANTS)


class Maps(Right):
    """Reads another pattern than it was given."""

    def visible(self, call):
        if call.mask_pattern is None:
            return super().visible(call)
        pairs = np.asarray(call.mask_pattern)
        other = MaskPattern(np.asarray(self.mapped(call, pairs), bool))
        return super().visible(call.but(mask_pattern=other))

    def mapped(self, call, pairs):
        """The pattern as it is read, bool `[q_len, kv_len]`."""
        raise NotImplementedError


def by_tiles(pairs):
    """The pattern in whole tiles, `[row tiles, BLOCK, key tiles, BLOCK]`."""
    padded = np.pad(pairs, [(0, -size % BLOCK) for size in pairs.shape])
    rows, keys = (size // BLOCK for size in padded.shape)
    return padded.reshape(rows, BLOCK, keys, BLOCK)


def of_tiles(tiles, shape):
    rows, _, keys, _ = tiles.shape
    return tiles.reshape(rows * BLOCK, keys * BLOCK)[: shape[0], : shape[1]]


@mutant("R3")
class PatternTurned(Maps):
    """Rows are taken for keys, where there are as many."""

    def mapped(self, call, pairs):
        return pairs.T if len(pairs) == len(pairs.T) else pairs


@mutant("R3", "R6")
class TilesSeenWhole(Maps):
    """A tile that shows anything is computed without its mask."""

    def mapped(self, call, pairs):
        if max(pairs.shape, default=0) <= BLOCK:
            return pairs
        tiles = by_tiles(pairs)
        shown = tiles.any(axis=(1, 3), keepdims=True)
        return of_tiles(np.broadcast_to(shown, tiles.shape), pairs.shape)


@mutant("R3", "R6")
class TilesOfFirstRowOfTiles(Maps):
    """Which tiles are visited is that of the first row of them."""

    def mapped(self, call, pairs):
        if 0 in pairs.shape:
            return pairs
        tiles = by_tiles(pairs)
        shown = tiles.any(axis=(1, 3), keepdims=True)[:1]
        return pairs & of_tiles(np.broadcast_to(shown, tiles.shape), pairs.shape)


@mutant("R3", "R6")
class HiddenTilesVisited(Maps):
    """A row of tiles that shows nothing has one to write its result, seen whole."""

    def mapped(self, call, pairs):
        if 0 in pairs.shape:
            return pairs
        tiles = by_tiles(pairs)
        nothing = ~tiles.any(axis=(1, 2, 3), keepdims=True)
        first = (np.arange(tiles.shape[2]) == 0)[None, None, :, None]
        return of_tiles(tiles | (nothing & first), pairs.shape)


@mutant("R3", "R5", "R4")
class PatternInsteadOfPositions(Right):
    """What is static besides a pattern is forgotten."""

    def visible(self, call):
        if call.mask_pattern is not None:
            call = call.but(causal=False, window=None)
        return super().visible(call)


@mutant("R3", "R6")
class MaskInsteadOfPattern(Right):
    def visible(self, call):
        if call.mask is not None:
            call = call.but(mask_pattern=None)
        return super().visible(call)


@mutant("R3", "R6")
class PatternInsteadOfLengths(Right):
    def visible(self, call):
        if call.mask_pattern is not None:
            call = call.but(kv_lengths=None, q_lengths=None)
        return super().visible(call)


@mutant("R11")
class PatternInForwardOnly(Right):
    def attend(self, call):
        value = super().attend(call)
        if call.mask_pattern is None:
            return value
        other = super().attend(call.but(mask_pattern=None))
        return jax.tree.map(gradient_of, value, other)


@mutant("R13", "R3", "R6")
class MapsByLengths(Right):
    """Maps are kept by the lengths of a pattern, not by what it shows."""

    def __init__(self, *given, **options):
        super().__init__(*given, **options)
        self.kept = {}

    def visible(self, call):
        pattern = call.mask_pattern
        if pattern is not None:
            lengths = pattern.q_len, pattern.kv_len
            call = call.but(mask_pattern=self.kept.setdefault(lengths, pattern))
        return super().visible(call)


@mutant("R3", "R1")
class PatternOfFirstHead(Right):
    """Heads beyond the first see as without a pattern."""

    def visible(self, call):
        visible = super().visible(call)
        if call.mask_pattern is None:
            return visible
        other = super().visible(call.but(mask_pattern=None))
        heads = call.query.shape[2]
        is_first = (jnp.arange(heads) == 0)[None, :, None, None]
        return jnp.where(is_first, visible, True if other is None else other)


@mutant("R7")
class HiddenTilesAreRead(Right):
    """Keys in tiles that nobody visits are not cleaned, and 0 times NaN is added."""

    def clean(self, call, visible):
        if call.mask_pattern is None or max(call.lengths) <= BLOCK:
            return super().clean(call, visible)
        return call.query, call.key, call.value


@mutant("R3", "R6")
class LastTileOfKeysDropped(Right):
    """Tiles of keys are counted by whole ones."""

    def visible(self, call):
        visible = super().visible(call)
        kv_len = call.lengths[1]
        if call.mask_pattern is None or kv_len <= BLOCK:
            return visible
        return hidden(visible, blocks(call)[1] >= kv_len // BLOCK)
