"""Mistakes that show only where two things meet in one call; see `mutants`."""

import math

import jax.numpy as jnp

from .block_mutants import BLOCK, hidden, mutants_of
from .mutants import Right, gradient_of
from .rare_mutants import Leaks

__all__ = ["MEETING_MUTANTS"]

MEETING_MUTANTS = {}
mutant = mutants_of(MEETING_MUTANTS)


@mutant("R7")
class LeaksPastTheCap(Leaks):
    def leaks(self, call):
        return call.logits_soft_cap is not None


@mutant("R7")
class LeaksBesideDropout(Leaks):
    def leaks(self, call):
        return call.dropout_prob > 0


@mutant("R6")
class BlockOfMinusInfIsNan(Right):
    """A bias of -inf throughout the first block makes -inf - -inf."""

    def bias(self, call, shape):
        bias = super().bias(call, shape)
        if shape[-1] <= BLOCK:
            return bias
        first = jnp.broadcast_to(bias, shape)[..., :BLOCK]
        is_lost = (first == -jnp.inf).all(axis=-1, keepdims=True)
        return jnp.where(is_lost, jnp.nan, bias)


@mutant("R3", "R5")
class CausalityLostBesideALeft(Right):
    """Causality limits the right of a window that has one, and of no other."""

    def visible(self, call):
        is_lost = call.window is not None and call.window[1] is None
        return super().visible(call.but(causal=False) if is_lost else call)


@mutant("R2", "R9")
class BiasOfRowsInLseAlone(Right):
    """What is the same for a row changes no softmax, so it is added to lse."""

    def add_bias(self, call, logits, visible):
        if self.is_of_rows(call):
            return logits
        return super().add_bias(call, logits, visible)

    def softmax(self, call, logits):
        weights, lse = super().softmax(call, logits)
        return weights, lse + call.bias[..., 0] if self.is_of_rows(call) else lse

    def is_of_rows(self, call):
        return call.bias is not None and call.bias.shape[3] < call.lengths[1]


@mutant("R3")
class MaskOfRowsEndsWithABlock(Right):
    """The block of a mask with one key is that of the keys: there is but the first."""

    def visible(self, call):
        visible, kv_len = super().visible(call), call.lengths[1]
        if call.mask is None or call.mask.shape[3] == kv_len:
            return visible
        return hidden(visible, jnp.arange(kv_len) >= BLOCK)


@mutant("R4")
class LastBlockTwice(Right):
    """Rows that end beyond the keys visit the last block once more."""

    def logits(self, call, q, k, visible):
        logits, (q_len, kv_len) = super().logits(call, q, k, visible), call.lengths
        offset = call.q_offset if isinstance(call.q_offset, int) else 0
        if not call.causal or offset + q_len <= kv_len or kv_len % BLOCK:
            return logits
        return logits.at[..., -BLOCK // 2 :].add(math.log(2))


@mutant("R6", "R9", "R11")
class SinksOfEmptyRowsAreSkipped(Right):
    """Backward, rows that see nothing are passed over: lse's gradient of sinks is 0."""

    def empty_rows(self, call, output, lse, row_sees):
        output, lse = super().empty_rows(call, output, lse, row_sees)
        return output, gradient_of(lse, jnp.where(row_sees, lse, 0))


@mutant("R9")
class FirstSinkWithoutLse(Right):
    """Where no lse is asked for, another kernel runs, which knows one sink a head."""

    def sinks(self, call, logits):
        aux = call.softmax_aux
        first = aux.ndim == 2 and not call.return_lse
        return super().sinks(call.but(softmax_aux=aux[:, 0]) if first else call, logits)


@mutant("R2")
class NoScaleIsTheDefaultWithoutLse(Right):
    """Likewise, and it takes 0 for no scale."""

    def scale(self, call):
        if call.return_lse:
            return call.softmax_scale
        return call.softmax_scale or call.query.shape[-1] ** -0.5


@mutant("R1")
class ZerosOfNoDtype(Right):
    """lse is float64 where JAX has 64-bit types, whatever the operands are."""

    def softmax(self, call, logits):
        weights, lse = super().softmax(call, logits)
        return weights, lse.astype(float)
