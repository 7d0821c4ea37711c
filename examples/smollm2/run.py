"""Runs SmolLM2-135M with an attention operation named on the command line."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from generate import (
    Generator,
    PromptTooLongError,
    check_operation,
    list_operations,
    plan_lengths,
)
from model import Config, SmolLM2
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from tokenizer import build_tokenizer, format_chat, read_stop_tokens
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from weights import Reader, find_model_file, load_model, read_config

import switchax

# What a user can cause; anything else is a defect and keeps its traceback.
USER_ERRORS = (
    switchax.UnknownOperationError,
    switchax.ContestedNameError,
    switchax.UnsupportedError,
    PromptTooLongError,
    FileNotFoundError,
)

out = Console(highlight=False, markup=False, emoji=False)
err = Console(highlight=False, markup=False, emoji=False, stderr=True)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One operation's run of the prompt.

    Attributes:
        tokens: What it produced.
        logits: `[len(tokens), vocabulary]` float32.
        compile_seconds: Time to the second token: prefill, decode, both compilations.
        rate: Tokens per second after that; nan if there were none.
    """

    tokens: list[int]
    logits: np.ndarray
    compile_seconds: float
    rate: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    options = parse(arguments)
    try:
        run(options)
    except USER_ERRORS as error:
        err.print(f"error: {error}", style="red", soft_wrap=True)
        return 2
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Reads the command line; argparse exits with code 2 on a mistake."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--operation",
        default="auto",
        metavar="NAME",
        help="default: auto; --compare runs all",
    )
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--max-tokens", type=positive, default=32, metavar="N")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--chat", action="store_true", help="put the prompt as a question"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--list", action="store_true", help="show the operations at hand"
    )
    action.add_argument(
        "--compare", action="store_true", help="run the prompt with every operation"
    )
    return parser.parse_args(arguments)


def positive(text: str) -> int:
    """Parses a count of one or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected 1 or more, got {number}")
    return number


def run(options: argparse.Namespace) -> None:
    """Does what the options say."""
    reader = Reader(find_model_file())
    config = read_config(reader, jnp.dtype(options.dtype))
    if options.list:
        out.print(tabulate_operations(config))
        return
    # Everything that can be refused is asked for before the weights are loaded.
    if not options.compare:
        check_operation(config, options.operation)
    tokenizer = build_tokenizer(reader)
    prompt = format_chat(options.prompt) if options.chat else options.prompt
    # An empty prompt starts a document, as between the documents of the training text.
    ids = tokenizer.encode(prompt or "<|endoftext|>").ids
    plan_lengths(config, len(ids), options.max_tokens)
    model = load_with_progress(reader, config)
    if options.compare:
        out.print(compare(model, ids, options.max_tokens))
        return
    if not options.chat:
        out.print(options.prompt, end="", style="dim", soft_wrap=True)
    stop = read_stop_tokens(reader)
    stream_text(
        Generator(model, options.operation), tokenizer, ids, options.max_tokens, stop
    )


def load_with_progress(reader: Reader, config: Config) -> SmolLM2:
    """Loads the weights under a progress bar, or two plain lines if not a terminal."""
    start = time.perf_counter()
    total = len(reader.tensors)
    if err.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
        )
        with Progress(*columns, console=err, transient=True) as progress:
            task = progress.add_task("loading weights", total=total)
            model = load_model(
                reader, config, lambda done: progress.update(task, completed=done)
            )
    else:
        err.print(f"loading weights: {total} tensors", soft_wrap=True)
        model = load_model(reader, config)
    seconds = time.perf_counter() - start
    err.print(f"loaded {total} tensors in {seconds:.1f} s", soft_wrap=True)
    return model


def stream_text(
    generator: Generator,
    tokenizer: Tokenizer,
    ids: Sequence[int],
    max_tokens: int,
    stop: frozenset[int],
) -> None:
    """Prints the continuation while it is produced."""
    # A character may span tokens; the stream holds back until it is whole.
    text = DecodeStream(skip_special_tokens=True)
    for produced in generator.stream(ids, max_tokens):
        if produced.token in stop:
            break
        piece = text.step(tokenizer, produced.token)
        out.print(piece or "", end="", soft_wrap=True)
    out.print()


def compare(model: SmolLM2, ids: Sequence[int], max_tokens: int) -> Table:
    """Runs the prompt with every operation and tabulates how they differ."""
    table = Table(title=f"{max_tokens} greedy tokens, {model.config.dtype}")
    table.add_column("operation")
    table.add_column("same tokens")
    table.add_column("largest logit difference", justify="right")
    table.add_column("tokens/s", justify="right")
    table.add_column("compile s", justify="right")
    first = None
    for name in list_operations():
        err.print(f"running {name}", soft_wrap=True)
        try:
            outcome = measure(Generator(model, name), ids, max_tokens)
        except switchax.UnsupportedError as error:
            table.add_row(name, f"refused: {error}")
            continue
        if first is None:
            first, same, difference = outcome, "(the first)", "-"
        else:
            same, difference = describe_difference(first, outcome)
        rate = "-" if np.isnan(outcome.rate) else f"{outcome.rate:.1f}"
        compiled = f"{outcome.compile_seconds:.1f}"
        table.add_row(name, same, difference, rate, compiled)
    return table


def measure(generator: Generator, ids: Sequence[int], max_tokens: int) -> Outcome:
    """Produces exactly `max_tokens` and times them."""
    start = time.perf_counter()
    tokens, logits, stamps = [], [], []
    for produced in generator.stream(ids, max_tokens):
        tokens.append(produced.token)
        logits.append(np.asarray(produced.logits))
        stamps.append(time.perf_counter())
    warm = stamps[1:]  # the first two include the compilations
    rate = (len(warm) - 1) / (warm[-1] - warm[0]) if len(warm) > 1 else float("nan")
    return Outcome(tokens, np.stack(logits), stamps[:2][-1] - start, rate)


def describe_difference(first: Outcome, other: Outcome) -> tuple[str, str]:
    """Returns whether the tokens agree and how far the logits are apart.

    Logits are compared as long as both had the same tokens before them; after that
    they continue different texts.
    """
    apart = [a != b for a, b in zip(first.tokens, other.tokens, strict=True)]
    same = apart.index(True) if any(apart) else len(apart)
    compared = slice(0, min(same + 1, len(apart)))
    difference = np.abs(first.logits[compared] - other.logits[compared]).max()
    verdict = "yes" if same == len(apart) else f"no, from token {same + 1}"
    return verdict, f"{difference:.2e}"


def tabulate_operations(config: Config) -> Table:
    """Lists the operations at hand and whether they do what this model asks."""
    table = Table(title="attention operations")
    table.add_column("operation")
    table.add_column("also called")
    table.add_column("usable here")
    for name, names in list_operations().items():
        try:
            check_operation(config, name)
        except switchax.UnsupportedError as error:
            usable = f"no: {error}"
        else:
            usable = "yes"
        table.add_row(name, ", ".join(names[1:]), usable)
    return table


if __name__ == "__main__":
    sys.exit(main())
