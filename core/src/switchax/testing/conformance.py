"""Runs a kind's suite over an operation, and makes failures small."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import platform as python_platform
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jaxlib.version

from switchax import registrations
from switchax._version import __version__
from switchax.checks import brief, fail_type, fail_value
from switchax.declaration import check_init, check_once
from switchax.errors import UnsupportedError, described, first_line
from switchax.loading import ensure_loaded
from switchax.operation import BaseOperation
from switchax.registry import find_entry
from switchax.settings import use
from switchax.target import Target, current_target

from .globals import Globals
from .report import Failure, Report, Result
from .running import RefusedLate, watched
from .suite import LEVELS, Case, Finding

__all__ = ["Run", "cases_of", "conform"]

_INFINITE = 1e300
_KEPT = 150  # cases whose programs are kept
_TRIES = 24  # each compiles a call or two
_NO_SIZE = "no size was found that it takes: `limits` and `multiples` of Capabilities "
_NO_SIZE += "tell the kit which to ask"

Progress = Callable[[int, int, Case], None]


def conform(
    operation: str | type[BaseOperation],
    *,
    level: str = "quick",
    target: str | Target | None = None,
    seed: int = 0,
    max_failures: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Holds an operation against its kind's rules, on the present device.

    What it declares must be right, what it does not declare must be refused. Nothing
    global is changed: an operation that changes settings of JAX, the environment or
    numpy's generator fails, and they are set back.

    Args:
        operation: A name, or a class, which need not be registered.
        level: "quick" (minutes) or "full" (half an hour).
        target: A device such as "tpu:v5e". If it is not here, calls are compiled for
            it as far as that goes without it, and the report says so.
        seed: Of everything that is drawn; equal seeds ask equal cases.
        max_failures: Stop after as many rules have failed; None is all of them.
        progress: Called before each case with its number, how many there are, and it.

    Returns:
        The report; `report.passed` says whether it conforms, `print(report)` why not.

    Raises:
        TypeError: If operation is neither.
        ValueError: For an unknown name, level or target, a negative seed, or a kind
            without a suite.
        RegistrationError: If the class contradicts itself; see `register`.

    Example:
        >>> report = conform("vanilla")
        >>> assert report.passed, report
    """
    cls, there, cases = _asked(operation, target, level, seed)
    here, suite = current_target(), cls.kind.suite
    elsewhere = there if not _is_same(there, here) else None
    started = time.monotonic()
    run = Run(cls, max_failures, elsewhere)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_as_it_is_asked())
        complete = run.all(cases, progress)
    refused = run.refused_here()
    not_tested = {**suite.not_tested(cls, there.platform), **refused}
    not_tested |= run.untested_rules()
    if elsewhere is not None:
        not_tested["values"] = f"no {there} is here: calls were compiled for it only"
    return Report(
        operation=cls.names()[0],
        kind=cls.kind.name,
        plugin=_owner(cls),
        level=level,
        seed=seed,
        rules=dict(suite.rules),
        complete=complete,
        versions=_versions(cls),
        device=f"{there} x {jax.device_count()}" if elsewhere is None else str(there),
        computed=elsewhere is None,
        seconds=round(time.monotonic() - started, 1),
        results=tuple(run.results[key] for key in sorted(run.results, key=_order)),
        failures=tuple(run.failures.values()),
        not_tested=not_tested,
    )


def _asked(
    operation: str | type[BaseOperation],
    target: str | Target | None,
    level: str,
    seed: int,
) -> tuple[type[BaseOperation], Target, list[Case]]:
    """Checks what `conform` was asked; returns the class, the target and the cases."""
    if level not in LEVELS:
        got = f"level={level!r}"
        raise fail_value("conform", f"a level of {', '.join(LEVELS)}", got, "pass one")
    if type(seed) is not int or seed < 0:
        got = f"seed={seed!r}"
        raise fail_value("conform", "a seed from 0 on", got, "pass an int")
    cls = _class_of(operation)
    check_once(cls)
    check_init(cls)
    there = current_target() if target is None else Target.parse(target)
    platforms = cls.capabilities.platforms
    if there.platform not in platforms:
        rule = f"a target of {', '.join(sorted(platforms))}, which it declares"
        raise fail_value("conform", rule, str(there), "pass one of them as target")
    return cls, there, list(cls.kind.suite.cases(cls, there.platform, level, seed))


@contextlib.contextmanager
def _as_it_is_asked() -> Iterator[None]:
    """What the cases are run under, whatever the settings: see `force_native`."""
    with jax.default_matmul_precision("highest"), use(force_native=False):
        yield


def _is_same(one: Target, other: Target) -> bool:
    generations = {one.generation, other.generation}
    return one.platform == other.platform and (
        "" in generations or len(generations) == 1
    )


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


def _changes_of(cls: type[BaseOperation]) -> tuple[str, ...]:
    """Which settings of JAX its plugin changed when it was imported."""
    records = ensure_loaded()
    for entry in registrations.entries():
        record = records.get(f"{entry.distribution}:{entry.plugin}")
        if entry.operation is cls and record is not None:
            return record.changes
    return ()


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


class Run:
    """What is known of one operation while its cases are run."""

    def __init__(
        self,
        cls: type[BaseOperation],
        max_failures: int | None = None,
        elsewhere: Target | None = None,
    ) -> None:
        self.cls = cls
        self.operation = watched(cls)()
        self.max_failures = max_failures
        self.elsewhere = elsewhere
        self.results: dict[tuple[str, str], Result] = {}
        self.failures: dict[str, Failure] = {}
        self._refused: dict[str, tuple[str, Case]] = {}
        self._honoured: set[str] = set()
        self._changed: list[str] = []  # of what is global, by the case that is run

    def all(self, cases: list[Case], progress: Progress | None) -> bool:
        """Runs all; returns whether it came to the end."""
        self._changed = [f"{c}, when it is imported" for c in _changes_of(self.cls)]
        if self._changed and cases:
            self.failures["globals"] = self._of_changes(cases[0])
        for number, case in enumerate(cases):
            if len(self.failures) == self.max_failures:
                return False
            if progress is not None:
                progress(number, len(cases), case)
            self._one(case)
            # Each program has pages of its own, of which a process may have only so
            # many.
            if number % _KEPT == _KEPT - 1:
                jax.clear_caches()  # type: ignore[no-untyped-call]
        return True

    def try_case(self, case: Case) -> tuple[Failure | None, str]:
        """Runs one case.

        Returns:
            Its failure, made as small as it could be, or None; and what the operation
            said if it refused what it declares.
        """
        with _as_it_is_asked():
            kind, finding = self._try(case)
            rule = (finding.rule if kind else "") or case.rule
            if kind not in ("", "refused"):
                return self._smallest(case, kind, rule, finding), ""
            if self._changed:
                return self._of_changes(case), ""
            return None, finding.text

    def _one(self, case: Case) -> None:
        kind, finding = self._try(case)
        if self._changed:
            self.failures.setdefault("globals", self._of_changes(case))
        rule = (finding.rule if kind else "") or case.rule
        counts = {"": "passed", "refused": "refused"}
        count = counts.get(kind, "failed")
        if count == "failed" and rule not in self.failures:
            failure = self._smallest(case, kind, rule, finding)
            rule = failure.rule
            self.failures.setdefault(rule, failure)
        result = self.results.setdefault((rule, case.dtype), Result(rule, case.dtype))
        changes: dict[str, Any] = {count: getattr(result, count) + 1}
        # JSON has no other, and NaN is no less.
        error = finding.error if finding.error <= _INFINITE else _INFINITE
        if error > result.error:
            changes |= {"error": error, "quantity": finding.quantity}
        self.results[rule, case.dtype] = dataclasses.replace(result, **changes)
        self._note(case, kind, finding)

    def _used(self, case: Case) -> set[str]:
        declared = self.cls.capabilities.features
        return {*(case.claims & declared), f"dtype {case.dtype}"}

    def _note(self, case: Case, kind: str, finding: Finding) -> None:
        used = self._used(case)
        if kind == "refused":
            for name in sorted(used - self._honoured):
                self._refused.setdefault(name, (finding.text, case))
        elif case.computes:
            self._honoured |= used

    def check_declaration(self, cases: list[Case]) -> list[Failure]:
        """Runs cases until each declared thing was honoured once.

        Returns:
            What is declared and always refused; see `refused_here`.
        """
        with _as_it_is_asked():
            for case in cases:
                if case.computes and self._used(case) - self._honoured:
                    self._note(case, *self._try(case))
        self.refused_here()
        return list(self.failures.values())

    def _try(
        self, case: Case, operation: BaseOperation | None = None
    ) -> tuple[str, Finding]:
        """Returns "" or the kind of failure, and what was found."""
        before = Globals()
        try:
            return self._found(case, operation or self.operation)
        finally:
            self._changed = before.restored()

    def _found(self, case: Case, operation: BaseOperation) -> tuple[str, Finding]:
        try:
            if self.elsewhere is not None:
                finding = case.lower(operation, self.elsewhere)
            else:
                finding = case.run(operation)
        except UnsupportedError as error:
            reasons = itertools.chain.from_iterable(error.refusals.values())
            if any(reason.code == "fault" for reason in reasons):
                rule = self.cls.kind.suite.declaration
                return "raised", Finding(text=first_line(error), rule=rule)
            return "refused", Finding(text=first_line(error))
        except RefusedLate as error:
            rule = self.cls.kind.suite.declaration
            return "wrong", Finding(text=str(error), rule=rule, quantity="refusal")
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return "raised", Finding(text=described(error)[:600])
        if finding.text:
            return "accepted" if finding.accepted else "wrong", finding
        if not finding.error <= 1:
            return "wrong", dataclasses.replace(finding, text=finding.distance)
        return "", finding

    def _smallest(self, case: Case, kind: str, rule: str, finding: Finding) -> Failure:
        first, tries = case, 0
        while True:
            for simpler in case.simpler():
                tries += 1
                found_kind, found = self._try(simpler)
                found_rule = found.rule or simpler.rule
                if found_kind == kind and (first.may_change_rule or found_rule == rule):
                    case, finding, rule = simpler, found, found_rule
                    break
                if tries >= _TRIES:
                    break
            else:
                break
            if tries >= _TRIES:
                break
        text = finding.text
        if self._try(case, watched(self.cls)())[0] in ("", "refused"):
            text += "; passes by itself: it depends on the calls before it"
        snippet = self._snippet(case)
        return Failure(rule, first.title, case.title, kind, text, snippet)

    def _of_changes(self, case: Case) -> Failure:
        """The failure of a case that left something global changed."""
        text = f"changes what is global: {', '.join(self._changed)}"
        rule, snippet = self.cls.kind.suite.declaration, self._snippet(case)
        return Failure(rule, case.title, case.title, "wrong", text, snippet)

    def _snippet(self, case: Case) -> str:
        name = self.cls.names()[0]
        entry = next(
            (e for e in registrations.entries() if e.operation is self.cls), None
        )
        if entry is None:
            return _of_class(case.snippet(name), name, self.cls)
        return case.snippet(_name_of(entry))

    def untested_rules(self) -> dict[str, str]:
        """The rules of which every case was refused."""
        counts: dict[str, list[int]] = {}
        for (rule, _), result in self.results.items():
            count = counts.setdefault(rule, [0, 0])
            count[0] += result.passed + result.failed
            count[1] += result.refused
        return {
            f"rule {rule}": f"all of its cases ({refused}) were refused"
            for rule, (asked, refused) in counts.items()
            if refused and not asked
        }

    def refused_here(self) -> dict[str, str]:
        """What was declared and refused in every case.

        It is a failure of the declaration, but for a dtype that others of its
        platforms may have; though one dtype must be honoured.
        """
        always = {n: t for n, t in self._refused.items() if n not in self._honoured}
        elsewhere = len(self.cls.capabilities.platforms) > 1
        names = [
            name
            for name in sorted(always, key=lambda n: (n.startswith("dtype "), n))
            if not (name.startswith("dtype ") and elsewhere and self._honoured)
        ]
        texts = {name: text for name, (text, _) in always.items()}
        if names:
            rule = self.cls.kind.suite.declaration
            said = [f"declares {n} and refuses it: {texts[n]}" for n in names]
            said += [] if self._honoured else [_NO_SIZE]
            failure = Failure(
                rule,
                f"declared: {', '.join(names)}",
                "every case that uses it",
                "refused",
                "; ".join(said),
                self._snippet(always[names[0]][1]),
            )
            self.failures.setdefault(rule, failure)
        return texts


def _name_of(entry: registrations.Entry) -> str:
    """The name of an operation; a qualified one where another answers to the short."""
    try:
        found = find_entry(entry.name, current_target())
    except (ValueError, UnsupportedError):  # contested, or not for this device
        return entry.qualified
    is_it = found.operation is entry.operation
    return entry.name if is_it else entry.qualified


def _of_class(snippet: str, name: str, cls: type[BaseOperation]) -> str:
    """Makes a snippet speak of a class where its name is not registered."""
    if "<locals>" in cls.__qualname__:  # nothing can import it
        return snippet
    imported = f"from {cls.__module__} import {cls.__qualname__.partition('.')[0]}"
    snippet = snippet.replace("from switchax import OperationRegistry", imported)
    created = f"OperationRegistry.create({name!r})"
    return snippet.replace(created, f"{cls.__qualname__}()")


def cases_of(
    operation: str, level: str = "quick", seed: int = 0
) -> tuple[type[BaseOperation], list[Case]]:
    """Returns an operation and the cases that `conform` would run here."""
    cls, _, cases = _asked(operation, None, level, seed)
    return cls, cases
