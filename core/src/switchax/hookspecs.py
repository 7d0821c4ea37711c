"""The hooks a plugin may implement; pluggy project name "switchax".

A plugin module needs none of them to provide operations: those it registers with
`@OperationRegistry.register` when imported are found. A module that implements one:

    from switchax import hookimpl

    @hookimpl
    def switchax_rank(request, candidates, target):
        return ["my_flash"] if request.kind == "attention" else None
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from .dispatch import Decision
    from .kind import OperationKind
    from .operation import BaseOperation
    from .request import Request
    from .target import Target

__all__ = ["PROJECT", "hookimpl", "hookspec"]

PROJECT = "switchax"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def switchax_operations() -> Iterable[type[BaseOperation]]:  # type: ignore[empty-body]
    """Returns operation classes that are not registered by decorator."""


@hookspec
def switchax_kinds() -> Iterable[OperationKind]:  # type: ignore[empty-body]
    """Returns operation kinds that the plugin adds."""


@hookspec(firstresult=True)
def switchax_rank(
    request: Request, candidates: Sequence[str], target: Target
) -> Sequence[str] | None:
    """Orders the candidates of an auto choice; the first plugin with an answer wins.

    Args:
        request: The request.
        candidates: Qualified names that honour it, as core would rank them.
        target: The device.

    Returns:
        Names to be preferred, best first (others follow in core's order), or None.
        A better cost class is not passed over in silence for it.
    """


@hookspec
def switchax_configs(operation: str, target: Target) -> Mapping[str, Any] | None:
    """Returns tuned configurations that a plugin ships. Reserved: not asked yet."""


@hookspec
def switchax_decision(decision: Decision) -> None:
    """Observes each new decision."""


@hookspec
def switchax_cases(kind: str) -> Iterable[Any] | None:
    """Returns further conformance cases of a kind. Reserved: not asked yet."""


@hookspec
def switchax_commands(group: Any) -> None:
    """Adds commands to the click group of the command line."""
