"""Attention operations with one bug each, for the conformance kit to find.

`Right` computes attention in steps, each a method; a mutant replaces one of them. Every
one declares all features and derivatives. `MUTANTS` names the rule that each breaks.
"""

import dataclasses
import inspect
import math

import jax
import jax.numpy as jnp

from switchax import ATTENTION, AttentionOutput, BaseOperation, Capabilities, Refusal
from switchax.kinds.attention import seen, visibility

__all__ = ["EVERYTHING", "MEETINGS", "MUTANTS", "Right"]

BLOCK = 64
ARGUMENTS = ("query", "key", "value", "bias", "softmax_aux")
EVERYTHING = Capabilities(
    platforms={"cpu"},
    dtypes={"float32", "bfloat16"},
    features=set(ATTENTION.features),
    differentiable={*ARGUMENTS, "lse", "weights"},
    forward_mode=True,
    second_order=True,
)
MUTANTS = {}


@dataclasses.dataclass(frozen=True)
class Call:
    """What the forward method is given."""

    query: jax.Array
    key: jax.Array
    value: jax.Array
    softmax_scale: float
    bias: jax.Array | None
    mask: jax.Array | None
    mask_pattern: object | None
    q_segment_ids: jax.Array | None
    kv_segment_ids: jax.Array | None
    q_lengths: jax.Array | None
    kv_lengths: jax.Array | None
    causal: bool
    window: tuple[int | None, int | None] | None
    q_offset: jax.Array | int
    logits_soft_cap: float | None
    softmax_aux: jax.Array | None
    dropout_prob: float
    dropout_key: jax.Array | None
    mode: str
    return_lse: bool

    @property
    def lengths(self):
        """Numbers of query rows and keys."""
        return self.query.shape[1], self.key.shape[1]

    def but(self, **changes):
        """Returns the call with some arguments replaced."""
        return dataclasses.replace(self, **changes)


class Right(BaseOperation):
    """Right in every respect; every step is there to be replaced."""

    kind = ATTENTION
    capabilities = EVERYTHING

    @classmethod
    def get_impl_name(cls):
        return cls.__name__.lower()

    def forward_native(self, **given):
        return self.attend(Call(**given))

    forward_native.__signature__ = inspect.Signature(
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        for name in ("self", *(field.name for field in dataclasses.fields(Call)))
    )

    def attend(self, call):
        q, k, v = call.query, call.key, call.value
        visible = self.visible(call)
        if visible is not None:
            shape = (q.shape[0], q.shape[2], *call.lengths)
            visible = jnp.broadcast_to(visible, shape)
            q, k, v = self.clean(call, visible)
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
        k, v = (self.repeat(x, q.shape[2] // x.shape[2]) for x in (k, v))
        logits = self.logits(call, q, k, visible)
        weights, lse = self.softmax(call, logits)
        weights = self.drop(call, weights)
        output = self.combine(call, weights, v)
        if visible is not None or call.bias is not None:
            row_sees = logits.max(axis=-1, initial=-jnp.inf) != -jnp.inf
            output, lse = self.empty_rows(call, output, lse, row_sees)
        return AttentionOutput(output.astype(call.query.dtype), weights, lse)

    def visible(self, call):
        """Bool, broadcastable to `[batch, heads, q_len, kv_len]`, or None."""
        q_len, kv_len = call.lengths
        names = inspect.signature(visibility).parameters.keys() - {"q_len", "kv_len"}
        given = {name: getattr(call, name) for name in names}
        return visibility(q_len=q_len, kv_len=kv_len, **given)

    def clean(self, call, visible):
        """Query, key and value with 0 where nothing sees or is seen."""
        row_sees, key_seen = seen(visible, call.key.shape[2])
        row_sees, key_seen = (
            jnp.swapaxes(x, 1, 2)[..., None] for x in (row_sees, key_seen)
        )
        q = jnp.where(row_sees, call.query, 0)
        return q, *(jnp.where(key_seen, x, 0) for x in (call.key, call.value))

    def repeat(self, x, times):
        """Repeats kv heads for the query heads that read them."""
        return jnp.repeat(x, times, axis=2)

    def logits(self, call, q, k, visible):
        """Of `[batch, heads, q_len, kv_len]`, -inf where not visible."""
        logits = self.scale(call) * jnp.einsum("bthd,bshd->bhts", q, k)
        logits = self.add_bias(call, logits, visible)
        logits = self.cap(call, logits)
        return logits if visible is None else self.hide(logits, visible)

    def hide(self, logits, visible):
        return jnp.where(visible, logits, -jnp.inf)

    def scale(self, call):
        return call.softmax_scale

    def add_bias(self, call, logits, visible):
        if call.bias is None:
            return logits
        bias = self.bias(call, logits.shape)
        return logits + (bias if visible is None else jnp.where(visible, bias, 0))

    def bias(self, call, shape):
        return call.bias.astype(jnp.float32)

    def cap(self, call, logits):
        cap = call.logits_soft_cap
        return logits if cap is None else cap * jnp.tanh(logits / cap)

    def sinks(self, call, logits):
        """Logits of the sinks, `[batch, heads, q_len, num_sinks]`."""
        batch, heads, q_len, _ = logits.shape
        sinks = call.softmax_aux.reshape(1, heads, 1, -1)
        return jnp.broadcast_to(sinks, (batch, heads, q_len, sinks.shape[-1]))

    def softmax(self, call, logits):
        """Weights and lse."""
        kv_len = logits.shape[-1]
        if call.softmax_aux is not None:
            sinks = self.sinks(call, logits)
            logits = jnp.concatenate([logits, sinks.astype(logits.dtype)], axis=-1)
        weights, lse = self.normalise(logits)
        return weights[..., :kv_len], lse

    def normalise(self, logits):
        return softmax(logits)

    def drop(self, call, weights):
        if not call.dropout_prob:
            return weights
        kept = 1 - call.dropout_prob
        keep = jax.random.bernoulli(call.dropout_key, kept, weights.shape)
        return jnp.where(keep, weights / kept, 0)

    def combine(self, call, weights, v):
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    def empty_rows(self, call, output, lse, row_sees):
        """Output and lse, with output 0 for rows that see nothing."""
        return jnp.where(jnp.swapaxes(row_sees, 1, 2)[..., None], output, 0), lse


def softmax(logits):
    """Weights and lse over the last axis; 0 and -inf for nothing but -inf."""
    m = logits.max(axis=-1, keepdims=True, initial=-jnp.inf)
    m = jax.lax.stop_gradient(jnp.where(m == -jnp.inf, 0, m))
    unnormalised = jnp.exp(logits - m)
    l = unnormalised.sum(axis=-1, keepdims=True)
    is_empty = l == 0
    l = jnp.where(is_empty, 1, l)
    lse = jnp.where(is_empty, -jnp.inf, m + jnp.log(l))
    return unnormalised / l, lse[..., 0]


@jax.custom_jvp
def under_autodiff(plain, differentiated):
    """Returns the first of two, but the second where anything is differentiated."""
    return plain


@under_autodiff.defjvp
def _(primals, tangents):
    return primals[1], tangents[1]


def gradient_of(value, other):
    """Returns a value that has the gradient of another."""
    # The difference is -inf - -inf in the lse of an empty row.
    return under_autodiff(value, jax.lax.stop_gradient(value) + _tangent(other))


def _tangent(x):
    """Returns 0 with the tangent of x."""
    return jnp.where(jnp.isfinite(x), x - jax.lax.stop_gradient(x), 0)


@jax.custom_jvp
def twice_forward(x):
    """Returns x; its tangent is doubled, but not the transpose of that."""
    return x


@twice_forward.defjvp
def _(primals, tangents):
    twice = jax.custom_derivatives.linear_call(
        lambda _, t: 2 * t, lambda _, cotangent: cotangent, (), tangents[0]
    )
    return primals[0], twice


@jax.custom_batching.custom_vmap
def first_under_vmap(x):
    """Returns x; under vmap what is first of it."""
    return x


@first_under_vmap.def_vmap
def _(axis_size, in_batched, x):
    return x[0], False


@jax.custom_jvp
def softmax_once(logits):
    """Is softmax; its derivative has the derivative 0."""
    return softmax(logits)


@softmax_once.defjvp
def _(primals, tangents):
    weights, lse = softmax(primals[0])
    frozen, (t,) = jax.lax.stop_gradient(weights), tangents
    d_lse = (frozen * t).sum(axis=-1)
    return (weights, lse), (frozen * (t - d_lse[..., None]), d_lse)


def mutant(rule, kind="wrong"):
    """Registers a mutant: the rule that it breaks, and how."""

    def add(cls):
        MUTANTS[cls] = rule, kind
        return cls

    return add


# R1: heads, any length


@mutant("R1")
class InterleavedHeads(Right):
    """Query head h reads kv head h % kv_heads."""

    def repeat(self, x, times):
        return jnp.tile(x, (1, 1, times, 1))


@mutant("R1")
class LastBlockUnmasked(Right):
    """Pads the keys to whole blocks, and lets the zeros take part."""

    def softmax(self, call, logits):
        kv_len = logits.shape[-1]
        padding = jnp.zeros((*logits.shape[:-1], -kv_len % BLOCK))
        padded = jnp.concatenate([logits, padding], axis=-1)
        weights, lse = super().softmax(call, padded)
        return weights[..., :kv_len], lse


# R2: logits


@mutant("R2")
class BiasOfFirstSample(Right):
    """A bias that all heads and rows share is the first sample's for all."""

    def bias(self, call, shape):
        bias = super().bias(call, shape)
        return bias[:1] if call.bias.shape[1:3] == (1, 1) else bias


@mutant("R2")
class SoftCapBuiltIn(Right):
    """The soft cap is 0.8, whatever was asked for."""

    def cap(self, call, logits):
        cap = None if call.logits_soft_cap is None else 0.8
        return super().cap(call.but(logits_soft_cap=cap), logits)


@mutant("R2")
class IgnoresScale(Right):
    """Always head_dim ** -0.5."""

    def scale(self, call):
        return call.query.shape[-1] ** -0.5


@mutant("R2")
class ScaleOfPaddedHeadDim(Right):
    """The default scale is of head_dim as the kernel pads it."""

    def __call__(self, query, key, value, *, softmax_scale=None, **given):
        if softmax_scale is None:
            softmax_scale = (-(-query.shape[-1] // BLOCK) * BLOCK) ** -0.5
        return super().__call__(query, key, value, softmax_scale=softmax_scale, **given)


@mutant("R2")
class CapsAfterMask(Right):
    """The cap turns the -inf of a hidden key into a number."""

    def logits(self, call, q, k, visible):
        logits = super().logits(call.but(logits_soft_cap=None), q, k, visible)
        return self.cap(call, logits)


@mutant("R2")
class CapsBeforeBias(Right):
    """The bias is not capped."""

    def add_bias(self, call, logits, visible):
        return super().add_bias(call, super().cap(call, logits), visible)

    def cap(self, call, logits):
        return logits


# R3: visibility


@mutant("R3")
class IgnoresSquareMask(Right):
    """A mask without axes of batch and heads is not seen."""

    def visible(self, call):
        lost = call.mask is not None and call.mask.shape[:2] == (1, 1)
        lost = lost and call.query.shape[0] > 1
        return super().visible(call.but(mask=None) if lost else call)


@mutant("R3")
class SegmentsAreContiguous(Right):
    """Only the first run of a segment's keys is seen."""

    def visible(self, call):
        visible = super().visible(call)
        if call.kv_segment_ids is None:
            return visible
        ids = call.kv_segment_ids
        changed = (ids[:, 1:] != ids[:, :-1]).cumsum(axis=1, dtype=jnp.int32)
        return (
            visible
            & jnp.pad(changed < 2, ((0, 0), (1, 0)), constant_values=True)[
                :, None, None
            ]
        )


@mutant("R3")
class CausalityLostForOneHead(Right):
    """A path for one head forgets causality."""

    def visible(self, call):
        one = call.query.shape[2] == 1
        return super().visible(call.but(causal=call.causal and not one))


@mutant("R3")
class MaskLostBesideBias(Right):
    """A path for bias forgets the mask."""

    def visible(self, call):
        mask = call.mask if call.bias is None else None
        return super().visible(call.but(mask=mask))


@mutant("R3")
class MaskOfFirstSample(Right):
    """Every sample gets the mask of the first."""

    def visible(self, call):
        mask = None if call.mask is None else call.mask[:1]
        return super().visible(call.but(mask=mask))


@mutant("R3")
class MaskOfFirstHead(Right):
    """Every head gets the mask of the first."""

    def visible(self, call):
        mask = None if call.mask is None else call.mask[:, :1]
        return super().visible(call.but(mask=mask))


@mutant("R3")
class NegativeSegmentsMatch(Right):
    """Equal ids match, whatever their sign."""

    def visible(self, call):
        if call.q_segment_ids is None:
            return super().visible(call)
        ids = {n: getattr(call, n) + 10 for n in ("q_segment_ids", "kv_segment_ids")}
        return super().visible(call.but(**ids))


@mutant("R3")
class SegmentsOfKeysOnly(Right):
    """Rows are taken to have the ids of the keys."""

    def visible(self, call):
        return super().visible(call.but(q_segment_ids=call.kv_segment_ids))


@mutant("R3")
class KvLengthsOffByOne(Right):
    """The first key past the end is seen."""

    def visible(self, call):
        lengths = None if call.kv_lengths is None else call.kv_lengths + 1
        return super().visible(call.but(kv_lengths=lengths))


@mutant("R3")
class IgnoresQLengths(Right):
    """Rows past the end see what the others see."""

    def visible(self, call):
        return super().visible(call.but(q_lengths=None))


# R4: alignment


@mutant("R4")
class TopLeftAlignment(Right):
    """Row 0 stands at key 0, whatever q_offset says."""

    def visible(self, call):
        return super().visible(call.but(q_offset=0))


@mutant("R4")
class WindowWithoutOffset(Right):
    """q_offset moves the diagonal, not the window."""

    def visible(self, call):
        if call.window is None:
            return super().visible(call)
        others = super().visible(call.but(window=None))
        window = super().visible(call.but(causal=False, q_offset=0))
        return window if others is None else others & window


@mutant("R4")
class OffsetOfFirstSample(Right):
    """Every sample gets the q_offset of the first."""

    def visible(self, call):
        offset = jnp.asarray(call.q_offset)
        return super().visible(call.but(q_offset=offset[0] if offset.ndim else offset))


# R5: window


@mutant("R5")
class WideLeft(Right):
    """The window holds one key too many on the left, counting the row's own."""

    def visible(self, call):
        left, right = call.window or (None, None)
        window = (None if left is None else left + 1, right)
        return super().visible(call.but(window=window if call.window else None))


@mutant("R5")
class WideRight(Right):
    """The window holds one key too many on the right."""

    def visible(self, call):
        left, right = call.window or (None, None)
        window = (left, None if right is None else right + 1)
        return super().visible(call.but(window=window if call.window else None))


# R6: empty rows


@mutant("R6")
class MeanOnEmptyRows(Right):
    """The -inf is a large number: a row that sees nothing sees all alike."""

    def hide(self, logits, visible):
        return jnp.where(visible, logits, -1e30)


@mutant("R6")
class NanOnEmptyBlocks(Right):
    """One of several blocks of rows divides 0 by 0 if none of its rows sees a key."""

    def empty_rows(self, call, output, lse, row_sees):
        output, lse = super().empty_rows(call, output, lse, row_sees)
        batch, heads, q_len = row_sees.shape
        if q_len <= BLOCK:
            return output, lse
        padded = jnp.pad(row_sees, ((0, 0), (0, 0), (0, -q_len % BLOCK)))
        some = padded.reshape(batch, heads, -1, BLOCK).any(axis=-1)
        block_sees = jnp.repeat(some, BLOCK, axis=-1)[..., :q_len]
        block_sees = jnp.swapaxes(block_sees, 1, 2)[..., None]
        return jnp.where(block_sees, output, jnp.nan), lse


@mutant("R6")
class LseOfEmptyRowsFinite(Right):
    """A row of nothing but a bias of -inf has the log of the smallest number as lse."""

    def empty_rows(self, call, output, lse, row_sees):
        output, lse = super().empty_rows(call, output, lse, row_sees)
        if call.bias is None:
            return output, lse
        return output, jnp.where(row_sees, lse, jnp.log(jnp.finfo(jnp.float32).tiny))


# R7: dirty padding


@mutant("R7")
class CleansNanAlone(Right):
    """Infinities in padding are left where they are."""

    def clean(self, call, visible):
        cleaned = super().clean(call, visible)
        raw = (call.query, call.key, call.value)
        return tuple(
            jnp.where(jnp.isinf(x), x, c) for x, c in zip(raw, cleaned, strict=True)
        )


@mutant("R7")
class NanLeaks(Right):
    """A value past the end of its sample is multiplied by 0."""

    def clean(self, call, visible):
        q, k, v = super().clean(call, visible)
        return q, k, v if call.kv_lengths is None else call.value


@mutant("R7")
class NanLeaksBackward(Right):
    """A key past the last segment is hidden forward, and multiplied by 0 backward."""

    def clean(self, call, visible):
        q, k, v = super().clean(call, visible)
        return q, k if call.kv_segment_ids is None else call.key, v


@mutant("R7")
class NanRowsLeakBackward(Right):
    """A row past the end is 0 forward; backward, its NaN is multiplied by 0."""

    def clean(self, call, visible):
        q, k, v = super().clean(call, visible)
        return q if call.q_lengths is None else call.query, k, v


# R8: precision


@mutant("R8")
class LseInBase2(Right):
    """The kernel's exp2 shows."""

    def softmax(self, call, logits):
        weights, lse = super().softmax(call, logits)
        return weights, lse / jnp.log(2.0)


@mutant("R8")
class LseInBfloat16(Right):
    """lse is stored in bfloat16 on the way."""

    def softmax(self, call, logits):
        weights, lse = super().softmax(call, logits)
        return weights, lse.astype(jnp.bfloat16).astype(jnp.float32)


@mutant("R8")
class AccumulatesInBfloat16(Right):
    """The sum over blocks of keys is kept in the dtype of the operands."""

    def combine(self, call, weights, v):
        dtype, kv_len = call.query.dtype, v.shape[1]
        if dtype == jnp.float32:
            return super().combine(call, weights, v)
        output = 0
        for start in range(0, kv_len, BLOCK):
            block = slice(start, start + BLOCK)
            added = super().combine(call, weights[..., block], v[:, block])
            output = (output + added).astype(dtype).astype(jnp.float32)
        return output


@mutant("R8")
class LogitsInBfloat16(Right):
    """The logits are stored in the dtype of the operands."""

    def add_bias(self, call, logits, visible):
        logits = logits.astype(call.query.dtype).astype(jnp.float32)
        return super().add_bias(call, logits, visible)


@mutant("R8")
class SumsBackwardInBfloat16(Right):
    """The gradient of value is a sum in bfloat16 over blocks of rows."""

    def combine(self, call, weights, v):
        output = super().combine(call, weights, v)
        if call.query.dtype != jnp.bfloat16 or call.lengths[0] % BLOCK:
            return output
        narrow = v.astype(jnp.bfloat16)

        def rows(block):
            return jnp.einsum("bhts,bshd->bthd", block, narrow.astype(jnp.float32))

        blocks = jnp.moveaxis(
            weights.reshape(*weights.shape[:2], -1, 8, weights.shape[3]), 2, 0
        )
        outputs = jax.lax.map(rows, blocks)
        return jnp.moveaxis(outputs, 0, 1).reshape(output.shape)


# R9: sinks


@mutant("R9")
class SinksNotInLse(Right):
    """lse is of the keys alone."""

    def softmax(self, call, logits):
        weights, lse = super().softmax(call, logits)
        return weights, lse if call.softmax_aux is None else softmax(logits)[1]


@mutant("R9")
class SinksScaled(Right):
    """softmax_scale multiplies the sinks too."""

    def sinks(self, call, logits):
        return call.softmax_scale * super().sinks(call, logits)


@mutant("R9")
class SinksCapped(Right):
    """The sinks are capped as the logits are."""

    def sinks(self, call, logits):
        return self.cap(call, super().sinks(call, logits))


# R10: dropout


@mutant("R10")
class DropoutIgnoresKey(Right):
    """Every call drops the same."""

    def drop(self, call, weights):
        key = None if call.dropout_key is None else jax.random.key(3)
        return super().drop(call.but(dropout_key=key), weights)


@mutant("R10")
class DropoutNotRescaled(Right):
    """What is kept is left as it was."""

    def drop(self, call, weights):
        kept = 1 - call.dropout_prob
        dropped = super().drop(call, weights)
        return dropped * kept if call.dropout_prob else dropped


@mutant("R10")
class DropoutSharedByHeads(Right):
    """All heads drop the same."""

    def drop(self, call, weights):
        if not call.dropout_prob:
            return weights
        kept = 1 - call.dropout_prob
        shape = (weights.shape[0], 1, *weights.shape[2:])
        keep = jax.random.bernoulli(call.dropout_key, kept, shape)
        return jnp.where(keep, weights / kept, 0)


@mutant("R10")
class DropoutShareBuiltIn(Right):
    """A quarter is dropped, whatever the probability."""

    def drop(self, call, weights):
        share = 0.25 if call.dropout_prob else 0.0
        return super().drop(call.but(dropout_prob=share), weights)


@mutant("R10")
class DropoutBeforeSoftmax(Right):
    """Drops logits, so that the rest adds up to 1."""

    def softmax(self, call, logits):
        if call.dropout_prob:
            keep = super().drop(call, jnp.ones(logits.shape)) > 0
            logits = jnp.where(keep, logits, -jnp.inf)
        return super().softmax(call, logits)

    def drop(self, call, weights):
        return weights


@mutant("R10")
class DropoutBackwardDiffers(Right):
    """The backward pass draws another pattern."""

    def drop(self, call, weights):
        if not call.dropout_prob:
            return weights
        other = call.but(dropout_key=jax.random.fold_in(call.dropout_key, 1))
        return gradient_of(super().drop(call, weights), super().drop(other, weights))


# R11: gradients


@mutant("R11")
class WindowInForwardOnly(Right):
    """The gradient is that of a call without window."""

    def attend(self, call):
        value = super().attend(call)
        if call.window is None:
            return value
        return jax.tree.map(gradient_of, value, super().attend(call.but(window=None)))


@mutant("R11")
class CausalityLostUnderAutodiff(Right):
    """The forward pass that keeps residuals forgets causality."""

    def attend(self, call):
        value = super().attend(call)
        if not call.causal:
            return value
        other = super().attend(call.but(causal=False))
        return jax.tree.map(under_autodiff, value, other)


@mutant("R11")
class BiasGradientZero(Right):
    """The backward kernel returns no bias gradient."""

    def bias(self, call, shape):
        return jax.lax.stop_gradient(super().bias(call, shape))


@mutant("R11")
class BiasGradientOfLastKey(Right):
    """A bias of one entry for all keys gets the gradient of the last key alone."""

    def bias(self, call, shape):
        bias = jnp.broadcast_to(super().bias(call, shape), shape)
        if call.bias.shape[-1] == 1:
            is_last = jnp.arange(shape[-1]) == shape[-1] - 1
            bias = jnp.where(
                is_last[None, None, None], bias, jax.lax.stop_gradient(bias)
            )
        return bias


@mutant("R11")
class BiasGradientIsMean(Right):
    """The gradient is averaged over what the bias was broadcast along."""

    def bias(self, call, shape):
        bias = super().bias(call, shape)
        return jax.lax.stop_gradient(bias) + _tangent(bias) * (
            bias.size / max(math.prod(shape), 1)
        )


@mutant("R11")
class KeyGradientOfOneHead(Right):
    """The gradient of key is not summed over the heads that read it."""

    def repeat(self, x, times):
        is_first = jnp.arange(x.shape[2] * times) % times == 0
        x = super().repeat(x, times)
        return jnp.where(is_first[None, None, :, None], x, jax.lax.stop_gradient(x))


@mutant("R11")
class IgnoresCotangentOfLse(Right):
    """The backward kernel takes the output's cotangent alone."""

    def attend(self, call):
        found = super().attend(call)
        return found._replace(lse=jax.lax.stop_gradient(found.lse))


@mutant("R11")
class SoftCapNotDifferentiated(Right):
    """The backward kernel lacks the derivative of tanh."""

    def cap(self, call, logits):
        capped = super().cap(call, logits)
        return capped if capped is logits else gradient_of(capped, logits)


# R12: nothing is lost


@mutant("R12", "accepted")
class SwallowsKeywords(Right):
    """A __call__ of its own, which drops what it does not know."""

    def __call__(self, *args, **given):
        known = {field.name for field in dataclasses.fields(Call)}
        known |= {"layout", "return_lse", "return_weights"}
        return super().__call__(*args, **{n: x for n, x in given.items() if n in known})


@mutant("R12", "accepted")
class AcceptsUndeclaredBias(Right):
    """A __call__ of its own, which drops the bias that it does not declare."""

    capabilities = dataclasses.replace(
        EVERYTHING,
        features=EVERYTHING.features - {"bias"},
        differentiable=EVERYTHING.differentiable - {"bias"},
    )

    def __call__(self, *args, bias=None, **given):
        return super().__call__(*args, **given)

    def forward_native(self, **given):
        return self.attend(Call(bias=None, **given))

    forward_native.__signature__ = inspect.Signature(
        [
            parameter
            for name, parameter in inspect.signature(
                Right.forward_native
            ).parameters.items()
            if name != "bias"
        ]
    )


@mutant("R12", "refused")
class RefusesWindow(BaseOperation):
    """Declares a window, and refuses each; it declares nothing else."""

    kind = ATTENTION
    capabilities = Capabilities(dtypes={"float32"}, features={"window"})

    @classmethod
    def get_impl_name(cls):
        return "refuses_window"

    @classmethod
    def refusals(cls, request, target):
        if "window" in request.features:
            yield Refusal("window", "no window", "this one has none", "choose another")

    def forward_native(self, query, key, value, *, softmax_scale, window):
        call = dict.fromkeys(field.name for field in dataclasses.fields(Call))
        call |= {"query": query, "key": key, "value": value, "dropout_prob": 0.0}
        call |= {"softmax_scale": softmax_scale, "causal": False}
        return Right().attend(Call(**call)).attention_outputs


@mutant("R11")
class GradientOfWeightsZero(Right):
    """The cotangent of the weights is dropped."""

    def attend(self, call):
        result = super().attend(call)
        weights = jax.lax.stop_gradient(result.attention_weights)
        return result._replace(attention_weights=weights)


# R13: transforms, and what is left behind


@mutant("R13")
class ScaleCaptured(Right):
    """The first call's scale is built into the kernel."""

    def scale(self, call):
        kernel = vars(type(self)).get("kernel", call.softmax_scale)
        type(self).kernel = kernel
        return kernel


@mutant("R13")
class LengthCaptured(Right):
    """The first call's number of keys is built into the kernel."""

    def visible(self, call):
        type(self).kv_len = vars(type(self)).get("kv_len", call.key.shape[1])
        visible = super().visible(call)
        within = jnp.arange(call.key.shape[1])[None, None, None] < self.kv_len
        return within if visible is None else visible & within


@mutant("R13")
class ForwardModeWrong(Right):
    """The tangent is doubled; its transpose is not."""

    def combine(self, call, weights, v):
        return twice_forward(super().combine(call, weights, v))


@mutant("R13")
class SecondOrderWrong(Right):
    """The residuals of the first derivative are constants to the second."""

    def normalise(self, logits):
        return softmax_once(logits)


@mutant("R13")
class MaskOfFirstUnderVmap(Right):
    """Under vmap every call gets the mask of the first."""

    def visible(self, call):
        mask = None if call.mask is None else first_under_vmap(call.mask)
        return super().visible(call.but(mask=mask))


@mutant("R13")
class WrongOnAMesh(Right):
    """Where heads are split over devices, each gives twice what it should."""

    capabilities = dataclasses.replace(
        EVERYTHING, opaque=True, shardable={"batch", "heads"}
    )

    def combine(self, call, weights, v):
        output = super().combine(call, weights, v)
        split = jax.sharding.get_abstract_mesh().shape.get("tp", 1) > 1
        return 2 * output if split else output


# Where two things meet that are right alone: what of a call it takes to see each.
MEETINGS = {}


def meeting(*fields):
    """Adds a mutant that the smallest failing call must show by these fields alone."""

    def add(cls):
        MEETINGS[cls] = set(fields)
        return cls

    return add


@meeting("scale", "causal")
class IgnoresScaleBesideCausal(Right):
    """softmax_scale is the default where the call is causal."""

    def scale(self, call):
        default = call.query.shape[3] ** -0.5
        return default if call.causal else super().scale(call)


@meeting("sinks", "window", "offset")
class IgnoresSinksBesideWindow(Right):
    """Sinks are lost where there is a window."""

    def attend(self, call):
        sinks = None if call.window is not None else call.softmax_aux
        return super().attend(call.but(softmax_aux=sinks))


@meeting("segments", "causal", "offset")
class IgnoresSegmentsBesideCausal(Right):
    """Packed samples see each other where the call is causal."""

    def visible(self, call):
        if call.causal:
            call = call.but(q_segment_ids=None, kv_segment_ids=None)
        return super().visible(call)


@meeting("mask", "kv_heads", "heads")
class IgnoresMaskOfGroups(Right):
    """The mask is lost where query heads share key heads."""

    def visible(self, call):
        groups = call.query.shape[2] != call.key.shape[2]
        return super().visible(call.but(mask=None) if groups else call)


@meeting("lengths", "causal", "offset")
class IgnoresKvLengthsBesideCausal(Right):
    """Keys past the sample's length are seen where the call is causal."""

    def visible(self, call):
        return super().visible(call.but(kv_lengths=None) if call.causal else call)


@meeting("batch", "heads", "kv_heads")
class WrongInTheFifthSample(Right):
    """Samples after the fourth are those of the first four again."""

    def combine(self, call, weights, v):
        output = super().combine(call, weights, v)
        return output[jnp.arange(output.shape[0]) % 4]


@meeting("dropout", "causal")
class IgnoresCausalBesideDropout(Right):
    """Every key is seen where probabilities are dropped."""

    def visible(self, call):
        return super().visible(call.but(causal=False) if call.dropout_prob else call)


@meeting("dtype", "soft_cap")
class CapsInBfloat16(Right):
    """The soft cap of bfloat16 operands is lost."""

    def cap(self, call, logits):
        lost = call.query.dtype == jnp.bfloat16
        return logits if lost else super().cap(call, logits)
