"""`explain`: which operation a request would get on a target, and why not others."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from . import decisions
from .checks import as_metadata, brief, fail_type, fail_value
from .dispatch import Candidate, assess, check_degraded, decide, operation_names
from .errors import (
    ContestedNameError,
    DecisionLockError,
    Refusal,
    UnknownOperationError,
    UnsupportedError,
)
from .kind import OperationKind
from .loading import ensure_loaded
from .metadata import OperationMetadata
from .metadata.configs import check_configs
from .metadata.precision import check_softmax_dtype
from .placement import placement_of
from .registry import find_kind
from .request import Request
from .settings import current_settings
from .target import Target, current_target, target_of_mesh

__all__ = ["Explanation", "explain"]


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The answer of `explain`.

    Attributes:
        request: What was asked.
        target: For which device.
        chosen: Qualified name of the operation it would get, or None.
        error: Why none, as the call would say it, or "".
        passed_over: Qualified names of a better cost class that refused.
        common: Refusals that every candidate has.
        candidates: Every operation of the kind.
        not_loaded: Plugins that were not loaded, one line each.
    """

    request: Request
    target: Target
    chosen: str | None
    error: str
    passed_over: tuple[str, ...]
    common: tuple[Refusal, ...]
    candidates: tuple[Candidate, ...]
    not_loaded: tuple[str, ...]

    def own_refusals(self, candidate: Candidate) -> tuple[Refusal, ...]:
        """The refusals of a candidate that not every candidate has."""
        return tuple(r for r in candidate.refusals if r not in self.common)

    def to_dict(self) -> dict[str, Any]:
        """Returns the answer as plain data for JSON."""
        return {
            "request": self.request.describe(),
            "features": sorted(self.request.features),
            "target": str(self.target),
            "chosen": self.chosen,
            "error": self.error,
            "passed_over": list(self.passed_over),
            "common": [dataclasses.asdict(refusal) for refusal in self.common],
            "candidates": [
                {
                    "operation": c.entry.qualified,
                    "distribution": c.entry.distribution,
                    "version": c.entry.version,
                    "cost": str(c.cost),
                    "adaptations": [dataclasses.asdict(a) for a in c.plan.adaptations],
                    "refusals": [dataclasses.asdict(r) for r in c.refusals],
                }
                for c in self.candidates
            ],
            "not_loaded": list(self.not_loaded),
        }

    def __str__(self) -> str:
        lines = [
            self.request.describe(),
            f"on {self.target}: {self.chosen or 'nothing'}",
        ]
        if self.passed_over:
            passed = ", ".join(self.passed_over)
            lines.append(f"a worse cost class than {passed}, which refused")
        if self.chosen is None:
            # What is indented is told below.
            lines += [x for x in self.error.splitlines() if not x.startswith(" ")]
        lines += [f"every candidate refuses: {refusal}" for refusal in self.common]
        for candidate in self.candidates:
            reasons = "; ".join(map(str, self.own_refusals(candidate)))
            steps = ", ".join(map(str, candidate.plan.adaptations))
            verdict = "refuses" if candidate.refusals else "honours"
            capabilities = candidate.entry.operation.capabilities
            if capabilities.is_experimental(self.target.platform):
                verdict += " (experimental: only when named)"
            text = f"  {candidate.entry.qualified} ({candidate.cost}): {verdict}"
            if reasons:
                text += f" {reasons}"
            elif steps and not candidate.refusals:
                text += f" [core adapts it: {steps}]"
            lines.append(text)
        lines += [f"  not loaded: {text}" for text in self.not_loaded]
        return "\n".join(lines)


def explain(
    request: Request | None = None,
    *,
    target: str | Target | None = None,
    mesh: Any = None,
    operation: str | Sequence[str] = "auto",
    kind: str | OperationKind | None = None,
    metadata: OperationMetadata | None = None,
    **arguments: Any,
) -> Explanation:
    """Says which operation a call would get, and what each other one refuses.

    Nothing runs, and no device of the target is needed.

    Args:
        request: A request, or None to describe one by `arguments`.
        target: Such as "tpu:v5e"; the present device by default.
        mesh: A mesh whose devices are the target, and over which arrays are split; by
            default the one in force.
        operation: As in a call.
        kind: The kind of the call that `arguments` describe, "attention" by default;
            that of a request, if it is given beside one.
        metadata: As in a call; its mesh and backend count where `mesh` and `target`
            are not given. A request is of a dtype already, so with one `runtime_dtype`
            must be that.
        **arguments: Arguments of the call; arrays may be `jax.ShapeDtypeStruct`.

    Returns:
        The explanation; print it, or see `to_dict`.

    Raises:
        TypeError: As the call would, and for a request, mesh or kind that is none;
            also for request and arguments, or target and mesh, together.
        ValueError: As the call would, and for an unknown target or kind, or what is
            another than the request's.
        UnsupportedError: For a softmax dtype that no call has.

    Example:
        >>> q = jax.ShapeDtypeStruct((1, 128, 8, 64), "bfloat16")
        >>> print(switchax.explain(query=q, key=q, value=q, target="tpu:v5e"))
        attention bfloat16 query 1x128x8x64 ...
    """
    if request is not None and arguments:
        raise TypeError(
            "explain: expected a request or a call's arguments, got both; pass one"
        )
    if request is not None and not isinstance(request, Request):
        got = f"request={brief(request)}"
        todo = "pass a call's arguments by name, or what kind.request(...) returns"
        raise fail_type("explain", "request to be a Request", got, todo)
    records = ensure_loaded()
    metadata = as_metadata("explain", metadata)
    if request is None:
        the_kind = find_kind("explain", "attention" if kind is None else kind)
        request = the_kind.request(metadata, **arguments)
    else:
        the_kind = find_kind("explain", request.kind)
        _check_beside(request, kind, metadata)
    if metadata.operation_configs:
        check_configs("explain", metadata)
    if mesh is None and target is None:
        where = current_target((), metadata.backend, metadata.mesh)
    else:
        where = _target(target, mesh)
    if mesh is not None:
        metadata = metadata.replace(mesh=mesh)
    placement = placement_of(the_kind, request, metadata)
    chosen, error = None, ""
    passed_over: tuple[str, ...] = ()
    names = operation_names("explain", operation) or current_settings().operation
    settings = current_settings()
    try:
        decision = decide(
            the_kind, request, where, names, settings, metadata, placement
        )
        passed_over = tuple(c.entry.qualified for c in decision.degraded)
        check_degraded(decision, settings.strict)
        if settings.lock is not None:
            decisions.check(decision, settings.lock)
        chosen = decision.chosen.entry.qualified
    except _NO_CHOICE as problem:
        error = str(problem)
    candidates = assess(
        the_kind,
        request,
        where,
        settings.force_native,
        metadata.backend,
        placement,
    )
    return Explanation(
        request,
        where,
        chosen,
        error,
        passed_over,
        _common(candidates),
        candidates,
        tuple(str(r) for r in records.values() if r.status != "loaded"),
    )


_NO_CHOICE = (
    ContestedNameError,
    DecisionLockError,
    UnknownOperationError,
    UnsupportedError,
)


def _check_beside(request: Request, kind: Any, metadata: OperationMetadata) -> None:
    """Raises for what a request says otherwise, and would be ignored."""
    if kind is not None and find_kind("explain", kind).name != request.kind:
        rule, got = f"kind={request.kind!r}, the request's", f"kind={brief(kind)}"
        raise fail_value("explain", rule, got, "leave it out")
    dtype = metadata.runtime_dtype
    if dtype is not None and dtype != request.dtype:
        rule = f"runtime_dtype={request.dtype}, the request's"
        todo = "leave it out, or pass the call's arguments"
        raise fail_value("explain", rule, f"runtime_dtype={dtype}", todo)
    check_softmax_dtype("explain", metadata, request.dtype)


def _target(target: str | Target | None, mesh: Any) -> Target:
    """The target of explicit arguments, at least one."""
    if target is not None and mesh is not None:
        raise fail_type("explain", "a target or a mesh", "both", "pass one")
    if target is not None:
        return Target.parse(target)
    if not isinstance(mesh, Mesh | AbstractMesh):
        got = f"mesh={brief(mesh)}"
        raise fail_type("explain", "a Mesh or AbstractMesh", got, "see jax.make_mesh")
    return target_of_mesh(mesh) or current_target()


def _common(candidates: Sequence[Candidate]) -> tuple[Refusal, ...]:
    if len(candidates) < 2:
        return ()
    first, *others = candidates
    return tuple(r for r in first.refusals if all(r in c.refusals for c in others))
