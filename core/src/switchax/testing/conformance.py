"""Holds an operation against its kind's suite, in this process or in several."""

from __future__ import annotations

import platform as python_platform
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jaxlib.version

from switchax import registrations
from switchax._version import __version__
from switchax.checks import brief, fail_type, fail_value
from switchax.declaration import check_init, check_once
from switchax.operation import BaseOperation
from switchax.registry import find_entry
from switchax.target import Target, current_target

from .jobs import Died, in_processes
from .outcome import Met, Outcome
from .report import Failure, Report
from .run import Run, is_less_optimised, refused_here, snippet_of
from .suite import LEVELS, Case

__all__ = ["cases_of", "conform"]

Progress = Callable[[int, int, Case], object]
Tell = Callable[[int], object]

MOST_SEED = 2**30
"""Of which every number that is drawn from it is one of JAX's too."""
_QUICKLY = "on a CPU a quick run compiles without most of XLA's optimisations"


def conform(
    operation: str | type[BaseOperation],
    *,
    level: str = "quick",
    target: str | Target | None = None,
    seed: int = 0,
    max_failures: int | None = None,
    progress: Progress | None = None,
    jobs: int = 1,
) -> Report:
    """Holds an operation against its kind's rules, on the present device.

    What it declares must be right, what it does not declare must be refused. Nothing
    global is changed: an operation that changes settings of JAX, the environment or
    numpy's generator fails, and they are set back.

    Args:
        operation: A name, or a class, which need not be registered.
        level: "quick" (minutes; on a CPU without most of XLA's optimisations) or
            "full" (half an hour).
        target: A device such as "tpu:v5e". If it is not here, calls are compiled for
            it as far as that goes without it, and the report says so.
        seed: Of everything that is drawn; equal seeds ask equal cases.
        max_failures: Stop after as many rules have failed; None is all of them. With
            several jobs each of them stops so.
        progress: Called before each case with how many were begun, how many there
            are, and it.
        jobs: How many fresh processes divide the cases among them; 1 is this one
            alone. A process that dies is a failure of the case that it was at. What
            was registered or set in this one alone is not known there; a script needs
            a file and `if __name__ == "__main__":`, as for `multiprocessing`. Of an
            operation with several mistakes, more of them may be shown.

    Returns:
        The report; `report.passed` says whether it conforms, `print(report)` why not.

    Raises:
        TypeError: If operation is neither.
        ValueError: For an unknown name, level or target, a seed beyond 2**30, a number
            of failures below 1, a kind without a suite, or jobs for what no installed
            plugin brings.
        RuntimeError: If one of several processes ends before its first case.
        RegistrationError: If the class contradicts itself; see `register`.

    Example:
        >>> report = conform("vanilla")
        >>> assert report.passed, report
    """
    cls, there, cases = _asked(operation, target, level, seed, max_failures)
    suite, elsewhere = cls.kind.suite, _elsewhere(there)
    started = time.monotonic()
    begun = iter(range(len(cases)))

    def tell(number: int) -> None:
        if progress is not None:
            progress(next(begun), len(cases), cases[number])

    if _checked_jobs(jobs) == 1:
        run = Run(cls, level, max_failures, elsewhere)
        run.all(list(enumerate(cases)), tell)
        outcome = run.outcome
    else:
        asked = max_failures, _installed_name(cls), there, level, seed
        outcome = _side_by_side(cls, cases, tell, jobs, *asked)
    always, refused = refused_here(cls, outcome)
    if always is not None:
        outcome.met.setdefault(always.rule, Met(len(cases), always))
    not_tested = {**suite.not_tested(cls, there.platform), **refused}
    not_tested |= outcome.untested_rules()
    if elsewhere is not None:
        not_tested["values"] = f"no {there} is here: calls were compiled for it only"
    elif is_less_optimised(level):
        not_tested["optimised programs"] = _QUICKLY
    results = outcome.results
    return Report(
        operation=cls.names()[0],
        kind=cls.kind.name,
        plugin=_owner(cls),
        level=level,
        seed=seed,
        rules=dict(suite.rules),
        complete=outcome.complete,
        versions=_versions(cls),
        device=f"{there} x {jax.device_count()}" if elsewhere is None else str(there),
        computed=elsewhere is None,
        seconds=round(time.monotonic() - started, 1),
        results=tuple(results[key] for key in sorted(results, key=_order)),
        failures=outcome.failures,
        not_tested=not_tested,
    )


class _Part(NamedTuple):
    """How far a process is: the number of its case, and what it found before."""

    number: int
    outcome: Outcome


def _of_one(
    number: int,
    tell: Callable[[_Part], object],
    jobs: int,
    max_failures: int | None,
    name: str,
    there: Target,
    level: str,
    seed: int,
) -> _Part:
    """Runs the cases that fall to one of several processes, in it."""
    cls, there, cases = _asked(name, there, level, seed)
    run = Run(cls, level, max_failures, _elsewhere(there))
    part = list(enumerate(cases))[number::jobs]
    run.all(part, lambda at: tell(_Part(at, run.outcome)))
    return _Part(len(cases), run.outcome)


def _side_by_side(
    cls: type[BaseOperation], cases: list[Case], tell: Tell, jobs: int, *asked: Any
) -> Outcome:
    """Runs all cases, divided among processes; one that dies is a failure."""
    outcome = Outcome()
    jobs = min(jobs, len(cases)) or 1
    try:
        arguments = jobs, *asked
        parts = in_processes(_of_one, arguments, jobs, lambda part: tell(part.number))
    except Died as error:
        if error.number not in error.last:
            raise
        parts = list(error.last.values())
        case = cases[error.last[error.number].number]
        text = f"{error}, which stopped the run"
        snippet = snippet_of(cls, case)
        failure = Failure(case.rule, case.title, case.title, "raised", text, snippet)
        outcome.met[f"end by {case.rule}"] = Met(-1, failure)
        outcome.complete = False
    for part in parts:
        outcome.merge(part.outcome)
    return outcome


def _checked_jobs(jobs: int) -> int:
    if type(jobs) is not int or jobs < 1:
        raise fail_value("conform", "jobs from 1 on", f"jobs={jobs!r}", "pass an int")
    return jobs


def _installed_name(cls: type[BaseOperation]) -> str:
    """Returns the name by which a fresh process finds an operation."""
    for entry in registrations.entries():
        if entry.operation is cls and entry.distribution:
            return entry.qualified
    rule = "an operation of an installed plugin, for several jobs"
    got = f"operation={brief(cls)}"
    raise fail_value("conform", rule, got, "leave jobs out, or install its plugin")


def _asked(
    operation: str | type[BaseOperation],
    target: str | Target | None,
    level: str,
    seed: int,
    max_failures: int | None = None,
) -> tuple[type[BaseOperation], Target, list[Case]]:
    """Checks what `conform` was asked; returns the class, the target and the cases."""
    if max_failures is not None and (type(max_failures) is not int or max_failures < 1):
        got, todo = f"max_failures={max_failures!r}", "None is all of them"
        raise fail_value("conform", "max_failures from 1 on, or None", got, todo)
    if level not in LEVELS:
        got = f"level={level!r}"
        raise fail_value("conform", f"a level of {', '.join(LEVELS)}", got, "pass one")
    if type(seed) is not int or not 0 <= seed <= MOST_SEED:
        got = f"seed={seed!r}"
        rule = f"a seed from 0 to {MOST_SEED}"
        raise fail_value("conform", rule, got, "pass an int")
    cls = _class_of(operation)
    check_once(cls)
    check_init(cls)
    there = current_target() if target is None else Target.parse(target)
    platforms = cls.capabilities.platforms
    if there.platform not in platforms:
        rule = f"a target of {', '.join(sorted(platforms))}, which it declares"
        raise fail_value("conform", rule, str(there), "pass one as (--)target")
    return cls, there, list(cls.kind.suite.cases(cls, there.platform, level, seed))


def _elsewhere(there: Target) -> Target | None:
    """Returns the device if it is not here, so that calls can be compiled only."""
    here = current_target()
    generations = {there.generation, here.generation}
    is_here = there.platform == here.platform and (
        "" in generations or len(generations) == 1
    )
    return None if is_here else there


def _class_of(operation: str | type[BaseOperation]) -> type[BaseOperation]:
    if isinstance(operation, str):
        return find_entry(operation, current_target()).operation
    if isinstance(operation, type) and issubclass(operation, BaseOperation):
        return operation
    got = f"operation={brief(operation)}"
    raise fail_type("conform", "a name or an operation class", got, "pass one")


def _owner(cls: type[BaseOperation]) -> str:
    owners = [e.plugin for e in registrations.entries() if e.operation is cls]
    return owners[0] if owners else cls.__module__.partition(".")[0]


def _versions(cls: type[BaseOperation]) -> dict[str, str]:
    versions = {
        "switchax": __version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.version.__version__,
        "python": python_platform.python_version(),
    }
    for entry in registrations.entries():
        if entry.operation is cls and entry.distribution:
            versions[entry.distribution] = entry.version
    return versions


def _order(key: tuple[str, str]) -> tuple[int, str, str]:
    rule, dtype = key
    digits = "".join(filter(str.isdigit, rule))
    return int(digits or 0), rule, dtype


def cases_of(
    operation: str, level: str = "quick", seed: int = 0
) -> tuple[type[BaseOperation], list[Case]]:
    """Returns an operation and the cases that `conform` would run here."""
    cls, _, cases = _asked(operation, None, level, seed)
    return cls, cases
