"""Mistakes of operations that declare little, and of what comes back; see `mutants`."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp

from switchax.kinds.attention import AttentionOutput

from .block_mutants import mutants_of
from .mutants import (
    EVERYTHING,
    Call,
    Right,
    first_under_vmap,
    softmax_once,
    under_autodiff,
)

__all__ = ["NARROW_MUTANTS"]

NARROW_MUTANTS = {}
mutant = mutants_of(NARROW_MUTANTS)

ALWAYS = ("self", "query", "key", "value", "softmax_scale")
BRINGS = {
    "segment_ids": ("q_segment_ids", "kv_segment_ids"),
    "q_offset_per_batch": ("q_offset",),
    "lse": ("return_lse",),
    "dropout": ("dropout_prob", "dropout_key"),
    "gqa": (),
}


def declaring(*features, **changes):
    """Returns a class that is right, and declares these features alone."""
    floats = {"query", "key", "value", "bias", "softmax_aux", "lse"}
    names = [*ALWAYS, *(n for f in features for n in BRINGS.get(f, (f,)))]

    class Narrow(Right):
        capabilities = dataclasses.replace(
            EVERYTHING,
            features=frozenset(features),
            differentiable={"query", "key", "value", *features} & floats,
            **changes,
        )

        def forward_native(self, **given):
            blank = dict.fromkeys(field.name for field in dataclasses.fields(Call))
            blank |= {"causal": False, "q_offset": 0, "dropout_prob": 0.0}
            result = self.attend(Call(**blank | given))
            lse = result.lse if "lse" in features else None
            return AttentionOutput(result.attention_outputs, None, lse)

        forward_native.__signature__ = inspect.Signature(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            for name in dict.fromkeys(names)
        )

    return Narrow


@mutant("R3")
class CausalityLostBesideLengths(declaring("causal", "mask", "kv_lengths", "bias")):
    """Without an offset to declare, nothing else is causal by the way."""

    def visible(self, call):
        is_lost = call.mask is not None or call.kv_lengths is not None
        return super().visible(call.but(causal=False) if is_lost else call)


@mutant("R3", "R4", "R5")
class CausalityLostBesideWindowAndMask(
    declaring("causal", "window", "q_offset", "mask", "kv_lengths", "bias")
):
    """As a prefill of models whose layers have windows and padding."""

    def visible(self, call):
        others = call.mask is not None or call.bias is not None
        is_lost = others and call.causal and call.window is not None
        return super().visible(call.but(causal=False) if is_lost else call)


@mutant("R2", "R4", "R9")
class OffsetsOfSamplesDropSinks(
    declaring("causal", "q_offset_per_batch", "softmax_aux", "logits_soft_cap")
):
    """The kernel of ragged batches knows neither sinks nor a cap."""

    def attend(self, call):
        if jnp.ndim(call.q_offset) == 1:
            call = call.but(softmax_aux=None, logits_soft_cap=None)
        return super().attend(call)


@mutant("R3", "R6", "R7")
class PackedLengthsIgnored(
    declaring("segment_ids", "q_lengths", "kv_lengths", layouts=("thd",))
):
    def attend(self, call):
        names = ("query", "key", "value", "q_segment_ids", "kv_segment_ids")
        arrays = {n: getattr(call, n) for n in names}
        batched = {n: None if x is None else x[None] for n, x in arrays.items()}
        result = super().attend(call.but(**batched, q_lengths=None, kv_lengths=None))
        return result._replace(attention_outputs=result.attention_outputs[0])


@mutant("R11")
class LseOfAnotherBaseUnderAutodiff(Right):
    """What the forward rule returns is in base 2, where there are blocks of rows."""

    def softmax(self, call, logits):
        weights, lse = super().softmax(call, logits)
        if call.lengths[0] < 64:
            return weights, lse
        other = jax.lax.stop_gradient(0.4427 * jnp.where(lse == -jnp.inf, 0, lse))
        return weights, under_autodiff(lse, lse + other)


@mutant("R8")
class BiasRoundedToTheOperands(declaring("bias", dtypes={"bfloat16"})):
    """A bias of float32 becomes bfloat16, where that is the only dtype."""

    def bias(self, call, shape):
        return call.bias.astype(call.query.dtype).astype(jnp.float32)


@mutant("R8")
class CapInBfloat16(declaring("logits_soft_cap", dtypes={"bfloat16", "float32"})):
    def cap(self, call, logits):
        if call.logits_soft_cap is None or call.query.dtype != jnp.bfloat16:
            return super().cap(call, logits)
        cap = call.logits_soft_cap
        return cap * jnp.tanh(logits.astype(jnp.bfloat16) / cap).astype(jnp.float32)


@mutant("R13")
class SharedMaskOfFirstUnderVmap(Right):
    """A mask that samples share is taken for one that examples share too."""

    def visible(self, call):
        if call.mask is not None and call.mask.shape[0] == 1:
            call = call.but(mask=first_under_vmap(call.mask))
        return super().visible(call)


@mutant("R13")
class NarrowValuesOfFirstUnderVmap(Right):
    def attend(self, call):
        if call.value.shape[-1] != call.query.shape[-1]:
            first = first_under_vmap(jax.lax.stop_gradient(call.value))
            other = first - jax.lax.stop_gradient(call.value)
            call = call.but(value=call.value + jnp.where(jnp.isfinite(other), other, 0))
        return super().attend(call)


@mutant("R13")
class SecondOrderOfLseWrong(Right):
    """What lse's derivative keeps is a constant to the second."""

    def softmax(self, call, logits):
        weights, lse = super().softmax(call, logits)
        if call.softmax_aux is not None:
            return weights, lse
        return weights, softmax_once(logits)[1]


@mutant("R8")
class WindowWiderWithWideTypes(
    declaring("causal", "window", "q_offset", dtypes={"float32"})
):
    """Positions are counted otherwise where JAX has 64-bit types."""

    def visible(self, call):
        if jax.config.jax_enable_x64 and call.window is not None:
            left, right = call.window
            call = call.but(window=(None if left is None else left + 1, right))
        return super().visible(call)


@jax.custom_vjp
def without_backward(x):
    """Returns x; nobody has written its derivative."""
    return x


def _no_backward(residuals, cotangent):
    raise NotImplementedError("no backward yet")


without_backward.defvjp(lambda x: (x, None), _no_backward)


@mutant("R11")
class BackwardRaises(declaring("causal", forward_mode=False, second_order=False)):
    def combine(self, call, weights, v):
        return without_backward(super().combine(call, weights, v))
