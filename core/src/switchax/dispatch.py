"""Chooses an operation for a request, and says why; `running` then runs it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

from . import decisions, registrations
from .caller import warn_caller
from .capabilities import Cost
from .checks import brief, fail_type, fail_value
from .compat import jax_settings
from .errors import (
    ContestedNameError,
    DegradedChoiceError,
    DegradedChoiceWarning,
    Refusal,
    UnsupportedError,
)
from .kind import OperationKind, Plan
from .loading import call_hooks, ensure_loaded, first_result
from .matching import refusals_of
from .metadata import OperationMetadata
from .operation import BaseOperation, forward_method
from .placement import Placement, Shards, shards_of
from .registrations import Entry
from .registry import HOW_TO_INSTALL, find_entry, unloaded_note
from .request import Request
from .settings import Settings, current_settings
from .target import Target

__all__ = [
    "Candidate",
    "Decision",
    "assess",
    "choose",
    "decide",
    "operation_names",
    "planned",
    "refused_text",
]

Names = tuple[str, ...]  # () is "auto"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One operation beside one request.

    Attributes:
        entry: The operation, its names and owner.
        cost: Its cost class for this request, adaptation included.
        plan: How it would run.
        method: The forward method that would run, or None.
        refusals: Why it would not; empty if it would.
        shards: How core would split it over the mesh, if it is opaque.
    """

    entry: Entry
    cost: Cost
    plan: Plan
    method: str | None
    refusals: tuple[Refusal, ...]
    shards: Shards | None = None


@dataclasses.dataclass(frozen=True)
class Decision:
    """What was chosen for a request.

    Attributes:
        request: The request.
        target: The device it was chosen for.
        chosen: The candidate that runs.
        candidates: Every operation of the kind, the chosen one included.
        how: "named", "listed" or "auto".
        degraded: What refused, if a better cost class did.
        placement: The mesh it was chosen on, and where arrays are wished to lie.
    """

    request: Request
    target: Target
    chosen: Candidate
    candidates: tuple[Candidate, ...]
    how: str
    degraded: tuple[Candidate, ...] = ()
    placement: Placement | None = None

    @property
    def where(self) -> str:
        """The target, and the mesh if there is one, as text."""
        mesh = f" mesh {self.placement}" if self.placement is not None else ""
        return f"{self.target}{mesh}"


def planned(
    operation: type[BaseOperation], request: Request, placement: Placement | None
) -> tuple[Plan, Shards | None]:
    """Plans a call: as one device makes it, if core splits the kernel."""
    kind, capabilities = operation.kind, operation.capabilities
    shards = None
    if placement is not None and capabilities.opaque:
        shards = shards_of(kind, request, capabilities, placement)
    if shards is None:
        return kind.plan(request, capabilities), None
    plan = kind.plan(shards.request, capabilities)
    plan = dataclasses.replace(
        plan,
        adaptations=(*shards.adaptations, *plan.adaptations),
        refusals=(*shards.refusals, *plan.refusals),
    )
    return plan, shards


def operation_names(where: str, operation: str | Sequence[str]) -> Names:
    """Returns the names to try, () for auto.

    Raises:
        TypeError: If they are no names.
        ValueError: For auto among others.
    """
    if isinstance(operation, str):
        return () if operation.strip() == "auto" else (operation,)
    names = tuple(operation) if isinstance(operation, list | tuple) else ()
    names = tuple(n.strip() if isinstance(n, str) else n for n in names)
    if names == ("auto",):
        return ()
    if "auto" in names:
        got, todo = f"operation={operation!r}", "leave 'auto' out"
        raise fail_value(where, "'auto' alone, or names", got, todo)
    if not names or not all(isinstance(name, str) for name in names):
        got, todo = (
            f"operation={operation!r}",
            "for example 'auto' or ('sdpa', 'vanilla')",
        )
        raise fail_type(where, "operation to be a name or names", got, todo)
    return names


def choose(
    kind: OperationKind,
    request: Request,
    target: Target,
    names: Names = (),
    settings: Settings | None = None,
    metadata: OperationMetadata | None = None,
    placement: Placement | None = None,
) -> Decision:
    """Chooses an operation, and records the decision.

    Args:
        kind: The request's kind.
        request: The request.
        target: The device.
        names: Names tried in order; () ranks all operations of the kind.
        settings: Those in force by default.
        metadata: Its backend says which forward method runs.
        placement: The mesh, and where arrays are wished to lie; None on one device.

    Returns:
        The decision.

    Raises:
        UnsupportedError: If nothing named, or nothing at all, honours the request.
        DegradedChoiceError: In strict mode, if only a worse cost class does.
        UnknownOperationError: For a name nobody has.
        ContestedNameError: For a name several claim.
    """
    settings = settings if settings is not None else current_settings()
    decision = decide(kind, request, target, names, settings, metadata, placement)
    said = check_degraded(decision, settings.strict)
    if said and said not in _said:
        _said.add(said)
        warn_caller(said, DegradedChoiceWarning)
    if decisions.record(decision, settings.lock):
        call_hooks("switchax_decision", decision=decision)
    return decision


def decide(
    kind: OperationKind,
    request: Request,
    target: Target,
    names: Names,
    settings: Settings,
    metadata: OperationMetadata | None = None,
    placement: Placement | None = None,
) -> Decision:
    """Makes the choice of `choose` without recording, warning or being strict."""
    ensure_loaded()
    return _choose(
        kind,
        request,
        target,
        names,
        settings.force_native,
        metadata.backend if metadata is not None else None,
        placement,
        # What it depends on though it is not handed on: an operation's own rules may
        # ask JAX for a setting.
        (registrations.generation(), jax_settings()),
    )


@functools.lru_cache(maxsize=4096)
def _choose(
    kind: OperationKind,
    request: Request,
    target: Target,
    names: Names,
    force_native: bool,
    backend: str | None,
    placement: Placement | None,
    key: Hashable,
) -> Decision:
    entries = registrations.entries()  # once: another thread may register meanwhile
    candidates = assess(
        kind, request, target, force_native, backend, placement, entries
    )
    if names:
        decision = _choose_named(kind, request, target, names, candidates, entries)
    else:
        decision = _choose_auto(request, target, candidates)
    return dataclasses.replace(decision, placement=placement)


def assess(
    kind: OperationKind,
    request: Request,
    target: Target,
    force_native: bool = False,
    backend: str | None = None,
    placement: Placement | None = None,
    entries: Sequence[Entry] | None = None,
) -> tuple[Candidate, ...]:
    """Holds every operation of a kind against a request.

    Args:
        kind: The kind.
        request: The request.
        target: The device.
        force_native: Only `forward_native` counts.
        backend: Platform whose forward method runs, the target's by default.
        placement: The mesh, and where arrays are wished to lie; None on one device.
        entries: What is registered; None is what is now.
    """
    asked = None if force_native else backend
    method = "native" if force_native else backend or target.platform
    return tuple(
        _candidate(entry, request, target, method, asked, placement)
        for entry in (registrations.entries() if entries is None else entries)
        if entry.operation.kind is kind
    )


def _candidate(
    entry: Entry,
    request: Request,
    target: Target,
    how: str,
    backend: str | None,
    placement: Placement | None,
) -> Candidate:
    operation = entry.operation
    plan, shards = planned(operation, request, placement)
    method = forward_method(operation, how)
    refusals = refusals_of(operation, plan, target, method, backend)
    cost = plan.cost(operation.capabilities.cost)
    return Candidate(entry, cost, plan, method, refusals, shards)


def _choose_named(
    kind: OperationKind,
    request: Request,
    target: Target,
    names: Names,
    candidates: tuple[Candidate, ...],
    entries: Sequence[Entry],
) -> Decision:
    by_class = {candidate.entry.operation: candidate for candidate in candidates}
    tried = []
    for name in names[1:]:  # a name that nobody has is no fallback
        with contextlib.suppress(ContestedNameError, UnsupportedError):
            find_entry(name, target, kind.name, entries)
    for name in names:
        candidate = by_class[find_entry(name, target, kind.name, entries).operation]
        if not candidate.refusals:
            how = "named" if len(names) == 1 else "listed"
            return Decision(request, target, candidate, candidates, how)
        tried.append(candidate)
    plain = [c.entry.name for c in candidates]
    usable = [
        c.entry.name if plain.count(c.entry.name) == 1 else c.entry.qualified
        for c in candidates
        if not c.refusals
    ]
    texts = [
        refused_text(c.entry.name, c.refusals, usable) + _of_one_device(request, c)
        for c in tried
    ]
    refusals = {c.entry.qualified: c.refusals for c in tried}
    raise UnsupportedError("\n".join(texts), refusals)


def refused_text(where: str, refusals: Sequence[Refusal], usable: Sequence[str]) -> str:
    """Returns one operation's refusals as the text of an error.

    Args:
        where: The operation.
        refusals: At least one.
        usable: Names of operations that honour the call.
    """
    first = refusals[0]
    text = f"{where}: expected {first.field} {first.allowed}, got "
    text += f"{first.field}={first.actual}; {first.hint or 'choose another operation'}"
    for other in refusals[1:]:
        text += f"\n  and {other}"
    if usable:
        text += f"\n  this call is honoured here by: {', '.join(usable)}"
    return text


def _choose_auto(
    request: Request, target: Target, candidates: tuple[Candidate, ...]
) -> Decision:
    open_to_auto = [
        c
        for c in candidates
        if not c.entry.operation.capabilities.is_experimental(target.platform)
    ]
    fitting = sorted((c for c in open_to_auto if not c.refusals), key=_rank)
    if not fitting:
        raise UnsupportedError(
            _nothing_fits(request, target, candidates),
            {c.entry.qualified: c.refusals for c in candidates},
        )
    chosen = _preferred(request, target, fitting)
    better = tuple(
        c
        for c in open_to_auto
        if c.refusals
        and c.entry.operation.capabilities.cost < chosen.cost
        and not any(r.code in ("platform", "unavailable") for r in c.refusals)
    )
    return Decision(request, target, chosen, candidates, "auto", better)


def _rank(candidate: Candidate) -> tuple[int, int, str, str]:
    entry = candidate.entry
    priority = entry.operation.capabilities.priority
    return candidate.cost, -priority, entry.name, entry.qualified


def _preferred(
    request: Request, target: Target, fitting: Sequence[Candidate]
) -> Candidate:
    """The first in rank, unless a plugin prefers another of the same cost class."""
    best = [c for c in fitting if c.cost == fitting[0].cost]
    names = [c.entry.qualified for c in best]
    order = first_result(
        "switchax_rank", request=request, candidates=names, target=target
    )
    if order is not None and not _are_names(order):
        text = f"switchax_rank: expected a list of names or None, got {brief(order)}; "
        warn_caller(f"{text}it is passed over")
        return best[0]
    for name in order or ():
        for candidate in best:
            if name in (candidate.entry.qualified, candidate.entry.name):
                return candidate
    return best[0]


def _are_names(order: Any) -> bool:
    is_list = isinstance(order, Sequence) and not isinstance(order, str | bytes)
    return is_list and all(isinstance(name, str) for name in order)


def _nothing_fits(
    request: Request, target: Target, candidates: Sequence[Candidate]
) -> str:
    note = unloaded_note(ensure_loaded())
    got = f"{request.kind} on {target}"
    if not candidates:
        todo = "install a plugin that brings one"
        if request.kind == "attention":
            todo = HOW_TO_INSTALL
        if note:
            todo = "see below, or `switchax doctor`"
        return (
            f"auto: expected an installed operation, got none for {got}; {todo}{note}"
        )
    text = f"auto: expected an operation that honours the call, got none for {got}; "
    text += f"name one to see its reasons alone\n  {request.describe()}"
    for candidate in candidates:
        reasons = "; ".join(map(str, candidate.refusals)) or "experimental: name it"
        text += f"\n  {candidate.entry.qualified}: {reasons}"
        text += _of_one_device(request, candidate)
    return text + note


def _of_one_device(request: Request, candidate: Candidate) -> str:
    """Says which call was refused, if that is the part of one device of a mesh."""
    shards = candidate.shards
    if shards is None or shards.request == request:
        return ""
    return f"\n  on each device of the mesh: {shards.request.describe()}"


_said: set[str] = set()


def check_degraded(decision: Decision, strict: bool) -> str:
    """Returns what to say where better cost classes refused, else "".

    Raises:
        DegradedChoiceError: If they did and strict is set.
    """
    if not decision.degraded:
        return ""
    chosen = decision.chosen
    reasons = "; ".join(
        f"{c.entry.qualified} ({c.cost}) refused {', '.join(map(str, c.refusals))}"
        for c in decision.degraded
    )
    text = (
        f"auto: took {chosen.entry.qualified}, cost class {chosen.cost}, for "
        f"{decision.request.describe()}; {reasons}"
    )
    if strict:
        refusals = {c.entry.qualified: c.refusals for c in decision.degraded}
        raise DegradedChoiceError(f"{text}; strict is set", refusals)
    return text
