"""SmolLM2 (a llama) in Flax NNX; attention is whatever operation is named."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from cache import Cache, LayerCache
from flax import nnx
from rotary import rotary_tables, rotate

import switchax
from switchax import MODE_DECODE, MODE_PREFILL


@dataclasses.dataclass(frozen=True)
class Config:
    """Sizes of the model, as the weights file states them."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    feed_forward: int
    vocabulary: int
    context: int
    rotary_theta: float
    norm_epsilon: float
    dtype: Any = jnp.float32


@dataclasses.dataclass(frozen=True)
class Step:
    """What all layers share in one call of the model.

    Attributes:
        operation: Name of the attention operation.
        mode: `MODE_PREFILL` (the tokens see each other) or `MODE_DECODE` (they see
            the cache).
        offset: Slot of the first token, and so the position of query row 0.
        kv_lengths: `[batch]` int32, how many keys are real; the rest is padding.
        cos: `[batch, q_len, 1, head_dim // 2]`.
        sin: As `cos`.
    """

    operation: str
    mode: str
    offset: int | jax.Array
    kv_lengths: jax.Array
    cos: jax.Array
    sin: jax.Array


class Linear(nnx.Module):
    """A product with a weight kept as `[outputs, inputs]`, as in the file.

    Not `nnx.Linear`, which draws random weights: tracing those for 30 layers takes as
    long as reading the real ones, and its `[inputs, outputs]` would transpose them.
    """

    def __init__(self, inputs: int, outputs: int, dtype: jax.typing.DTypeLike) -> None:
        self.weight = nnx.Param(jnp.zeros((outputs, inputs), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., inputs]` to `[..., outputs]`."""
        return jnp.einsum("...i,oi->...o", x, self.weight[...])


class Norm(nnx.Module):
    """Root-mean-square normalisation, in float32 whatever the model's dtype."""

    def __init__(self, config: Config) -> None:
        self.epsilon = config.norm_epsilon
        self.scale = nnx.Param(jnp.ones((config.hidden,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises the last axis of `[batch, q_len, hidden]`."""
        wide = x.astype(jnp.float32)
        power = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        normal = wide * jax.lax.rsqrt(power + self.epsilon)
        return (normal * self.scale[None, None, :]).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention: `heads` query heads read `kv_heads` key heads."""

    def __init__(self, config: Config) -> None:
        c = config
        self.config = config
        self.query = Linear(c.hidden, c.heads * c.head_dim, c.dtype)
        self.key = Linear(c.hidden, c.kv_heads * c.head_dim, c.dtype)
        self.value = Linear(c.hidden, c.kv_heads * c.head_dim, c.dtype)
        self.output = Linear(c.heads * c.head_dim, c.hidden, c.dtype)

    def __call__(
        self, x: jax.Array, step: Step, cache: LayerCache | None
    ) -> tuple[jax.Array, LayerCache | None]:
        """Attends from `[batch, q_len, hidden]`; also returns the written cache."""
        split = (*x.shape[:2], -1, self.config.head_dim)
        query = rotate(self.query(x).reshape(split), step.cos, step.sin)
        key = rotate(self.key(x).reshape(split), step.cos, step.sin)
        value = self.value(x).reshape(split)
        if cache is not None:
            cache = cache.write(key, value, step.offset)
            if step.mode == MODE_DECODE:
                key, value = cache.key, cache.value
        attended = switchax.attention(
            query,
            key,
            value,
            causal=True,
            q_offset=step.offset,
            kv_lengths=step.kv_lengths,
            mode=step.mode,
            operation=step.operation,
        )
        return self.output(attended.reshape(*x.shape[:2], -1)), cache


class FeedForward(nnx.Module):
    """The gated feed-forward part."""

    def __init__(self, config: Config) -> None:
        c = config
        self.gate = Linear(c.hidden, c.feed_forward, c.dtype)
        self.up = Linear(c.hidden, c.feed_forward, c.dtype)
        self.down = Linear(c.feed_forward, c.hidden, c.dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., hidden]` to itself."""
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    """One transformer layer, normalised before each part."""

    def __init__(self, config: Config) -> None:
        self.attention_norm = Norm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = Norm(config)
        self.feed_forward = FeedForward(config)

    def __call__(
        self, x: jax.Array, step: Step, cache: LayerCache | None
    ) -> tuple[jax.Array, LayerCache | None]:
        """Adds both parts to `[batch, q_len, hidden]`; also returns the cache."""
        attended, cache = self.attention(self.attention_norm(x), step, cache)
        x = x + attended
        return x + self.feed_forward(self.feed_forward_norm(x)), cache


class SmolLM2(nnx.Module):
    """The language model; its embedding table also serves as the output layer."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.embedding = nnx.Param(
            jnp.zeros((config.vocabulary, config.hidden), config.dtype)
        )
        self.layers = nnx.List([Layer(config) for _ in range(config.layers)])
        self.norm = Norm(config)

    def __call__(
        self,
        tokens: jax.Array,
        lengths: jax.Array,
        cache: Cache | None = None,
        *,
        operation: str,
        mode: str = MODE_PREFILL,
    ) -> tuple[jax.Array, Cache | None]:
        """Runs all layers.

        Args:
            tokens: `[batch, q_len]` int32; padded on the right.
            lengths: int32 scalar, how many of the q_len tokens are real.
            cache: Where to put keys and values; `MODE_DECODE` also reads it.
            operation: Name of the attention operation.
            mode: `MODE_PREFILL` starts a text, `MODE_DECODE` goes on after
                `cache.length`.

        Returns:
            The hidden states `[batch, q_len, hidden]` that `logits` takes, and the
            cache with the tokens in it.
        """
        offset = cache.length if mode == MODE_DECODE else 0
        step = self._prepare_step(tokens, lengths, offset, operation, mode)
        x = jnp.take(self.embedding[...], tokens, axis=0)
        written = []
        for index, layer in enumerate(self.layers):
            x, layer_cache = layer(x, step, cache and cache.layers[index])
            written.append(layer_cache)
        if cache is not None:
            cache = Cache(tuple(written), cache.length + lengths)
        return self.norm(x), cache

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Returns float32 logits `[..., vocabulary]` of `[..., hidden]`."""
        return jnp.einsum(
            "...i,oi->...o",
            hidden,
            self.embedding[...],
            preferred_element_type=jnp.float32,
        )

    def _prepare_step(
        self,
        tokens: jax.Array,
        lengths: jax.Array,
        offset: int | jax.Array,
        operation: str,
        mode: str,
    ) -> Step:
        batch, q_len = tokens.shape
        positions = jnp.arange(q_len, dtype=jnp.int32)[None, :] + offset
        cos, sin = rotary_tables(
            positions, self.config.head_dim, self.config.rotary_theta
        )
        kv_lengths = jnp.full((batch,), offset + lengths, jnp.int32)
        return Step(operation, mode, offset, kv_lengths, cos, sin)
