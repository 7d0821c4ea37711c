"""The option `--target`, and the device at hand when it is not given."""

from __future__ import annotations

import click

from switchax.errors import described, house_message
from switchax.target import Target, current_target

from .errors import WrongCall, one_line

__all__ = ["present_target", "target_option"]


def _parse(
    ctx: click.Context, param: click.Parameter, text: str | None
) -> Target | None:
    try:
        return Target.parse(text) if text is not None else None
    except ValueError as error:
        raise WrongCall(str(error), ctx) from error


target_option = click.option(
    "--target",
    callback=_parse,
    metavar="PLATFORM[:GENERATION]",
    help="Another device, such as tpu:v5e or cuda:h100; it need not be here.",
)


def present_target() -> tuple[Target | None, str]:
    """Returns the default device's target; if JAX cannot start, None and why.

    One malformed entry_points.txt anywhere stops JAX's start with whatever error.
    """
    try:
        return current_target(), ""
    except Exception as error:
        if str(error).startswith("JAX: "):  # the house form already
            return None, str(error)
        got = one_line(described(error))
        todo = "ask for another by --target, or see `switchax doctor`"
        return None, house_message("JAX", "a device to start on", got, todo)
