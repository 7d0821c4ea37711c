"""Mistakes of whole blocks, of odd sizes, and of what is mapped; see `mutants`."""

import jax
import jax.numpy as jnp

from .block_mutants import BLOCK, hidden, mutants_of
from .mutants import Right, first_under_vmap, gradient_of
from .rare_mutants import DropsBySums

__all__ = ["SHAPE_MUTANTS"]

SHAPE_MUTANTS = {}
mutant = mutants_of(SHAPE_MUTANTS)


def is_whole(length):
    """Whether a length has no part of a block."""
    return length % BLOCK == 0


@mutant("R3")
class LengthsOfWholeBlocks(Right):
    """Where keys fill their blocks, nothing is masked."""

    def visible(self, call):
        lost = is_whole(call.lengths[1])
        return super().visible(call.but(kv_lengths=None) if lost else call)


@mutant("R3")
class CausalityOfWholeBlocks(Right):
    """Where rows and keys fill their blocks, a row sees one key too many."""

    def visible(self, call):
        is_wide = call.causal and all(map(is_whole, call.lengths))
        left = None if call.window is None else call.window[0]
        wide = call.but(causal=False, window=(left, 1))
        return super().visible(wide if is_wide else call)


@mutant("R3")
class OneBlockTooMany(Right):
    """A length that ends with a block is taken for the next."""

    def visible(self, call):
        lengths = call.kv_lengths
        if lengths is not None:
            ends = (lengths > 0) & (lengths % (BLOCK // 2) == 0)
            lengths = jnp.where(ends, lengths + BLOCK // 2, lengths)
        return super().visible(call.but(kv_lengths=lengths))


@mutant("R3")
class DocumentsThatRise(Right):
    """Blocks of which the first and last ids do not overlap are skipped."""

    def visible(self, call):
        visible = super().visible(call)
        if call.q_segment_ids is None:
            return visible
        (q_low, q_high), (kv_low, kv_high) = (
            (ids[:, :1], ids[:, -1:])
            for ids in (call.q_segment_ids, call.kv_segment_ids)
        )
        apart = (q_low > kv_high) | (kv_low > q_high)
        rises = (q_low >= 0) & (kv_low >= 0)
        return hidden(visible, (apart & rises)[:, None, :, None])


@mutant("R7")
class FillingRowsSee(Right):
    """A key is kept where a row sees it that only fills the last block."""

    def clean(self, call, visible):
        q, k, v = super().clean(call, visible)
        q_len, kv_len = call.lengths
        whole = -(-q_len // BLOCK) * BLOCK
        keys = jnp.arange(kv_len)[None] - jnp.reshape(call.q_offset, (-1, 1))
        seen = (keys >= q_len) & (keys < whole) & call.causal
        seen = seen[..., None, None]
        return q, jnp.where(seen, call.key, k), jnp.where(seen, call.value, v)


@mutant("R1")
class HeadDimByEights(Right):
    """What is left of head_dim beside vectors of 8 is not read."""

    def logits(self, call, q, k, visible):
        size = q.shape[-1]
        whole = size if size < 8 else size - size % 8
        return super().logits(call, q[..., :whole], k[..., :whole], visible)


@mutant("R1")
class HeadDimUpTo256(Right):
    """The product stops at a head_dim that few exceed."""

    def logits(self, call, q, k, visible):
        return super().logits(call, q[..., :256], k[..., :256], visible)


@mutant("R11")
class GradientOfEightHeads(Right):
    """The gradient of a kv head is a sum over at most eight of its heads."""

    def repeat(self, x, times):
        whole = super().repeat(x, times)
        counts = (jnp.arange(whole.shape[2]) % times < 8)[:, None]
        return gradient_of(whole, jnp.where(counts, whole, 0))


@mutant("R9")
class SinksByGroup(Right):
    """Sinks of a head are those of another of its group's."""

    def sinks(self, call, logits):
        aux, kv_heads = call.softmax_aux, call.key.shape[2]
        if aux.ndim == 2:
            aux = aux.reshape(kv_heads, -1, aux.shape[1]).swapaxes(0, 1)
        return super().sinks(call.but(softmax_aux=aux), logits)


@mutant("R11")
class BiasOfKeysAndHeads(Right):
    """The gradient of a bias that all rows share is the first sample's."""

    def bias(self, call, shape):
        bias = super().bias(call, shape)
        if call.bias.shape[2] != 1 or 1 in call.bias.shape[:2]:
            return bias
        return gradient_of(bias, jnp.broadcast_to(bias[:1], bias.shape))


@mutant("R2")
class LogitsInBaseTwo(Right):
    """The bias is turned to base 2, where the least number becomes -inf."""

    def bias(self, call, shape):
        bias = super().bias(call, shape)
        lost = bias * 1.4426950408889634 == -jnp.inf
        return jnp.where(lost, -jnp.inf, bias)


@mutant("R4", "R5")
class WindowForgetsAnOffset(Right):
    """The left of a window is counted without an offset that is traced."""

    def visible(self, call):
        visible = super().visible(call)
        is_traced = not isinstance(call.q_offset, int) and jnp.ndim(call.q_offset) == 0
        if call.window is None or call.window[0] is None or not is_traced:
            return visible
        left = call.but(window=(call.window[0], None), causal=False)
        right = call.but(window=(None, call.window[1]))
        return super().visible(right) & super().visible(left.but(q_offset=0))


@mutant("R10")
class DropsByStrides(DropsBySums):
    """A row's numbers begin 64 after those of the row before."""

    def drawn(self, shape):
        return (*shape[:2], shape[2] * 64 + shape[3])

    def index(self, shape):
        numbers = jnp.arange(shape[2])[:, None] * 64 + jnp.arange(shape[3])[None]
        return (..., numbers)


@mutant("R13")
class DropsAlikeUnderVmap(Right):
    """Under vmap all keys drop what the first does."""

    def drop(self, call, weights):
        if call.dropout_key is None:
            return weights
        key = first_under_vmap(call.dropout_key)
        return super().drop(call.but(dropout_key=key), weights)


@mutant("R13")
class LseOfTheFirstUnderVmap(Right):
    """Under vmap lse is the first call's."""

    def softmax(self, call, logits):
        weights, lse = super().softmax(call, logits)
        first = first_under_vmap(jax.lax.stop_gradient(lse))
        return weights, gradient_of(first, lse)


@mutant("R13")
class LseOnAMesh(Right):
    """On a mesh lse is in base 2."""

    def softmax(self, call, logits):
        weights, lse = super().softmax(call, logits)
        is_split = jax.sharding.get_abstract_mesh().size > 1
        return weights, lse * 1.4426950408889634 if is_split else lse
