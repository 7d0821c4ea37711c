"""Mistakes of the way that a kernel takes: dtype, whole blocks, many rows, a layout.

Small calls in float32 are right, as where a reference answers them; see `mutants`.
"""

import dataclasses
import inspect

import jax
import jax.numpy as jnp

from switchax import Refusal

from .block_mutants import BLOCK, blocks, hidden, mutants_of
from .mutants import EVERYTHING, Right, softmax_once
from .narrow_mutants import declaring

__all__ = ["WAY_MUTANTS"]

WAY_MUTANTS = {}
mutant = mutants_of(WAY_MUTANTS)


def in_whole_blocks(call):
    """Whether a kernel that takes whole blocks of rows and keys serves a call."""
    return not any(length % BLOCK for length in call.lengths)


def in_kernel(call):
    """Whether a kernel serves a call, and no reference: half precision, many rows."""
    return call.query.dtype == jnp.bfloat16 or call.lengths[0] >= 64


@mutant("R3", "R4")
class SecondBlockOfRowsAtZero(declaring("causal", "gqa", "lse")):
    """The position of a row lacks that of its block."""

    def visible(self, call):
        visible = super().visible(call)
        q_len, kv_len = call.lengths
        if not in_whole_blocks(call) or not call.causal:
            return visible
        rows = jnp.arange(q_len)[:, None] % BLOCK
        return (jnp.arange(kv_len)[None] <= rows)[None, None]


@mutant("R10")
class DropoutIgnoredInWholeBlocks(Right):
    def drop(self, call, weights):
        return weights if in_whole_blocks(call) else super().drop(call, weights)


@mutant("R7")
class PaddingLeaksInWholeBlocks(Right):
    def clean(self, call, visible):
        if in_whole_blocks(call):
            return call.query, call.key, call.value
        return super().clean(call, visible)


@mutant("R3")
class NegativeIdsMatchInTheKernel(Right):
    def visible(self, call):
        if call.q_segment_ids is not None and in_kernel(call):
            names = "q_segment_ids", "kv_segment_ids"
            call = call.but(**{n: abs(getattr(call, n)) for n in names})
        return super().visible(call)


@mutant("R9")
class FirstSinkOfSeveralInTheKernel(Right):
    def sinks(self, call, logits):
        sinks = super().sinks(call, logits)
        return sinks[..., :1] if in_kernel(call) else sinks


@mutant("R2")
class ScaleWithoutSignInTheKernel(Right):
    def scale(self, call):
        return abs(call.softmax_scale) if in_kernel(call) else call.softmax_scale


@mutant("R6")
class BiasHasAFloorInTheKernel(Right):
    """A bias of -inf hides nothing."""

    def bias(self, call, shape):
        bias = super().bias(call, shape)
        return jnp.maximum(bias, -1e4) if in_kernel(call) else bias


@mutant("R3")
class MaskOfFirstHeadInTheKernel(Right):
    def visible(self, call):
        if call.mask is not None and call.mask.shape[2] == 1 and in_kernel(call):
            call = call.but(mask=call.mask[:, :1])
        return super().visible(call)


@mutant("R2")
class BiasOfFirstSampleInTheKernel(Right):
    def bias(self, call, shape):
        bias = super().bias(call, shape)
        is_padding = call.bias.shape[1:3] == (1, 1) and in_kernel(call)
        return bias[:1] if is_padding else bias


@mutant("R3")
class CountingBlocksOverflows(Right):
    """The blocks of the largest length are fewer than none."""

    def visible(self, call):
        visible = super().visible(call)
        if call.kv_lengths is None:
            return visible
        ends = (call.kv_lengths + (BLOCK - 1)) // BLOCK
        number = blocks(call)[1]
        return hidden(visible, (number >= ends[:, None])[:, None, None, :])


@mutant("R4", "R5")
class WindowForgetsTheOffset(declaring("causal", "window", "q_offset", "gqa", "lse")):
    """The last block of keys that a block of rows visits, where causal is not asked."""

    def visible(self, call):
        visible = super().visible(call)
        q_len, kv_len = call.lengths
        if call.window is None or call.window[1] is None or call.causal:
            return visible
        last = jnp.minimum((jnp.arange(q_len) // BLOCK + 1) * BLOCK, q_len) - 1
        end = (last + call.window[1]) // BLOCK
        return hidden(visible, (jnp.arange(kv_len)[None] // BLOCK) > end[:, None])


@mutant("R3", "R4", "R11")
class BackwardOfFirstBlockOfRows(declaring("causal", "gqa", "lse")):
    """Takes whole blocks alone, and says so by `refusals`."""

    @classmethod
    def refusals(cls, request, target):
        for axis in ("q_len", "kv_len"):
            if request.sizes[axis] % BLOCK:
                size = str(request.sizes[axis])
                yield Refusal("multiple", axis, size, f"a multiple of {BLOCK}", "pad")

    def logits(self, call, q, k, visible):
        logits = super().logits(call, q, k, visible)
        if not call.causal:
            return logits
        without = super().logits(call, q, jax.lax.stop_gradient(k), visible)
        is_first = jnp.arange(call.lengths[0])[:, None] < BLOCK
        return jnp.where(is_first, logits, without)


@mutant("R3")
class BlocksSkippedByTheFirstSample(Right):
    """What ids occur in a block is asked of one sample."""

    def visible(self, call):
        visible = super().visible(call)
        if call.q_segment_ids is None or call.lengths[0] == 1:
            return visible
        ids = call.q_segment_ids[:1], call.kv_segment_ids[:1]
        (low, high), (kv_low, kv_high) = map(_ranges, ids)
        meets = jnp.maximum(low.T, kv_low) <= jnp.minimum(high.T, kv_high)
        rows, keys = blocks(call)
        return hidden(visible, ~meets[rows, keys])


def _ranges(ids):
    """The least and the greatest id of each block."""
    split = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % BLOCK)), mode="edge")
    split = split.reshape(len(ids), -1, BLOCK)
    return split.min(axis=2), split.max(axis=2)


@mutant("R3", "R6", "R8")
class HiddenIsFiniteInFloat16(
    declaring("mask", "causal", "bias", dtypes={"float32", "float16"})
):
    """What is hidden is the least number of the operands' dtype."""

    def attend(self, call):
        self._least = jnp.finfo(call.query.dtype).min
        return super().attend(call)

    def hide(self, logits, visible):
        row_sees = visible.any(axis=-1, keepdims=True)
        least = jnp.where(row_sees, self._least.astype(jnp.float32), -jnp.inf)
        return jnp.where(visible, logits, least)


@mutant("R8", "R9")
class SinksRoundedToTheOperands(declaring("softmax_aux")):
    def sinks(self, call, logits):
        rounded = call.softmax_aux.astype(call.query.dtype).astype(jnp.float32)
        return super().sinks(call.but(softmax_aux=rounded), logits)


@mutant("R13")
class SecondOrderLostWhereKeysAreHidden(Right):
    def softmax(self, call, logits):
        others = call.mask, call.q_segment_ids, call.kv_lengths
        hides = call.window is not None or any(x is not None for x in others)
        if not hides or call.softmax_aux is not None:
            return super().softmax(call, logits)
        return softmax_once(logits)


@mutant("R10")
class KeysOfOtherImplementationsDropNothing(Right):
    def drop(self, call, weights):
        if call.dropout_prob and "rbg" in str(jax.random.key_impl(call.dropout_key)):
            return weights
        return super().drop(call, weights)


class Layouts(Right):
    """Takes every layout as it is."""

    capabilities = dataclasses.replace(EVERYTHING, layouts=("bthd", "bhtd", "thd"))

    def forward_native(self, layout, **given):
        names = ("query", "key", "value")
        if layout == "bhtd":
            given |= {n: jnp.swapaxes(given[n], 1, 2) for n in names}
        if layout == "thd":
            names = (*names, "q_segment_ids", "kv_segment_ids")
            given |= {n: given[n][None] for n in names if given[n] is not None}
            for name in ("bias", "mask"):
                given[name] = self.batched(given[name])
        result = super().forward_native(**self.in_layout(layout, given))
        if layout == "thd":
            return type(result)(*(None if x is None else x[0] for x in result))
        if layout == "bhtd":
            output = jnp.swapaxes(result.attention_outputs, 1, 2)
            return result._replace(attention_outputs=output)
        return result

    forward_native.__signature__ = inspect.Signature(
        [
            *inspect.signature(Right.forward_native).parameters.values(),
            inspect.Parameter("layout", inspect.Parameter.POSITIONAL_OR_KEYWORD),
        ]
    )

    def batched(self, x):
        """Bias or mask of packed tokens, with an axis of samples."""
        return None if x is None else x.reshape((1,) * (4 - x.ndim) + x.shape)

    def in_layout(self, layout, given):
        """What is lost of a call in a layout: nothing."""
        return given


@mutant("R2", "R3")
class BiasOfPackedTokensHasNoHeads(Layouts):
    """The first of three axes is taken for that of samples."""

    def batched(self, x):
        return super().batched(x[0] if x is not None and x.ndim == 3 else x)


@mutant("R10")
class DropoutLostInItsOwnLayout(Layouts):
    def in_layout(self, layout, given):
        return given | ({"dropout_prob": 0.0} if layout == "bhtd" else {})


@mutant("R7")
class PaddingLeaksInItsOwnLayout(Layouts):
    def in_layout(self, layout, given):
        self._is_own = layout == "bhtd"
        return given

    def clean(self, call, visible):
        if self._is_own and call.window is None:
            return call.query, call.key, call.value
        return super().clean(call, visible)
