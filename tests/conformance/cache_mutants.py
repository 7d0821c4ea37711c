"""Mistakes of long caches, of masks by blocks, of what vmap shares; see `mutants`."""

import math

import jax
import jax.numpy as jnp

from .block_mutants import BLOCK, blocks, hidden, mutants_of
from .mutants import Right, gradient_of
from .rare_mutants import Leaks

__all__ = ["CACHE_MUTANTS"]

SPLIT = 1024
CACHE_MUTANTS = {}
mutant = mutants_of(CACHE_MUTANTS)


def is_split(call):
    """Whether a kernel of its own decodes, which splits the keys."""
    q_len, kv_len = call.lengths
    return q_len == 1 and kv_len >= SPLIT


class Splits(Right):
    """Loses something of the call where keys are split."""

    def attend(self, call):
        return super().attend(self.lost(call) if is_split(call) else call)

    def lost(self, call):
        """The call as it is computed."""
        raise NotImplementedError


@mutant("R1")
class SplitsTileHeads(Splits):
    """kv heads are tiled for the heads that read them, not repeated."""

    def lost(self, call):
        group = call.query.shape[2] // call.key.shape[2]
        k, v = (jnp.tile(x, (1, 1, group, 1)) for x in (call.key, call.value))
        return call.but(key=k, value=v)


@mutant("R9")
class SinksInEachSplit(Splits):
    """Sinks are added to the sum of every split."""

    def lost(self, call):
        if call.softmax_aux is None:
            return call
        splits = math.ceil(call.lengths[1] / SPLIT)
        return call.but(softmax_aux=call.softmax_aux + math.log(splits))


@mutant("R2")
class SplitsWithoutCap(Splits):
    def lost(self, call):
        return call.but(logits_soft_cap=None)


@mutant("R2")
class SplitsWithoutBias(Splits):
    def lost(self, call):
        return call.but(bias=None)


@mutant("R3")
class SplitsWithoutMask(Splits):
    def lost(self, call):
        return call.but(mask=None)


@mutant("R5")
class SplitsWithoutWindow(Splits):
    def lost(self, call):
        return call.but(window=None)


@mutant("R3")
class SplitsByTheFirstLength(Splits):
    """How many splits are read is told by the first sample's length."""

    def lost(self, call):
        lengths = call.kv_lengths
        if lengths is None:
            return call
        return call.but(kv_lengths=jnp.broadcast_to(lengths[:1], lengths.shape))


@mutant("R7")
class SplitsReadWhatIsUnwritten(Leaks):
    """Slots that hold nothing yet are multiplied by 0."""

    def leaks(self, call):
        return is_split(call)


@mutant("R4")
class BlocksByRowsAlone(Right):
    """How many blocks of keys are read leaves out an offset that is traced."""

    def visible(self, call):
        visible, (q_len, kv_len) = super().visible(call), call.lengths
        is_traced = not isinstance(call.q_offset, int) and jnp.ndim(call.q_offset) == 0
        if not (call.causal and is_traced):
            return visible
        return hidden(visible, jnp.arange(kv_len) >= math.ceil(q_len / BLOCK) * BLOCK)


@mutant("R4")
class BlocksByTheFirstOffset(Right):
    """How many blocks of keys are read is told by the first sample's offset."""

    def visible(self, call):
        visible, offset = super().visible(call), jnp.asarray(call.q_offset)
        if not (call.causal and offset.ndim):
            return visible
        rows, keys = blocks(call)
        last = (rows * BLOCK + BLOCK - 1 + offset[0]) // BLOCK
        return hidden(visible, keys > jnp.maximum(last, 0))


class ByDiagonals(Right):
    """Drops otherwise in causal or windowed calls of several blocks."""

    def drop(self, call, weights):
        kept, positional = super().drop(call, weights), call.causal or call.window
        if not (call.dropout_prob and positional and min(call.lengths) > BLOCK):
            return kept
        return self.otherwise(call, weights, kept)

    def otherwise(self, call, weights, kept):
        """What is left of the weights there, of which others are kept rightly."""
        raise NotImplementedError


@mutant("R10")
class DropsOnTheDiagonal(ByDiagonals):
    """Blocks that need no mask drop nothing."""

    def otherwise(self, call, weights, kept):
        rows, keys = blocks(call)
        return jnp.where((rows == keys)[None, None], kept, weights)


@mutant("R10")
class DropsOthersGoingBackward(ByDiagonals):
    """Backward, blocks are counted from the first that is visited."""

    def otherwise(self, call, weights, kept):
        other = call.but(dropout_key=jax.random.fold_in(call.dropout_key, 1))
        return gradient_of(kept, Right.drop(self, other, weights))


class MaskByBlocks(Right):
    """Looks for blocks of one kind in the first head's mask of the first sample."""

    def first_blocks(self, call, kind):
        """Where such blocks are, `[q_len, kv_len]`."""
        q_len, kv_len = call.lengths
        mask = jnp.broadcast_to(call.mask, (*call.mask.shape[:2], q_len, kv_len))[0, 0]
        rows, keys = (math.ceil(n / BLOCK) for n in (q_len, kv_len))
        padded = jnp.pad(mask, ((0, rows * BLOCK - q_len), (0, keys * BLOCK - kv_len)))
        is_kind = kind(padded.reshape(rows, BLOCK, keys, BLOCK), axis=(1, 3))
        whole = is_kind.repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)
        return whole[:q_len, :kv_len]


@mutant("R3")
class SkipsEmptyBlocksOfTheFirst(MaskByBlocks):
    """Blocks that are empty there are skipped for all."""

    def visible(self, call):
        visible = super().visible(call)
        if call.mask is None or 0 in call.lengths:
            return visible
        return hidden(visible, ~self.first_blocks(call, jnp.any))


@mutant("R3")
class FullBlocksOfTheFirst(MaskByBlocks):
    """Blocks that are full there are masked for none."""

    def visible(self, call):
        if call.mask is None or min(call.lengths) < BLOCK:
            return super().visible(call)
        full = self.first_blocks(call, jnp.all)
        return super().visible(call.but(mask=call.mask | full[None, None]))


@mutant("R3")
class LengthsOnTheDiagonal(Right):
    """Causal blocks below the diagonal are masked by nothing, by no length either."""

    def visible(self, call):
        visible = super().visible(call)
        if call.q_lengths is None or not call.causal or min(call.lengths) <= BLOCK:
            return visible
        rows, keys = blocks(call)
        below = (keys < rows)[None, None]
        return visible | below if isinstance(call.q_offset, int) else visible


@mutant("R6")
class RowsBeforeTheFirstKey(Right):
    """Blocks of rows that end before the first key are not written."""

    def empty_rows(self, call, output, lse, row_sees):
        output, lse = super().empty_rows(call, output, lse, row_sees)
        if not call.causal:
            return output, lse
        ends = blocks(call)[0][None] * BLOCK + BLOCK - 1
        before = ends + jnp.reshape(call.q_offset, (-1, 1, 1)) < 0
        return jnp.where(before[..., None], 7, output), lse


@mutant("R13")
class RepeatsWhatIsShared(Right):
    """The batching rule repeats what calls share, where it had to be tiled."""

    def attend(self, call):
        names = ("bias", "mask", "q_segment_ids", "kv_segment_ids")
        names += ("q_lengths", "kv_lengths")
        shared = {n: getattr(call, n) for n in names}
        shared = {
            name: of_samples(call.query, x)
            for name, x in shared.items()
            if x is not None and len(call.query) == len(x)
        }
        return super().attend(call.but(**shared))


@jax.custom_batching.custom_vmap
def samples_of(query, x):
    """Returns x, an array of the samples of query."""
    return x


@samples_of.def_vmap
def _(size, is_batched, query, x):
    if is_batched[0] and not is_batched[1]:
        return jnp.repeat(x, size, axis=0).reshape(size, *x.shape), True
    return x, is_batched[1]


def of_samples(query, x):
    same = samples_of(jax.lax.stop_gradient(query), jax.lax.stop_gradient(x))
    return gradient_of(same, x) if jnp.issubdtype(x.dtype, jnp.floating) else same


@mutant("R3", "R5")
class HidesByALowNumber(Right):
    """What windows and ids hide has a low logit, of which a bias may be the lower."""

    def attend(self, call):
        is_low = call.window is not None or call.q_segment_ids is not None
        if call.bias is None or not is_low or call.logits_soft_cap is not None:
            return super().attend(call)
        ids = {"q_segment_ids": None, "kv_segment_ids": None}
        others = {"mask": None, "q_lengths": None, "kv_lengths": None}
        near = self.visible(call.but(causal=False, **others))
        bias = jnp.where(near, call.bias.astype("float32"), -1e9)
        return super().attend(call.but(bias=bias, window=None, **ids))


@mutant("R2")
class MinusInfIsHidden(Right):
    """A bias of -inf hides, where the cap would make a number of it."""

    def cap(self, call, logits):
        capped = super().cap(call, logits)
        return jnp.where(logits == -jnp.inf, -jnp.inf, capped)


@mutant("R3")
class NegativeLengthIsNone(Right):
    """A length below 0 stands for that of the axis."""

    def visible(self, call):
        lengths = call.kv_lengths
        if lengths is not None:
            lengths = jnp.where(lengths < 0, call.lengths[1], lengths)
        return super().visible(call.but(kv_lengths=lengths))


@mutant("R2")
class MaximumBeforeTheScale(Right):
    """The largest product is taken for the largest logit, and exp overflows."""

    def softmax(self, call, logits):
        weights, lse = super().softmax(call, logits)
        if call.softmax_scale >= 0 or not logits.shape[-1]:
            return weights, lse
        over = logits.max(axis=-1) - logits.min(axis=-1) > 88
        return jnp.where(over[..., None], jnp.nan, weights), lse


@mutant("R4")
class LastBlockOfTheFirstRow(Right):
    """Of a few rows behind a cache, the first says which block of keys is the last."""

    def visible(self, call):
        visible, (q_len, kv_len) = super().visible(call), call.lengths
        if not (call.causal and 1 < q_len <= 8):
            return visible
        last = (jnp.maximum(jnp.asarray(call.q_offset), 0) // BLOCK + 1) * BLOCK
        keys = jnp.arange(kv_len)[None, None, None]
        return hidden(visible, keys >= last.reshape(-1, 1, 1, 1))


@mutant("R7")
class ReadsUnwrittenBehindAnOffset(Leaks):
    """What a chunk of rows finds behind it in the cache is multiplied by 0."""

    def leaks(self, call):
        is_traced = not isinstance(call.q_offset, int)
        return bool(call.causal) and is_traced and call.lengths[0] > 1


@mutant("R3")
class PaddingOfTheFirst(Right):
    """Blocks of keys are skipped where the first sample's padding hides them."""

    def visible(self, call):
        visible, kv_len = super().visible(call), call.lengths[1]
        mask = call.mask
        if mask is None or mask.shape[1:3] != (1, 1) or kv_len <= BLOCK:
            return visible
        first = jnp.pad(mask[0, 0, 0], (0, -kv_len % BLOCK)).reshape(-1, BLOCK)
        return hidden(visible, ~jnp.repeat(first.any(axis=1), BLOCK)[:kv_len])


@mutant("R9")
class SinksOfTheLastSample(Right):
    """The gradient of sinks is that of the last sample, where rows are in blocks."""

    def attend(self, call):
        sinks, samples = call.softmax_aux, call.query.shape[0]
        if sinks is None or call.lengths[0] <= BLOCK or samples == 1:
            return super().attend(call)
        held = jax.lax.stop_gradient(sinks)
        whole = super().attend(call.but(softmax_aux=held))
        last = super().attend(call)
        is_last = jnp.arange(samples) == samples - 1

        def chosen(of_last, of_whole):
            shape = (-1,) + (1,) * (of_last.ndim - 1)
            return jnp.where(is_last.reshape(shape), of_last, of_whole)

        return jax.tree.map(chosen, last, whole)
