"""The options that describe a call: attention by shapes, any kind by `--arg`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import click
import jax.numpy as jnp

from switchax.axes import MODE_DECODE, MODE_INSERT, MODE_PREFILL, MODE_TRAIN
from switchax.capabilities import DTYPES
from switchax.errors import house_message, near_miss

from .errors import WrongCall

__all__ = ["MODES", "Shape", "request_options", "wrong"]

Shape = tuple[int, ...]

MODES = {
    "train": MODE_TRAIN,
    "prefill": MODE_PREFILL,
    "decode": MODE_DECODE,
    "insert": MODE_INSERT,
}


def wrong(rule: str, got: str, todo: str) -> WrongCall:
    """Builds the error of a flag that cannot be read."""
    context = click.get_current_context(silent=True)
    command = "switchax explain" if context is None else context.command_path
    return WrongCall(house_message(command, rule, got, todo))


def _shape(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
    if text is None:
        return None
    if not re.fullmatch(r"(\d+([,x]\d+)*)?", text):
        got = f"{param.opts[0]}={text}"
        raise wrong("sizes such as 1,1024,8,64", got, "give every axis a size")
    return tuple(int(size) for size in re.split("[,x]", text) if size)


def _window(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
    if text is None:
        return None
    sides = [side.strip().lower() for side in text.split(",")]
    if not all(re.fullmatch(r"-?\d+|none|", side) for side in sides):
        todo = "leave a side empty for unlimited"
        raise wrong("two numbers such as 256,0", f"--window={text}", todo)
    numbers = [None if side in ("", "none") else int(side) for side in sides]
    return numbers[0] if len(numbers) == 1 else tuple(numbers)


def _offset(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
    if text in (None, "scalar", "batch"):
        return text
    try:
        return int(text)
    except ValueError:
        rule, todo = "a number, scalar or batch", "the words stand for arrays"
        raise wrong(rule, f"--q-offset={text}", todo) from None


def _pattern(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
    if text is None:
        return None
    found = re.fullmatch(r"(chunked|prefix):(\d+)", text)
    if found is None:
        rule, todo = "chunked:N or prefix:N", "for example chunked:1024"
        raise wrong(rule, f"--mask-pattern={text}", todo)
    return found[1], int(found[2])


def _mode(ctx: click.Context, param: click.Parameter, text: str | None) -> Any:
    if text is not None and text not in MODES:
        got = f"--mode={text}{near_miss(text, MODES)}"
        raise wrong(f"a mode of {', '.join(MODES)}", got, "or leave it out for train")
    return text


def _sinks(ctx: click.Context, param: click.Parameter, number: int | None) -> Any:
    if number is not None and number < 0:
        todo = "each head has that many extra logits"
        raise wrong("a number of at least 0", f"--sinks={number}", todo)
    return number


def _dtype(ctx: click.Context, param: click.Parameter, text: str | None) -> str | None:
    if text is None:
        return None
    try:
        return str(jnp.dtype(text).name)
    except TypeError:
        known = sorted(DTYPES)
        got = f"--dtype={text}{near_miss(text, known)}"
        raise wrong("a dtype", got, f"such as {', '.join(known)}") from None


_OPTIONS = (
    click.option(
        "--q", callback=_shape, metavar="SHAPE", help="Shape of query, in the layout."
    ),
    click.option(
        "--kv",
        callback=_shape,
        metavar="SHAPE",
        help="Shape of key; that of query by default.",
    ),
    click.option(
        "--v",
        callback=_shape,
        metavar="SHAPE",
        help="Shape of value; that of key by default.",
    ),
    click.option(
        "--dtype",
        callback=_dtype,
        metavar="DTYPE",
        help="Dtype of the arrays of --q and its like; bfloat16 by default.",
    ),
    click.option("--layout", help="bthd, bhtd or thd."),
    click.option(
        "--mode",
        callback=_mode,
        metavar="MODE",
        help="train, prefill, decode or insert.",
    ),
    click.option("--causal", is_flag=True, help="No key after the row's own."),
    click.option(
        "--window",
        callback=_window,
        metavar="LEFT,RIGHT",
        help="256,0; an empty side or none is unlimited.",
    ),
    click.option(
        "--q-offset",
        callback=_offset,
        metavar="N|scalar|batch",
        help="Key position of row 0: a number or array.",
    ),
    click.option("--bias", callback=_shape, metavar="SHAPE", help="Shape of bias."),
    click.option(
        "--mask", callback=_shape, metavar="SHAPE", help="Shape of a boolean mask."
    ),
    click.option(
        "--mask-pattern",
        callback=_pattern,
        metavar="chunked:N|prefix:N",
        help="A mask known beforehand: chunks, or a prefix, of N tokens.",
    ),
    click.option("--segment-ids", is_flag=True, help="Segment ids of query and key."),
    click.option("--q-lengths", is_flag=True, help="Valid rows of each sample."),
    click.option("--kv-lengths", is_flag=True, help="Valid keys of each sample."),
    click.option("--softmax-scale", type=float),
    click.option("--soft-cap", type=float),
    click.option(
        "--sinks", type=int, callback=_sinks, metavar="N", help="Sinks of each head."
    ),
    click.option("--dropout", type=float, metavar="P"),
    click.option("--lse", is_flag=True, help="Ask for the log-sum-exp."),
    click.option("--weights", is_flag=True, help="Ask for the probabilities."),
    click.option(
        "--arg",
        "others",
        multiple=True,
        metavar="NAME=VALUE",
        help="Any argument of the kind, such as query=bfloat16[64,8,128].",
    ),
)


def request_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Adds the flags that describe a call; `arguments_of` reads them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
