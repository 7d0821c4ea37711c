"""`switchax inspect`: what a TPU's compiler makes of a call, with no TPU at hand."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from switchax.errors import house_message
from switchax.target import Target

from .call import arguments_of
from .errors import Failure, WrongCall
from .flags import request_options
from .output import show_json, show_line, show_table, stdout_kept
from .targets import target_option

if TYPE_CHECKING:
    from switchax.inspection import Inspection, Pass

__all__ = ["inspect"]

_MIB = 2**20


@click.command()
@click.argument("name")
@request_options
@target_option
@click.option(
    "--config",
    "configs",
    multiple=True,
    metavar="FIELD=VALUE",
    help="Of the operation's config, such as block_q=512; may be given again.",
)
@click.option(
    "--forward-only", is_flag=True, help="Leave out the program with the gradients."
)
@click.option(
    "--chart",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE.png",
    help="Draw which units the hot blocks occupy, bundle by bundle.",
)
@click.option(
    "--dumps",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Keep what the compiler writes.",
)
@click.option("--json", "as_json", is_flag=True, help="Write JSON.")
@click.pass_context
def inspect(
    ctx: click.Context,
    /,
    name: str,
    target: Target | None,
    configs: tuple[str, ...],
    forward_only: bool,
    chart: Path | None,
    dumps: Path | None,
    as_json: bool,
    **flags: Any,
) -> None:
    """Compile a call for a TPU that need not be here, and show its schedule.

    For each kernel: bundles of a full tile, the least that its busiest unit needs, how
    far the units are occupied, spills, vector memory, and bytes moved from and to HBM.
    A schedule says nothing of what a chip waits for. Exits 1 if the operation refuses
    the call or the compiler fails, 2 if the call itself is wrong.

    Example: switchax inspect pallas_flash --target tpu:v6e --q 1,8192,8,128 --causal
    --config block_q=512
    """
    if target is None:
        todo = "for example --target tpu:v6e"
        text = house_message("switchax inspect", "--target tpu:NAME", "none", todo)
        raise WrongCall(text, ctx)
    if chart is not None and importlib.util.find_spec("matplotlib") is None:
        todo = "pip install 'switchax[inspect]'"
        text = house_message("switchax inspect", "matplotlib", "none", todo)
        raise Failure(text)
    with stdout_kept():
        found = _inspected(ctx, name, flags, target, configs, forward_only, dumps)
        if chart is not None:
            _draw(found, chart)
    if as_json:
        show_json(found.to_dict())
    else:
        _show(found)


def _inspected(
    ctx: click.Context,
    name: str,
    flags: dict[str, Any],
    target: Target,
    configs: Sequence[str],
    forward_only: bool,
    dumps: Path | None,
) -> Inspection:
    from switchax.errors import UnsupportedError
    from switchax.inspection import NotCompiledError, inspect_operation

    arguments = arguments_of("attention", flags)
    passes = ("forward",) if forward_only else ("forward", "gradients")
    try:
        metadata = _configured(name, target, configs) if configs else None
        return inspect_operation(
            name, arguments, target, metadata=metadata, passes=passes, dumps=dumps
        )
    except (UnsupportedError, NotCompiledError, ModuleNotFoundError) as error:
        raise Failure(str(error)) from error
    except (ValueError, TypeError) as error:
        raise WrongCall(str(error), ctx) from error


def _configured(name: str, target: Target, configs: Sequence[str]) -> Any:
    """Returns metadata with the operation's config of these fields.

    Raises:
        ValueError: For text that is no field and value, or an operation without one.
        TypeError: For a field that its config lacks, or as the config raises.
    """
    from switchax import OperationMetadata
    from switchax.registry import find_entry

    made = find_entry(name, target).operation.config_class
    if made is None:
        got = f"--config={configs[0]!r}"
        todo = "leave it out"
        raise ValueError(house_message(name, "no config, having none", got, todo))
    fields: dict[str, Any] = {}
    for text in configs:
        field, equals, value = text.partition("=")
        if not equals or not field or field in fields:
            rule, todo = "FIELD=VALUE, each field once", "for example block_q=512"
            raise ValueError(house_message(name, rule, f"--config={text!r}", todo))
        try:
            fields[field] = json.loads(value)
        except ValueError:
            fields[field] = value
    return OperationMetadata(operation_configs={name: made(**fields)})


def _draw(found: Inspection, path: Path) -> None:
    from switchax.inspection.chart import write_chart

    try:
        write_chart(found, path)
    except OSError as error:
        got = f"--chart={str(path)!r}: {error.strerror}"
        text = house_message("switchax inspect", "a file to write", got, "name another")
        raise Failure(text) from error


def _show(found: Inspection) -> None:
    from switchax.inspection.chart import UNITS

    rows = [
        (
            part.name,
            kernel.name,
            str(kernel.hot.bundles),
            str(kernel.hot.floor),
            f"{kernel.hot.floor / kernel.hot.bundles:.0%}",
            str(kernel.hot.spills),
            f"{kernel.vmem / _MIB:.1f}",
            *(f"{kernel.hot.occupancy.get(unit, 0):.0%}" for unit in UNITS),
        )
        for part in found.passes
        for kernel in part.kernels
    ]
    head = ("pass", "kernel", "bundles", "floor", "reached", "spills", "VMEM MiB")
    show_table((*head, *UNITS.values()), rows)
    for part in found.passes:
        if not part.kernels:
            show_line(f"{part.name}: no kernel of its own, XLA alone")
        show_line(_of_memory(part))
    versions = ", ".join(f"{name} {text}" for name, text in found.versions.items())
    show_line(f"{found.target}: {found.vmem / _MIB:.0f} MiB of VMEM; {versions}")
    show_line("bundles: of a full tile; floor: what its busiest unit needs of them")


def _of_memory(part: Pass) -> str:
    most = "" if part.traffic.exact else "at most "
    text = f"{part.name}: kernels move {most}{part.traffic.bytes / _MIB:.1f} MiB from "
    text += f"and to HBM; arguments {part.arguments / _MIB:.1f}, outputs "
    text += f"{part.outputs / _MIB:.1f}, temporaries {part.temporaries / _MIB:.1f} MiB"
    return f"{text}; compiled in {part.seconds:.1f} s"
