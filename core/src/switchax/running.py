"""Runs a call on the operation that is given, or that is chosen for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .checks import as_metadata, fail_type
from .declaration import check_once
from .dispatch import choose, operation_names, planned, refused_text
from .errors import ContestedNameError, UnknownOperationError, UnsupportedError
from .execution import Invocation, run
from .kind import OperationKind
from .loading import ensure_loaded
from .matching import refusals_of
from .metadata import OperationMetadata
from .operation import BaseOperation, forward_method
from .placement import placement_of
from .registry import check_keeps_metadata, create_from
from .settings import current_settings, setting_sources
from .target import current_target

__all__ = ["run_named", "run_operation"]


def run_operation(
    operation: BaseOperation, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Runs one operation instance on a call; see `BaseOperation.__call__`."""
    check_once(type(operation))
    kind, where = operation.kind, operation.names()[0]
    check_keeps_metadata(where, operation)
    call = kind.bind(where, _named(where, kind, args, kwargs), operation.metadata)
    metadata = operation.metadata
    placement = placement_of(kind, call.request, metadata, call.arrays)
    target = current_target(call.arrays.values(), metadata.backend, metadata.mesh)
    force_native = current_settings().force_native
    plan, shards = planned(type(operation), call.request, placement)
    platform = "native" if force_native else metadata.backend or target.platform
    method = forward_method(type(operation), platform)
    asked = None if force_native else metadata.backend
    reasons = refusals_of(type(operation), plan, target, method, asked)
    if reasons or method is None:
        raise UnsupportedError(refused_text(where, reasons, ()), {where: reasons})
    invocation = Invocation(
        operation, call.request, plan, method, target.platform, placement, shards
    )
    return kind.output(run(invocation, call.arrays))


def _named(
    where: str, kind: OperationKind, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    if len(args) > len(kind.arguments):
        rule = f"at most {len(kind.arguments)} positional arguments"
        todo = f"they are {', '.join(kind.arguments)}; name the others"
        raise fail_type(where, rule, str(len(args)), todo)
    named = dict(zip(kind.arguments, args, strict=False))
    twice = named.keys() & kwargs.keys()
    if twice:
        got = f"{min(twice)} twice"
        raise fail_type(where, "each argument once", got, "pass it once")
    return {**named, **kwargs}


def run_named(
    kind: OperationKind,
    where: str,
    operation: str | Sequence[str],
    arguments: Mapping[str, Any],
    metadata: OperationMetadata | None,
) -> dict[str, Any]:
    """Runs a call of a kind on the operation that a name, or auto, stands for.

    Args:
        kind: The kind.
        where: Who was called, for messages.
        operation: "auto", a name, or names tried in order.
        arguments: Arguments by name.
        metadata: Handed to the operation.

    Returns:
        The kind's outputs by name.
    """
    metadata = as_metadata(where, metadata)
    names = operation_names(where, operation)
    ensure_loaded()  # a plugin may configure
    settings = current_settings()
    call = kind.bind(where, arguments, metadata)
    placement = placement_of(kind, call.request, metadata, call.arrays)
    target = current_target(call.arrays.values(), metadata.backend, metadata.mesh)
    set_names = () if names else settings.operation
    names = names or set_names
    try:
        decision = choose(
            kind, call.request, target, names, settings, metadata, placement
        )
    except (UnsupportedError, UnknownOperationError, ContestedNameError) as error:
        if set_names:
            _, source = setting_sources()["operation"]
            error.add_note(f"the operation is that of {source}, not of the call")
        raise
    chosen = decision.chosen
    assert chosen.method is not None  # a candidate without a method has a refusal
    instance = create_from(chosen.entry, metadata)
    invocation = Invocation(
        instance,
        call.request,
        chosen.plan,
        chosen.method,
        target.platform,
        placement,
        chosen.shards,
    )
    return run(invocation, call.arrays)
