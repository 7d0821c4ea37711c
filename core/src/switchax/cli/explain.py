"""`switchax explain`: which operation a call would get, and why not the others."""

from __future__ import annotations

import contextlib
import traceback
from typing import Any

import click
import jax

from switchax import registrations
from switchax.errors import described, house_message, near_miss
from switchax.explanation import Explanation
from switchax.explanation import explain as explain_request
from switchax.loading import ensure_loaded
from switchax.request import Request
from switchax.target import Target

from .call import arguments_of
from .errors import Failure, WrongCall
from .flags import request_options, wrong
from .output import show_json, stdout_kept
from .targets import present_target, target_option
from .verdicts import show_explanation

__all__ = ["explain"]


@click.command()
@request_options
@click.option(
    "--operation", default="auto", metavar="NAME[,NAME]", help="As in the call."
)
@target_option
@click.option("--kind", default="attention", show_default=True, help="Operation kind.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.pass_context
def explain(
    ctx: click.Context,
    /,
    operation: str,
    target: Target | None,
    kind: str,
    as_json: bool,
    **flags: Any,
) -> None:
    """Say which operation a call gets, and why not others.

    Nothing runs, and no device of the target is needed. Exits 1 if no operation
    honours the call, 2 if the call itself is wrong.

    Example: switchax explain --q 1,1024,8,64 --kv 1,1024,2,64 --causal --target tpu:v5e
    """
    names = [name.strip() for name in operation.split(",") if name.strip()]
    if not names or ("auto" in names and len(names) > 1):
        rule, got = "names in --operation, or auto", f"--operation={operation!r}"
        raise wrong(rule, got, "leave it out for auto")
    with stdout_kept(), _wide_types(flags):
        request = _request(kind, flags)
        if target is None:
            target, problem = present_target()
            if target is None:
                raise Failure(problem)
        answer = _answer(request, target, names)
    if as_json:
        show_json(answer.to_dict())
    else:
        show_explanation(answer)
    ctx.exit(0 if answer.chosen is not None else 1)


def _wide_types(flags: dict[str, Any]) -> contextlib.AbstractContextManager[Any]:
    """A call can only be of float64 where JAX has it, so here it has."""
    wide = "64" in (flags["dtype"] or "") or any(
        "64[" in text for text in flags["others"]
    )
    return jax.enable_x64(True) if wide else contextlib.nullcontext()


def _request(kind: str, flags: dict[str, Any]) -> Request:
    ensure_loaded()
    known = registrations.kinds()
    if kind not in known:
        rule = f"--kind of {', '.join(sorted(known))}"
        got = f"--kind={kind}{near_miss(kind, known)}"
        todo = "install the plugin that brings it"
        raise WrongCall(house_message("switchax explain", rule, got, todo))
    arguments = arguments_of(kind, flags)
    try:
        return known[kind].request(**arguments)
    except (TypeError, ValueError) as error:
        raise WrongCall(str(error)) from error


def _answer(request: Request, target: Target, names: list[str]) -> Explanation:
    operation = names[0] if len(names) == 1 else names or "auto"
    try:
        return explain_request(request, target=target, operation=operation)
    except Exception as error:  # raised where an operation is asked what it refuses
        frame = traceback.extract_tb(error.__traceback__)[-1]
        got = f"{described(error)} (line {frame.lineno} of {frame.filename})"
        todo = "repair that plugin, or leave it out with SWITCHAX_BLOCK"
        rule = "plugins that say what they refuse"
        text = house_message("switchax explain", rule, got, todo)
        raise Failure(text) from error
