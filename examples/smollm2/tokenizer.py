"""Builds SmolLM2's tokenizer from the vocabulary and merges in its GGUF file."""

from __future__ import annotations

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from weights import Reader, read_field

DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def build_tokenizer(reader: Reader) -> Tokenizer:
    """Returns a byte-level BPE tokenizer with the file's own tokens.

    Raises:
        ValueError: The file asks for another model or pre-tokenizer than these.
    """
    expect_field(reader, "tokenizer.ggml.model", "gpt2")
    expect_field(reader, "tokenizer.ggml.pre", "smollm")
    tokens = read_field(reader, "tokenizer.ggml.tokens")
    merges = read_field(reader, "tokenizer.ggml.merges")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ")) for merge in merges],
        )
    )
    # "smollm" means: each digit by itself, then GPT-2's regex over bytes.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = read_field(reader, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == gguf.TokenType.CONTROL
        ]
    )
    return tokenizer


def expect_field(reader: Reader, name: str, expected: str) -> None:
    """Raises ValueError if a header value is not the one this example knows."""
    actual = read_field(reader, name)
    if actual != expected:
        raise ValueError(f"smollm2: expected {name}={expected!r}, got {actual!r}")


def read_stop_tokens(reader: Reader) -> frozenset[int]:
    """Returns the tokens that end a text: a turn's end and a document's end."""
    tokens = read_field(reader, "tokenizer.ggml.tokens")
    turn_end = read_field(reader, "tokenizer.ggml.eos_token_id")
    return frozenset({turn_end, tokens.index("<|endoftext|>")})


def format_chat(prompt: str, system: str = DEFAULT_SYSTEM) -> str:
    """Wraps a question as the file's chat template does for a first turn.

    Written out because the template is Jinja, which would be one more dependency for
    three lines.
    """
    return (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        f"<|im_start|>user\n{prompt}<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
