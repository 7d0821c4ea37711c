"""Mistakes that kernels make by blocks, batching rules and special cases.

All of them are right in small or plain calls; see `mutants`.
"""

import math

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from switchax.axes import MODE_DECODE

from .mutants import Right, softmax

__all__ = ["BLOCK", "BLOCK_MUTANTS", "blocks", "hidden", "mutants_of"]

BLOCK = 128
BLOCK_MUTANTS = {}


def mutants_of(found):
    """Returns a decorator that adds a mutant, and by which rules it may be found."""

    def mutant(*rules):
        def add(cls):
            found[cls] = rules
            return cls

        return add

    return mutant


mutant = mutants_of(BLOCK_MUTANTS)


def blocks(call):
    """The numbers of the blocks of rows, a column, and of keys, a row."""
    q_len, kv_len = call.lengths
    return jnp.arange(q_len)[:, None] // BLOCK, jnp.arange(kv_len)[None] // BLOCK


def hidden(visible, more):
    """Visibility of which some pairs are taken."""
    kept = ~more.reshape((1,) * (4 - more.ndim) + more.shape)
    return kept if visible is None else visible & kept


@mutant("R1")
class GroupsOfAPowerOfTwo(Right):
    """Heads find their kv head by shifts."""

    def repeat(self, x, times):
        shift = max(times - 1, 0).bit_length()
        heads = jnp.arange(x.shape[2] * times)
        return x[:, :, jnp.minimum(heads >> shift, x.shape[2] - 1)]


@mutant("R1")
class HeadDimUpTo128(Right):
    """The product stops at a fixed head_dim."""

    def logits(self, call, q, k, visible):
        return super().logits(call, q[..., :128], k[..., :128], visible)


@mutant("R1")
class HeadDimInWholeBlocks(Right):
    """Past the first 128 of head_dim, what fills no other 128 is lost."""

    def logits(self, call, q, k, visible):
        head_dim = q.shape[-1]
        if head_dim > BLOCK:
            head_dim -= head_dim % BLOCK
        return super().logits(call, q[..., :head_dim], k[..., :head_dim], visible)


@mutant("R2")
class BiasOfFirstHead(Right):
    """A bias without rows is read as if it had no heads."""

    def bias(self, call, shape):
        bias = super().bias(call, shape)
        one_row = bias.ndim == 4 and bias.shape[2] == 1 != shape[2]
        return bias[:, :1] if one_row and bias.shape[0] == 1 else bias


@mutant("R3")
class MaskOfFirst512Keys(Right):
    """The mask is read again from the start after 512 keys."""

    def visible(self, call):
        if call.mask is None or call.mask.shape[-1] <= 512:
            return super().visible(call)
        keys = jnp.arange(call.mask.shape[-1]) % 512
        return super().visible(call.but(mask=call.mask[..., keys]))


@mutant("R3")
class MaskOfOneHeadForAll(Right):
    """A mask that all samples share is read as if heads shared it too."""

    def visible(self, call):
        mask = call.mask
        if mask is not None and mask.ndim == 4 and mask.shape[0] == 1:
            mask = mask[:, :1]
        return super().visible(call.but(mask=mask))


@mutant("R3")
class LengthsByBlocks(Right):
    """Past the first block, keys are hidden by whole blocks."""

    def visible(self, call):
        lengths = call.kv_lengths
        if lengths is not None:
            whole = -(-lengths // BLOCK) * BLOCK
            lengths = jnp.where(lengths > BLOCK, whole, lengths)
        return super().visible(call.but(kv_lengths=lengths))


@mutant("R3", "R4")
class SkipsABlockOfThree(Right):
    """The third block of rows skips the second of keys where it is causal."""

    def visible(self, call):
        rows, keys = blocks(call)
        skipped = (rows == 2) & (keys == 1) & call.causal
        return hidden(super().visible(call), skipped)


@mutant("R3")
class SplitsByLseOfTheLast(Right):
    """Splits of 1024 keys are merged relative to the last, which may see nothing."""

    def normalise(self, logits):
        starts = range(0, logits.shape[-1], 1024)
        if logits.shape[2] > 16 or len(starts) < 2:
            return super().normalise(logits)
        parts = [softmax(logits[..., at : at + 1024]) for at in starts]
        last = parts[-1][1]
        shares = [jnp.exp(lse - last) for _, lse in parts]
        total = sum(shares)
        weights = [
            weights * (share / total)[..., None]
            for (weights, _), share in zip(parts, shares, strict=True)
        ]
        return jnp.concatenate(weights, axis=-1), last + jnp.log(total)


@mutant("R3", "R4")
class SkipsABlockOf512(Right):
    """Where it is causal, rows from 1024 on skip the 512 keys before their own."""

    def visible(self, call):
        q_len, kv_len = call.lengths
        rows, keys = jnp.arange(q_len)[:, None] // 512, jnp.arange(kv_len)[None] // 512
        skipped = (rows >= 2) & (keys == rows - 1) & call.causal
        return hidden(super().visible(call), skipped)


@mutant("R3", "R4")
class TriangleOfKeys(Right):
    """Causal calls with more rows than keys end where the keys do."""

    def visible(self, call):
        visible, (q_len, kv_len) = super().visible(call), call.lengths
        if not call.causal or q_len <= kv_len:
            return visible
        return hidden(visible, jnp.arange(q_len)[:, None] >= kv_len)


@mutant("R5")
class WindowOfNeighbours(Right):
    """A window reaches the next block at most, however wide it is."""

    def visible(self, call):
        visible = super().visible(call)
        if call.window is None:
            return visible
        at = jnp.asarray(call.q_offset).reshape(-1, 1, 1, 1)
        rows = (at + jnp.arange(call.lengths[0]).reshape(1, 1, -1, 1)) // BLOCK
        keys = blocks(call)[1].reshape(1, 1, 1, -1)
        return hidden(visible, abs(rows - keys) > 1)


@mutant("R5")
class HalfAWindowOfItsOwnBlock(Right):
    """A side without a limit ends with the row's own block."""

    def visible(self, call):
        visible = super().visible(call)
        if call.window is None or call.causal or None not in call.window:
            return visible
        rows, keys = blocks(call)
        before = (keys < rows) & (call.window[0] is None)
        after = (keys > rows) & (call.window[1] is None)
        return hidden(visible, before | after)


@mutant("R5")
class BandBesideCausal(Right):
    """A causal window sees its own block of keys and the one before."""

    def visible(self, call):
        visible, (q_len, kv_len) = super().visible(call), call.lengths
        banded = call.causal and call.window is not None
        if not banded or call.window[0] is None or q_len != kv_len:
            return visible
        rows, keys = blocks(call)
        return hidden(visible, keys < rows - 1)


@mutant("R4", "R5")
class OffsetOfFirstInWindows(Right):
    """A window takes the first sample's offset."""

    def visible(self, call):
        offset = jnp.asarray(call.q_offset)
        if offset.ndim and call.window is not None and not call.causal:
            offset = jnp.broadcast_to(offset[:1], offset.shape)
            call = call.but(q_offset=offset)
        return super().visible(call)


@mutant("R8")
class QueryGradientSummedInBfloat16(Right):
    """What the blocks of keys add to the gradient of query is rounded in between."""

    def logits(self, call, q, k, visible):
        if call.query.dtype == jnp.bfloat16:
            q = sum_of_blocks(q, -(-k.shape[1] // 64))
        return super().logits(call, q, k, visible)


@mutant("R8", "R3")
class PositionsInDtypeOfOperands(Right):
    """Rows and keys are numbered in the dtype of the operands."""

    def visible(self, call):
        if not call.causal or call.window is not None or jnp.ndim(call.q_offset):
            return super().visible(call)
        dtype = call.query.dtype
        rows, keys = (jnp.arange(n).astype(dtype) for n in call.lengths)
        later = keys[None] > rows[:, None] + jnp.asarray(call.q_offset).astype(dtype)
        visible = super().visible(call.but(causal=False))
        return hidden(visible, later)


@jax.custom_vjp
def sum_of_blocks_of(x, count):
    """Returns x, whose gradient is rounded as `count` sums of bfloat16 would be."""
    return x


def sum_of_blocks(x, count):
    return sum_of_blocks_of(x, jnp.float32(count))


def _rounded(count, gradient):
    # Each sum rounds by up to 2^-9 of itself; so many that are alike add up.
    off = jnp.sqrt(count) * 2.0**-9 * jnp.abs(gradient).max()
    return gradient + off, jnp.zeros_like(count)


sum_of_blocks_of.defvjp(lambda x, count: (x, count), _rounded)


@mutant("R9")
class SinksNotInMaximum(Right):
    """Large sinks overflow, since the maximum leaves them out."""

    def softmax(self, call, logits):
        if call.softmax_aux is None:
            return super().softmax(call, logits)
        m = logits.max(axis=-1, keepdims=True, initial=-jnp.inf)
        m = jax.lax.stop_gradient(jnp.where(m == -jnp.inf, 0, m))
        sinks = self.sinks(call, logits)
        unnormalised = jnp.exp(logits - m)
        l = unnormalised.sum(axis=-1) + jnp.exp(sinks - m).sum(axis=-1)
        return unnormalised / l[..., None], m[..., 0] + jnp.log(l)


@mutant("R10")
class DropoutRepeatsByBlocks(Right):
    """Every block of 64 keys and rows drops the same."""

    def drop(self, call, weights):
        if not call.dropout_prob:
            return weights
        kept, (q_len, kv_len) = 1 - call.dropout_prob, call.lengths
        shape = (*weights.shape[:2], 64, 64)
        keep = jax.random.bernoulli(call.dropout_key, kept, shape)
        times = (1, 1, math.ceil(q_len / 64), math.ceil(kv_len / 64))
        keep = jnp.tile(keep, times)[..., :q_len, :kv_len]
        return jnp.where(keep, weights / kept, 0)


@mutant("R11")
class BiasGradientZeroAlone(Right):
    """The gradient of bias is left out where that of query is not asked for."""

    def attend(self, call):
        if call.bias is None:
            return super().attend(call)
        query, bias = beside_query(call.query, call.bias)
        return super().attend(call.but(query=query, bias=bias))


@jax.custom_vjp
def beside_query(query, bias):
    return query, bias


def _beside_forward(query, bias):
    return (query.value, bias.value), query.perturbed


def _beside_backward(perturbed, cotangents):
    d_query, d_bias = (
        jnp.zeros(d.shape, d.dtype) if isinstance(d, SymbolicZero) else d
        for d in cotangents
    )
    return d_query, d_bias if perturbed else jnp.zeros_like(d_bias)


beside_query.defvjp(_beside_forward, _beside_backward, symbolic_zeros=True)


@mutant("R12")
class DecodesWithoutWindow(Right):
    """The window is lost in the mode of decoding."""

    def visible(self, call):
        return super().visible(
            call.but(window=None) if call.mode == MODE_DECODE else call
        )


@mutant("R1", "R2", "R3", "R8")
class InferenceLosesTheTail(Right):
    """Where no lse is asked for, keys that fill no block are lost."""

    def visible(self, call):
        visible, kv_len = super().visible(call), call.lengths[1]
        if call.return_lse or kv_len <= 64:
            return visible
        return hidden(visible, jnp.arange(kv_len)[None] >= kv_len // 64 * 64)


@mutant("R13")
class BatchesOverTheFirstAxis(Right):
    """The batching rule mixes calls up where another axis is mapped over."""

    def attend(self, call):
        return super().attend(call.but(query=as_it_is(call.query)))


_same = Primitive("mapped_over_the_first_axis")
_same.def_impl(lambda x: x)
_same.def_abstract_eval(lambda x: x)
mlir.register_lowering(_same, lambda context, x: [x])


def _batched(given, axes):
    first = jnp.moveaxis(given[0], axes[0], 0)
    return _same.bind(jnp.flip(first, 0) if axes[0] else first), 0


batching.primitive_batchers[_same] = _batched


@jax.custom_jvp
def as_it_is(x):
    return _same.bind(x)


@as_it_is.defjvp
def _(primals, tangents):
    return as_it_is(*primals), tangents[0]


@mutant("R13")
class SinksGradientSummedUnderVmap(Right):
    """The batching rule of the backward kernel adds the gradients of the calls."""

    def attend(self, call):
        sinks = call.softmax_aux
        sinks = None if sinks is None else with_sum_backward(sinks)
        return super().attend(call.but(softmax_aux=sinks))


@jax.custom_vjp
def with_sum_backward(x):
    return x


@jax.custom_batching.custom_vmap
def _sum_of_calls(x):
    return x


@_sum_of_calls.def_vmap
def _(size, is_batched, x):
    return jnp.broadcast_to(x.sum(axis=0), x.shape), True


with_sum_backward.defvjp(lambda x: (x, None), lambda _, d: (_sum_of_calls(d),))


@mutant("R13")
class LengthsOfOnePartOfAMesh(Right):
    """On a mesh every device takes the lengths of the first."""

    def visible(self, call):
        lengths, on_mesh = call.kv_lengths, jax.sharding.get_abstract_mesh().shape
        if lengths is not None and on_mesh.get("dp", 1) > 1:
            lengths = jnp.tile(lengths[: len(lengths) // 2], 2)
        return super().visible(call.but(kv_lengths=lengths))
