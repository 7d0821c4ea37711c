"""Runs a suite's cases over one operation, and makes failures small."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import jax

from switchax import registrations
from switchax.errors import UnsupportedError, first_line
from switchax.loading import ensure_loaded
from switchax.operation import BaseOperation
from switchax.registry import find_entry
from switchax.settings import use
from switchax.target import Target, current_target

from .globals import Globals
from .outcome import Met, Outcome, Refused
from .report import Failure, Result
from .running import RefusedLate, compiled_quickly, devices, shortened, watched
from .suite import Case, Finding

__all__ = ["Run", "is_less_optimised", "refused_here", "snippet_of", "with_changes"]

_INFINITE = 1e300
_KEPT = 150  # cases whose programs are kept
_LOG = logging.getLogger("switchax.testing")
_LONG = 60  # seconds after which a case is named: it may never end
_TRIES = 24  # each compiles a call or two
_NO_SIZE = "no size was found that it takes: `limits` and `multiples` of Capabilities "
_NO_SIZE += "tell the kit which to ask"


class Run:
    """What is known of one operation while its cases are run."""

    def __init__(
        self,
        cls: type[BaseOperation],
        level: str = "quick",
        max_failures: int | None = None,
        elsewhere: Target | None = None,
    ) -> None:
        self.cls = cls
        self.level = level
        self.operation = watched(cls)()
        self.max_failures = max_failures
        self.elsewhere = elsewhere
        self.outcome = Outcome()
        self._changed: list[str] = []  # of what is global, by the case that is run

    def all(
        self,
        cases: Sequence[tuple[int, Case]],
        tell: Callable[[int], object] | None = None,
    ) -> None:
        """Runs cases, until as many rules have failed as may.

        Args:
            cases: With their numbers.
            tell: Called with the number of each case before it is run.
        """
        changes = self._of_import()
        if changes is not None and cases:
            self._met(cases[0][0], changes, "globals")
        with self._as_it_is_asked():
            for count, (number, case) in enumerate(cases, 1):
                if len(self.outcome.met) == self.max_failures:
                    self.outcome.complete = False
                    return
                if tell is not None:
                    tell(number)
                with _named_if_long(self.cls, case):
                    self._one(number, case)
                # Each program has pages of its own, of which a process may have only
                # so many.
                if count % _KEPT == 0:
                    jax.clear_caches()  # type: ignore[no-untyped-call]

    @contextmanager
    def _as_it_is_asked(self) -> Iterator[None]:
        """What cases are run under, whatever the settings: see `force_native`."""
        quickly: AbstractContextManager[None] = nullcontext()
        if self.elsewhere is None and is_less_optimised(self.level):
            quickly = compiled_quickly()
        precise = jax.default_matmul_precision("highest")
        with precise, use(force_native=False), quickly:
            yield

    def try_case(self, case: Case) -> tuple[Failure | None, str]:
        """Runs one case.

        Returns:
            Its failure, made as small as it could be, or None; and what the operation
            said if it refused what it declares.
        """
        with self._as_it_is_asked():
            kind, finding = self._try(case)
            rule = (finding.rule if kind else "") or case.rule
            if kind not in ("", "refused"):
                return self._smallest(case, kind, rule, finding), ""
            if self._changed:
                return self._of_changes(case), ""
            return None, finding.text

    def _one(self, number: int, case: Case) -> None:
        kind, finding = self._try(case)
        if self._changed:
            self._met(number, self._of_changes(case), "globals")
        rule = (finding.rule if kind else "") or case.rule
        counts = {"": "passed", "refused": "refused"}
        count = counts.get(kind, "failed")
        if count == "failed" and rule not in self.outcome.met:
            self._met(number, self._smallest(case, kind, rule, finding))
        # JSON has no other, and NaN is no less.
        error = finding.error if finding.error <= _INFINITE else _INFINITE
        one: dict[str, Any] = {count: 1}
        result = Result(rule, case.dtype, error=error, quantity=finding.quantity, **one)
        self.outcome.add(result)
        self._note(number, case, kind, finding)

    def _met(self, number: int, failure: Failure, of: str = "") -> None:
        self.outcome.met.setdefault(of or failure.rule, Met(number, failure))

    def _used(self, case: Case) -> set[str]:
        declared = self.cls.capabilities.features
        return {*(case.claims & declared), f"dtype {case.dtype}"}

    def _note(self, number: int, case: Case, kind: str, finding: Finding) -> None:
        used = self._used(case)
        if kind == "refused":
            new = used - self.outcome.honoured - set(self.outcome.refused)
            if new:
                refused = Refused(number, finding.text, snippet_of(self.cls, case))
                self.outcome.refused |= dict.fromkeys(new, refused)
        elif case.computes:
            self.outcome.honoured |= used

    def check_declaration(self, cases: Iterable[Case]) -> tuple[Failure, ...]:
        """Runs cases until each declared thing was honoured once.

        Returns:
            What is declared and always refused, see `refused_here`; and what its
            plugin's import changed.
        """
        with self._as_it_is_asked():
            for number, case in enumerate(cases):
                if case.computes and self._used(case) - self.outcome.honoured:
                    self._note(number, case, *self._try(case))
        failure, _ = refused_here(self.cls, self.outcome)
        return tuple(f for f in (self._of_import(), failure) if f is not None)

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
            where = _where(error, self.cls)
            return "raised", Finding(text=f"{shortened(error)}{where}")
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
        snippet = snippet_of(self.cls, case)
        return Failure(rule, first.title, case.title, kind, text, snippet)

    def _of_import(self) -> Failure | None:
        """The failure of a plugin whose import changed settings of JAX."""
        changes = _changes_of(self.cls)
        if not changes:
            return None
        text = f"changes what is global: {', '.join(changes)}, when it is imported"
        rule, title = self.cls.kind.suite.declaration, "the import of its plugin"
        return Failure(rule, title, title, "wrong", text, _of_import(self.cls))

    def _of_changes(self, case: Case) -> Failure:
        """The failure of a case that left something global changed."""
        text = f"changes what is global: {', '.join(self._changed)}"
        rule = self.cls.kind.suite.declaration
        snippet = with_changes(snippet_of(self.cls, case))
        return Failure(rule, case.title, case.title, "wrong", text, snippet)


def _where(error: BaseException, cls: type[BaseOperation]) -> str:
    """Returns where in the operation's own package an error arose, or ""."""
    package = cls.__module__.partition(".")[0]
    frames = [
        frame
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] == package
    ]
    if not frames:
        return ""
    numbers = [n for f, n in traceback.walk_tb(error.__traceback__) if f is frames[-1]]
    name = Path(frames[-1].f_code.co_filename).name
    return f" (at {name}, line {numbers[-1]})"


def is_less_optimised(level: str) -> bool:
    """Whether cases of a level are compiled here without most optimisations."""
    return level == "quick" and jax.default_backend() == "cpu"


def refused_here(
    cls: type[BaseOperation], outcome: Outcome
) -> tuple[Failure | None, dict[str, str]]:
    """Tells what was declared and refused in every case.

    It is a failure of the declaration, but for a dtype that others of its platforms
    may have; though one dtype must be honoured.

    Returns:
        The failure, if it is one; and what the operation said, by what it declares.
    """
    honoured = outcome.honoured
    always = {n: r for n, r in outcome.refused.items() if n not in honoured}
    elsewhere = len(cls.capabilities.platforms) > 1
    names = [
        name
        for name in sorted(always, key=lambda n: (n.startswith("dtype "), n))
        if not (name.startswith("dtype ") and elsewhere and honoured)
    ]
    texts = {name: refused.text for name, refused in always.items()}
    if not names:
        return None, texts
    said = [f"declares {n} and refuses it: {texts[n]}" for n in names]
    said += [] if honoured else [_NO_SIZE]
    failure = Failure(
        cls.kind.suite.declaration,
        f"declared: {', '.join(names)}",
        "every case that uses it",
        "refused",
        "; ".join(said),
        always[names[0]].snippet,
    )
    return failure, texts


def snippet_of(cls: type[BaseOperation], case: Case) -> str:
    """Returns Python that shows a case, by the name that the operation goes by."""
    name = cls.names()[0]
    entry = next((e for e in registrations.entries() if e.operation is cls), None)
    if entry is None:
        return _of_class(case.snippet(name), name, cls)
    return case.snippet(_name_of(entry))


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
        made = f"{cls.__qualname__.rpartition('.')[2]}()"
        made = snippet.replace(f"OperationRegistry.create({name!r})", made)
        return made.replace("from switchax import OperationRegistry\n", "")
    imported = f"from {cls.__module__} import {cls.__qualname__.partition('.')[0]}"
    snippet = snippet.replace("from switchax import OperationRegistry", imported)
    created = f"OperationRegistry.create({name!r})"
    return snippet.replace(created, f"{cls.__qualname__}()")


@contextmanager
def _named_if_long(cls: type[BaseOperation], case: Case) -> Iterator[None]:
    """Logs what a case is that takes long, so that one that never ends has a name."""
    name = cls.names()[0]

    def tell() -> None:
        _LOG.warning("%s: %s s at %s: %s", name, _LONG, case.rule, case.title)

    timer = threading.Timer(_LONG, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def with_changes(snippet: str) -> str:
    """Makes a snippet print what it changes of what is global."""
    first = "\n".join(devices())  # which is the snippet's own change
    rest = snippet.removeprefix(first)
    first = first if rest != snippet else ""
    before = "from switchax.testing.globals import Globals\n\nbefore = Globals()\n"
    return f"{first}{before}{rest}\nprint(before.restored())"


def _of_import(cls: type[BaseOperation]) -> str:
    """Python that shows what a plugin changes when it is imported."""
    entries = registrations.entries()
    entry = next(entry for entry in entries if entry.operation is cls)
    record = ensure_loaded()[f"{entry.distribution}:{entry.plugin}"]
    return with_changes(f"import {record.plugin.module}")


def _changes_of(cls: type[BaseOperation]) -> tuple[str, ...]:
    """Which settings of JAX its plugin changed when it was imported."""
    records = ensure_loaded()
    for entry in registrations.entries():
        record = records.get(f"{entry.distribution}:{entry.plugin}")
        if entry.operation is cls and record is not None:
            return record.changes
    return ()
