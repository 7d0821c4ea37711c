"""Greedy generation: one compiled prefill per padded length, one compiled decode."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from cache import Cache
from flax import nnx
from model import Config, SmolLM2

import switchax
from switchax import ATTENTION, MODE_DECODE, MODE_PREFILL

# Prompts are padded to a power of two from here on, and cache slots come in blocks:
# few shapes, so few compilations.
SHORTEST_PREFILL = 16
SLOT_BLOCK = 64


class PromptTooLongError(ValueError):
    """The prompt and the tokens asked for exceed the model's context."""


@dataclasses.dataclass(frozen=True)
class Produced:
    """One token.

    Attributes:
        token: Its id, the most likely one.
        logits: `[vocabulary]` float32, on the device.
    """

    token: int
    logits: jax.Array


class Generator:
    """A model with one attention operation, compiled once and used for many texts.

    Args:
        model: The loaded model.
        operation: Name of the attention operation.
    """

    def __init__(self, model: SmolLM2, operation: str) -> None:
        self.config = model.config
        self._operation = operation
        # The weights are an argument of the compiled functions; closed over, they
        # would become constants of each program.
        self._graph, self.weights = nnx.split(model)
        self.prefill = jax.jit(self._prefill, donate_argnames="cache")
        self.decode = jax.jit(self._decode, donate_argnames="cache")

    def stream(self, prompt: Sequence[int], max_tokens: int) -> Iterator[Produced]:
        """Yields the greedy continuation, one token at a time.

        Args:
            prompt: Token ids, at least one.
            max_tokens: How many to produce; the caller may stop earlier.

        Raises:
            PromptTooLongError: Nothing was computed.
            switchax.UnsupportedError: The operation refuses what this model asks.
        """
        padded, slots = plan_lengths(self.config, len(prompt), max_tokens)
        tokens = np.zeros((1, padded), np.int32)
        tokens[0, : len(prompt)] = prompt
        cache = self.empty_cache(slots)
        length = jnp.int32(len(prompt))
        token, logits, cache = self.prefill(self.weights, cache, tokens, length)
        yield Produced(int(token[0, 0]), logits)
        for _ in range(max_tokens - 1):
            token, logits, cache = self.decode(self.weights, cache, token)
            yield Produced(int(token[0, 0]), logits)

    def empty_cache(self, slots: int) -> Cache:
        """Returns a cache for one text of at most `slots` tokens."""
        c = self.config
        return Cache.empty(c.layers, (1, slots, c.kv_heads, c.head_dim), c.dtype)

    def _prefill(
        self, weights: nnx.State, cache: Cache, tokens: jax.Array, length: jax.Array
    ) -> tuple[jax.Array, jax.Array, Cache]:
        model = nnx.merge(self._graph, weights)
        hidden, cache = model(
            tokens, length, cache, operation=self._operation, mode=MODE_PREFILL
        )
        last = jax.lax.dynamic_index_in_dim(hidden[0], length - 1, keepdims=False)
        return *_choose(model.logits(last)), cache

    def _decode(
        self, weights: nnx.State, cache: Cache, token: jax.Array
    ) -> tuple[jax.Array, jax.Array, Cache]:
        model = nnx.merge(self._graph, weights)
        hidden, cache = model(
            token, jnp.int32(1), cache, operation=self._operation, mode=MODE_DECODE
        )
        return *_choose(model.logits(hidden[0, 0])), cache


def plan_lengths(config: Config, prompt: int, max_tokens: int) -> tuple[int, int]:
    """Returns the padded length of a prompt and the cache's number of slots."""
    needed = prompt + max_tokens
    if needed > config.context:
        raise PromptTooLongError(
            f"smollm2: expected at most {config.context} tokens, got {prompt} of the "
            f"prompt and {max_tokens} to produce; shorten one of them"
        )
    padded = max(SHORTEST_PREFILL, 1 << (prompt - 1).bit_length())
    return padded, -(-max(padded, needed) // SLOT_BLOCK) * SLOT_BLOCK


def check_operation(config: Config, operation: str) -> None:
    """Asks for this model's prefill and decode attention without computing it.

    Raises:
        switchax.UnknownOperationError: Nobody has an operation of that name.
        switchax.UnsupportedError: It refuses; the message says why.
    """
    for mode, q_len in ((MODE_PREFILL, SHORTEST_PREFILL), (MODE_DECODE, 1)):
        heads = functools.partial(_head_shape, config)
        jax.eval_shape(
            functools.partial(_attend, operation, mode),
            heads(q_len, config.heads),
            heads(SHORTEST_PREFILL, config.kv_heads),
            heads(SHORTEST_PREFILL, config.kv_heads),
            jax.ShapeDtypeStruct((), jnp.int32),
        )


def list_operations() -> dict[str, list[str]]:
    """Returns the attention operations at hand: canonical name to all its names."""
    names_of: dict[type, list[str]] = {}
    for name in switchax.OperationRegistry.list_implementations():
        operation = switchax.OperationRegistry.get(name)
        if operation.kind is ATTENTION:
            names_of.setdefault(operation, []).append(name)
    return {names[0]: names for names in names_of.values()}


def _choose(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.argmax(logits).astype(jnp.int32).reshape(1, 1), logits


def _head_shape(config: Config, length: int, heads: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, length, heads, config.head_dim), config.dtype)


def _attend(
    operation: str,
    mode: str,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    length: jax.Array,
) -> jax.Array:
    return switchax.attention(
        query,
        key,
        value,
        causal=True,
        q_offset=length if mode == MODE_DECODE else 0,
        kv_lengths=length[None],
        mode=mode,
        operation=operation,
    )
