"""Mistakes that show only where two things meet, or far out; see `mutants`."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from switchax import AttentionOutput

from .block_mutants import hidden, mutants_of
from .mutants import EVERYTHING, Right

__all__ = ["RARE_MUTANTS"]

RARE_MUTANTS = {}
mutant = mutants_of(RARE_MUTANTS)


@mutant("R5")
class CausalityLostBesideWindow(Right):
    """A window stands for causality, even where it reaches to the right."""

    def visible(self, call):
        is_lost = call.window is not None
        return super().visible(call.but(causal=call.causal and not is_lost))


@mutant("R5")
class WindowUpTo100(Right):
    """A window reaches 100 keys to the right at most."""

    def visible(self, call):
        window = call.window
        if window is not None and window[1] is not None:
            window = window[0], min(window[1], 100)
        return super().visible(call.but(window=window))


@mutant("R3")
class CausalBy512(Right):
    """Rows and keys are compared by their places in blocks of 512."""

    def visible(self, call):
        visible, (q_len, kv_len) = super().visible(call), call.lengths
        if not call.causal or max(q_len, kv_len) <= 512:
            return visible
        rows, keys = jnp.arange(q_len)[:, None] % 512, jnp.arange(kv_len)[None] % 512
        return hidden(visible, keys > rows)


@mutant("R8")
class BiasInOperandDtype(Right):
    """The bias is rounded to the operands' dtype."""

    def bias(self, call, shape):
        return super().bias(call, shape).astype(call.query.dtype).astype("float32")


@mutant("R2")
class DefaultForNoScale(Right):
    """A scale of 0 stands for the default."""

    def scale(self, call):
        return call.softmax_scale or call.query.shape[-1] ** -0.5


@mutant("R2", "R8")
class MaximumFromZero(Right):
    """The running maximum starts at 0, so that small logits vanish."""

    def softmax(self, call, logits):
        weights, lse = super().softmax(call, logits)
        vanish = (lse < -80) & (lse > -jnp.inf)
        return jnp.where(vanish[..., None], 0, weights), lse


@mutant("R2")
class SquareBiasOfOneSample(Right):
    """A bias of rows and keys alone is added to the first sample's logits."""

    def bias(self, call, shape):
        bias = super().bias(call, shape)
        if call.bias.shape[:2] != (1, 1) or 1 in call.bias.shape[2:]:
            return bias
        first = jnp.arange(shape[0]).reshape(-1, 1, 1, 1) == 0
        return jnp.where(first, bias, 0)


@mutant("R3")
class HiddenIsMinusBillion(Right):
    """Hidden keys have a logit of -1e9, in rows that see any other."""

    def hide(self, logits, visible):
        hidden = super().hide(logits, visible)
        row_sees = hidden.max(axis=-1, keepdims=True, initial=-jnp.inf) > -jnp.inf
        return jnp.where(row_sees & ~visible, -1e9, hidden)


class ChangesIds(Right):
    """Segment ids are compared as something else."""

    def visible(self, call):
        names = ("q_segment_ids", "kv_segment_ids")
        given = {name: getattr(call, name) for name in names}
        changed = {n: None if x is None else self.ids(x) for n, x in given.items()}
        return super().visible(call.but(**changed))

    def ids(self, ids):
        """What is compared."""
        raise NotImplementedError


@mutant("R3")
class PaddingIsMinusOne(ChangesIds):
    """Of negative ids only -1 matches nothing."""

    def ids(self, ids):
        return jnp.where(ids < -1, 1 << 30, ids)


@mutant("R3")
class IdsInFloat32(ChangesIds):
    """Ids are compared in float32."""

    def ids(self, ids):
        return ids.astype("float32").astype("int32")


class Leaks(Right):
    """What nothing sees spreads in some calls."""

    def combine(self, call, weights, v):
        output = super().combine(call, weights, v)
        if not self.leaks(call):
            return output
        return output + 0 * call.value.astype("float32").sum()

    def leaks(self, call):
        """Whether it does in this one."""
        raise NotImplementedError


@mutant("R7")
class LeaksPastABlock(Leaks):
    def leaks(self, call):
        return call.lengths[1] > 128


@mutant("R7")
class LeaksWithoutLse(Leaks):
    def leaks(self, call):
        return not call.return_lse


@mutant("R7")
class LeaksInGroups(Leaks):
    def leaks(self, call):
        return call.query.shape[2] != call.key.shape[2]


@mutant("R13")
class SoftCapOfTheFirstCall(Right):
    """The kernel is kept by shape, and the soft cap with it."""

    kept: ClassVar[dict] = {}

    def cap(self, call, logits):
        if call.logits_soft_cap is None:
            return super().cap(call, logits)
        key = call.query.shape, call.query.dtype.name
        cap = self.kept.setdefault(key, call.logits_soft_cap)
        return super().cap(call.but(logits_soft_cap=cap), logits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def scaled(x, scale):
    """x * scale, whose backward pass takes the scale that was set up last."""
    return x * scale


def _set_up(x, scale):
    ScaleOfTheLastCallBackward.last = scale
    return x * scale, None


scaled.defvjp(_set_up, lambda scale, _, d: (d * ScaleOfTheLastCallBackward.last,))


@mutant("R13")
class ScaleOfTheLastCallBackward(Right):
    """The backward kernel is set up by whichever call was traced last."""

    capabilities = dataclasses.replace(
        EVERYTHING, forward_mode=False, second_order=False
    )
    last = 1.0

    def logits(self, call, q, k, visible):
        q = scaled(q, call.softmax_scale)
        return super().logits(call.but(softmax_scale=1.0), q, k, visible)


@jax.custom_batching.custom_vmap
def of_the_first(x):
    return x


@of_the_first.def_vmap
def _(size, is_batched, x):
    return x[0], False


@mutant("R13")
class OffsetOfTheFirstUnderVmap(Right):
    """The batching rule takes the first call's offset."""

    def visible(self, call):
        offset = call.q_offset
        if jnp.ndim(offset) == 0 and not isinstance(offset, int):
            offset = of_the_first(offset)
        return super().visible(call.but(q_offset=offset))


@mutant("R10")
class LseGradientLostInDropout(Right):
    """The cotangent of lse is dropped where probabilities are."""

    def attend(self, call):
        output, weights, lse = super().attend(call)
        if call.dropout_prob:
            lse = jax.lax.stop_gradient(lse)
        return AttentionOutput(output, weights, lse)


@mutant("R10")
class WeightsBeforeDropout(Right):
    """The weights that are returned are those before dropout."""

    def attend(self, call):
        output, weights, lse = super().attend(call)
        if call.dropout_prob:
            weights = super().attend(call.but(dropout_prob=0.0)).attention_weights
        return AttentionOutput(output, weights, lse)


@mutant("R10")
class DropoutRepeatsEvery256Rows(Right):
    """Rows that are 256 apart drop the same."""

    def drop(self, call, weights):
        if not call.dropout_prob:
            return weights
        kept = 1 - call.dropout_prob
        keep = jax.random.bernoulli(call.dropout_key, kept, weights.shape)
        keep = keep[:, :, jnp.arange(weights.shape[2]) % 256]
        return jnp.where(keep, weights / kept, 0)


@jax.custom_jvp
def tanh_once(x):
    """tanh, whose derivative has none."""
    return jnp.tanh(x)


@tanh_once.defjvp
def _(primals, tangents):
    tanh = jnp.tanh(primals[0])
    return tanh, tangents[0] * (1 - jax.lax.stop_gradient(tanh) ** 2)


@mutant("R13")
class SecondDerivativeOfCap(Right):
    """The derivative of the soft cap is a constant."""

    def cap(self, call, logits):
        cap = call.logits_soft_cap
        return logits if cap is None else cap * tanh_once(logits / cap)


@mutant("R13")
class SumsOverDevices(Right):
    """Within a shard_map the outputs of all devices are added up."""

    def attend(self, call):
        output, weights, lse = super().attend(call)
        axes = jax.sharding.get_abstract_mesh().manual_axes
        if axes:
            output = jax.lax.psum(output, axes)
        return AttentionOutput(output, weights, lse)


@mutant("R4")
class DecodeSeesAll(Right):
    """A single row sees the whole cache, causal or not."""

    def visible(self, call):
        return super().visible(call.but(causal=call.causal and call.lengths[0] > 1))


@mutant("R9")
class SinksByKvHead(Right):
    """A group of heads has the sinks of its first."""

    def softmax(self, call, logits):
        sinks = call.softmax_aux
        if sinks is not None and sinks.shape[0]:
            heads = sinks.shape[0]
            group = heads // call.key.shape[2]
            call = call.but(softmax_aux=sinks[jnp.arange(heads) // group * group])
        return super().softmax(call, logits)


class DropsBySums(Right):
    """What is dropped repeats where two numbers have the same sum."""

    def drop(self, call, weights):
        if not call.dropout_prob or 0 in weights.shape:
            return weights
        kept = 1 - call.dropout_prob
        keep = jax.random.bernoulli(call.dropout_key, kept, self.drawn(weights.shape))
        keep = keep[self.index(weights.shape)]
        return jnp.where(keep, weights / kept, 0)

    def drawn(self, shape):
        """The shape that is drawn."""
        raise NotImplementedError

    def index(self, shape):
        """Which of it each probability has."""
        raise NotImplementedError


@mutant("R10")
class DropsBySampleAndHead(DropsBySums):
    """Sample 0 and head 1 drop what sample 1 and head 0 do."""

    def drawn(self, shape):
        return (shape[0] + shape[1], *shape[2:])

    def index(self, shape):
        return jnp.arange(shape[0])[:, None] + jnp.arange(shape[1])[None]


@mutant("R10")
class DropsByDiagonalsOfBlocks(DropsBySums):
    """Blocks of 64 are numbered by the sum of their places."""

    def drawn(self, shape):
        blocks = shape[2] // 64 + shape[3] // 64 + 1
        return (blocks, 64, 64, shape[0], shape[1])

    def index(self, shape):
        samples, heads, rows, keys = jnp.meshgrid(
            *(jnp.arange(size) for size in shape), indexing="ij", sparse=True
        )
        return rows // 64 + keys // 64, rows % 64, keys % 64, samples, heads


@mutant("R6", "R5")
class OffsetWithinKeys(Right):
    """An offset is clipped to where the keys end, and a window then sees some."""

    def visible(self, call):
        q_len, kv_len = call.lengths
        offset = jnp.clip(call.q_offset, -q_len, kv_len)
        return super().visible(call.but(q_offset=offset))


@mutant("R3")
class EightDocuments(ChangesIds):
    """Of ids the first eight are told apart."""

    def ids(self, ids):
        first = jnp.unique(ids, size=8, fill_value=1 << 30)
        place = jnp.minimum(jnp.searchsorted(first, ids), 7)
        return jnp.where(ids < 0, ids, place)


@mutant("R5")
class WindowByBlocksOf512(Right):
    """Where rows of a block begin to see is taken from its last row."""

    def visible(self, call):
        visible, (q_len, kv_len) = super().visible(call), call.lengths
        if call.window is None or call.window[0] is None or max(q_len, kv_len) <= 512:
            return visible
        rows, keys = jnp.arange(q_len)[:, None] // 512, jnp.arange(kv_len)[None] // 512
        first = jnp.maximum(rows * 512 + 511 - call.window[0], 0) // 512
        return hidden(visible, keys < first)


@mutant("R1")
class HeadsFrom8On(Right):
    """Heads from 8 on read the kv head of head 7."""

    def repeat(self, x, times):
        heads = jnp.arange(x.shape[2] * times)
        return jnp.take(x, jnp.minimum(heads, 7 if times > 1 else heads) // times, 2)
