"""Mistakes of decoding, and where an option meets another; see `mutants`.

Each acts on one kind of call alone, as in a path of its own; all others are right.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from switchax import AttentionOutput
from switchax.axes import MODE_DECODE, MODE_INSERT

from .block_mutants import mutants_of
from .mutants import Right, first_under_vmap, gradient_of
from .narrow_mutants import declaring

__all__ = ["SERVING_MUTANTS"]

SERVING_MUTANTS = {}
mutant = mutants_of(SERVING_MUTANTS)
LOWEST = 0.7 * float(jnp.finfo(jnp.float32).min)


def group_of(call):
    """How many query heads read a kv head."""
    return call.query.shape[2] // max(call.key.shape[2], 1)


def first_sink(call):
    sinks = call.softmax_aux
    if sinks is None or sinks.ndim == 1:
        return call
    return call.but(softmax_aux=sinks[:, :1])


class Changes(Right):
    """Computes another call than it was given."""

    def attend(self, call):
        return super().attend(self.changed(call))

    def changed(self, call):
        """The call as it is computed."""
        raise NotImplementedError


@mutant("R2", "R3")
class LowestIsHidden(Right):
    """What lies below the number by which keys are hidden counts as hidden."""

    def hide(self, logits, visible):
        return super().hide(logits, visible & (logits > LOWEST))


@mutant("R13")
class SinksInEachShard(Changes):
    """Each device that has a part of the keys counts the sinks."""

    def changed(self, call):
        shards = jax.sharding.get_abstract_mesh().shape.get("sp", 1)
        if call.softmax_aux is None or shards == 1:
            return call
        return call.but(softmax_aux=call.softmax_aux + math.log(shards))


@mutant("R3", "R4")
class PlainStepSeesOneMore(Changes):
    """A step of decoding without lse has the number of the row after it."""

    def changed(self, call):
        is_step = call.lengths[0] == 1 and not call.return_lse
        if not is_step or jnp.ndim(call.q_offset):
            return call
        return call.but(q_offset=call.q_offset + 1)


@mutant("R3", "R12")
class InsertionSeesAll(Changes):
    def changed(self, call):
        return call.but(causal=False) if call.mode == MODE_INSERT else call


@mutant("R7")
class CapOfDirtyBias(Right):
    """A bias is added where a row sees nothing, and hidden after the cap alone."""

    def add_bias(self, call, logits, visible):
        return super().add_bias(call, logits, None)


@mutant("R6")
class AveragesHiddenValues(Right):
    """Hidden keys have the weight of those whose bias is -inf."""

    def hide(self, logits, visible):
        some = visible.any(axis=-1, keepdims=True)
        return jnp.where(visible, logits, jnp.where(some, -1e30, -jnp.inf))


@mutant("R6", "R9")
class BiasHidesSinks(Right):
    """A row whose bias is nothing but -inf has no sinks either."""

    def empty_rows(self, call, output, lse, row_sees):
        output, lse = super().empty_rows(call, output, lse, row_sees)
        if call.bias is None or call.softmax_aux is None or call.logits_soft_cap:
            return output, lse
        nothing = (call.bias == -jnp.inf).all(axis=-1)
        return output, jnp.where(nothing, -jnp.inf, lse)


@mutant("R2")
class GroupedStepIgnoresScale(Right):
    def scale(self, call):
        if call.lengths[0] == 1 and group_of(call) > 1:
            return call.query.shape[-1] ** -0.5
        return super().scale(call)


@mutant("R2")
class CapsScaledGroups(Right):
    """Of groups the cap has the unit of a scale that is not the default one."""

    def cap(self, call, logits):
        if call.logits_soft_cap is not None and group_of(call) > 1:
            unit = call.softmax_scale * call.query.shape[-1] ** 0.5
            call = call.but(logits_soft_cap=call.logits_soft_cap * unit)
        return super().cap(call, logits)


@mutant("R3", "R4", "R5")
class RightWindowFromRowZero(Changes):
    def changed(self, call):
        of_right = call.window is not None and call.window[0] is None
        return call.but(q_offset=0) if of_right and not call.causal else call


@mutant("R4", "R5")
class OffsetWithinLengths(Changes):
    """Rows far beyond all keys are brought near, before a window reaches back."""

    def changed(self, call):
        most = sum(call.lengths)
        return call.but(q_offset=jnp.clip(call.q_offset, -most, most))


@mutant("R3", "R4", "R5")
class NewestSeesAll(Changes):
    """The row of the last key, known before the call runs, needs no mask."""

    def changed(self, call):
        q_len, kv_len = call.lengths
        is_newest = isinstance(call.q_offset, int) and call.q_offset == kv_len - 1
        if q_len != 1 or not is_newest or not call.causal:
            return call
        return call.but(causal=False, window=None)


@mutant("R9")
class StepTakesFirstSink(Changes):
    def changed(self, call):
        return first_sink(call) if call.lengths[0] == 1 else call


@mutant("R9")
class FirstSinkBesidePositions(Changes):
    def changed(self, call):
        is_positional = call.causal or call.window is not None
        return first_sink(call) if is_positional else call


@mutant("R9")
class SinksOfOneGroupTurned(Changes):
    """Heads that all read one kv head have the sinks in the other order."""

    def changed(self, call):
        if call.softmax_aux is None or call.key.shape[2] != 1:
            return call
        return call.but(softmax_aux=call.softmax_aux[::-1])


@mutant("R1")
class ValueInWholeHeadDims(Right):
    """Values are done by chunks of head_dim; what is left over is not."""

    def combine(self, call, weights, v):
        head_dim, v_head_dim = call.query.shape[-1], v.shape[-1]
        done = v_head_dim
        if 0 < head_dim < v_head_dim:
            done = v_head_dim // head_dim * head_dim
        output = super().combine(call, weights, v)
        return jnp.where(jnp.arange(v_head_dim) < done, output, 0)


@jax.custom_vjp
def widened(bias):
    """Returns a bias in float32, and so its gradient."""
    return bias.astype(jnp.float32)


widened.defvjp(lambda bias: (widened(bias), None), lambda _, d_bias: (d_bias,))


@mutant("R11")
class GradientOfANarrowBiasIsWide(declaring("bias")):
    capabilities = dataclasses.replace(
        declaring("bias").capabilities,
        dtypes={"float32"},
        forward_mode=False,
        second_order=False,
    )

    def bias(self, call, shape):
        return widened(call.bias)


_first = {}


@mutant("R13")
class OffsetOfTheFirstCall(declaring("causal", "q_offset", "lse")):
    """What is built for shapes is kept, with the offset that it was built for."""

    def attend(self, call):
        if call.causal and isinstance(call.q_offset, int):
            built = _first.setdefault((call.query.shape, call.key.shape), call.q_offset)
            call = call.but(q_offset=built)
        return super().attend(call)


@mutant("R10")
class NarrowDropoutIsNotRescaled(declaring("causal", "dropout", "gqa")):
    def drop(self, call, weights):
        kept = super().drop(call, weights)
        if call.dropout_prob and call.query.dtype == jnp.bfloat16:
            return kept * (1 - call.dropout_prob)
        return kept


@mutant("R3", "R5", "R10")
class DropoutForgetsTheWindow(declaring("causal", "window", "dropout")):
    def attend(self, call):
        return super().attend(call.but(window=None) if call.dropout_prob else call)


class EmptyRowsWithoutSinks:
    """A row that sees nothing has no lse, though it has sinks."""

    def empty_rows(self, call, output, lse, row_sees):
        output, lse = super().empty_rows(call, output, lse, row_sees)
        return output, jnp.where(row_sees, lse, -jnp.inf)


@mutant("R6", "R9")
class MaskedRowsWithoutSinks(
    EmptyRowsWithoutSinks, declaring("mask", "softmax_aux", "lse")
):
    pass


@mutant("R6", "R9")
class RowsPastTheWindowWithoutSinks(
    EmptyRowsWithoutSinks, declaring("window", "softmax_aux", "lse")
):
    pass


@mutant("R3", "R6")
class MaskOfRowsOfTheFirstSample(Changes):
    """What hides whole rows, of all heads, is read for one sample."""

    def changed(self, call):
        if call.mask is None or call.mask.shape[1::2] != (1, 1):
            return call
        return call.but(mask=call.mask[:1])


@mutant("R3", "R6")
class OneRowIsNoPadding(Changes):
    """A step of decoding computes the samples that have no rows too."""

    def changed(self, call):
        return call.but(q_lengths=None) if call.lengths[0] == 1 else call


@mutant("R3", "R4", "R12")
class DecoderSeesAll(Changes):
    """In mode decode the one row is taken for that of the newest key."""

    def changed(self, call):
        is_step = call.mode == MODE_DECODE and call.lengths[0] == 1
        return call.but(causal=False) if is_step else call


@mutant("R10", "R11")
class DroppedWeightsAreDerivedWhole(Right):
    """What was dropped of the weights has their gradient all the same."""

    def attend(self, call):
        found = super().attend(call)
        if not call.dropout_prob:
            return found
        whole = super().attend(call.but(dropout_prob=0.0)).attention_weights
        weights = gradient_of(found.attention_weights, whole)
        return AttentionOutput(found.attention_outputs, weights, found.lse)


@mutant("R13")
class BackwardDropsByTheFirstKey(Right):
    """Going backward all calls under vmap drop what the first does."""

    def drop(self, call, weights):
        if not call.dropout_prob:
            return weights
        kept = 1 - call.dropout_prob
        keep = jax.random.bernoulli(call.dropout_key, kept, weights.shape)
        dropped, other = (
            jnp.where(x, weights / kept, 0) for x in (keep, first_under_vmap(keep))
        )
        return gradient_of(dropped, other)


@mutant("R13")
class WeightsOfFirstUnderVmap(Right):
    def attend(self, call):
        found = super().attend(call)
        first = first_under_vmap(jax.lax.stop_gradient(found.attention_weights))
        weights = gradient_of(first, found.attention_weights)
        return AttentionOutput(found.attention_outputs, weights, found.lse)


@jax.custom_batching.custom_vmap
def as_key_is(key, x):
    """Returns x, the first of it under vmap where key is not mapped."""
    return x


@as_key_is.def_vmap
def _(size, is_batched, key, x):
    if is_batched[1] and not is_batched[0]:
        return x[0], False
    return x, is_batched[1]


@mutant("R13")
class ValueIsMappedAsKeyIs(Changes):
    def changed(self, call):
        same = as_key_is(*map(jax.lax.stop_gradient, (call.key, call.value)))
        return call.but(value=gradient_of(same, call.value))


@mutant("R3", "R6")
class MaskOfSamplesIgnored(Changes):
    """A mask without rows and keys is taken for one that hides nothing."""

    def changed(self, call):
        is_of_samples = call.mask is not None and call.mask.shape[2:] == (1, 1)
        return call.but(mask=None) if is_of_samples else call


@mutant("R2")
class BiasOfHeadsIsOfTheFirst(Right):
    def bias(self, call, shape):
        bias = super().bias(call, shape)
        return bias[:, :1] if bias.shape[2:] == (1, 1) else bias


@mutant("R3", "R8")
class LengthsInTheDtypeOfKeys(Right):
    """Positions and lengths are compared in half precision."""

    def visible(self, call):
        visible = super().visible(call.but(kv_lengths=None))
        if call.kv_lengths is None:
            return visible
        dtype = call.key.dtype
        keys = jnp.arange(call.lengths[1]).astype(dtype)
        ends = call.kv_lengths.astype(dtype)[:, None, None, None]
        in_length = keys[None, None, None] < ends
        return in_length if visible is None else visible & in_length


@mutant("R3")
class OneSideHasTheLengthsOfTheOther(Changes):
    """Where both have the same size."""

    def changed(self, call):
        given = call.q_lengths is not None and call.kv_lengths is not None
        if not given or call.lengths[0] != call.lengths[1]:
            return call
        return call.but(q_lengths=call.kv_lengths)


@mutant("R2")
class ScaleOfOneNeedsNoBias(Right):
    """Logits are taken to be the products, since the scale changes nothing."""

    def attend(self, call):
        return super().attend(call.but(bias=None) if call.softmax_scale == 1 else call)


@mutant("R2")
class ScaleOfOneNeedsNoCap(Right):
    def attend(self, call):
        is_one = call.softmax_scale == 1
        return super().attend(call.but(logits_soft_cap=None) if is_one else call)
