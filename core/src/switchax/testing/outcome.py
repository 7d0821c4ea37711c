"""What is known of an operation when some of a suite's cases were run."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple, TypeVar

from .report import Failure, Result

__all__ = ["Met", "Outcome", "Refused"]


class Met(NamedTuple):
    """The first failure of a rule.

    Attributes:
        number: Of the case that failed, among those of its suite.
        failure: The failure, made small.
    """

    number: int
    failure: Failure


class Refused(NamedTuple):
    """The first case that was refused of those that use one declared thing.

    Attributes:
        number: Of the case, among those of its suite.
        text: What the operation said.
        snippet: Python that shows it.
    """

    number: int
    text: str
    snippet: str


@dataclasses.dataclass
class Outcome:
    """What was found in some cases; of several parts of a suite it is merged.

    Attributes:
        results: By rule and dtype.
        met: The first failure by rule.
        refused: By what is declared.
        honoured: What is declared and was honoured in one case.
        complete: Whether all of the cases were run.
    """

    results: dict[tuple[str, str], Result] = dataclasses.field(default_factory=dict)
    met: dict[str, Met] = dataclasses.field(default_factory=dict)
    refused: dict[str, Refused] = dataclasses.field(default_factory=dict)
    honoured: set[str] = dataclasses.field(default_factory=set)
    complete: bool = True

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The first of each rule, in the order of the cases."""
        return tuple(one.failure for one in sorted(self.met.values(), key=_number))

    def add(self, result: Result) -> None:
        """Adds cases to those of their rule and dtype."""
        key = result.rule, result.dtype
        before = self.results.get(key, Result(*key))
        worse = result if result.error > before.error else before
        self.results[key] = Result(
            *key,
            passed=before.passed + result.passed,
            failed=before.failed + result.failed,
            refused=before.refused + result.refused,
            error=worse.error,
            quantity=worse.quantity,
        )

    def merge(self, other: Outcome) -> None:
        """Takes over what was found in further cases of the suite."""
        for result in other.results.values():
            self.add(result)
        _keep_first(self.met, other.met)
        _keep_first(self.refused, other.refused)
        self.honoured |= other.honoured
        self.complete &= other.complete

    def untested_rules(self) -> dict[str, str]:
        """The rules of which every case was refused, and why they are not tested."""
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


_Numbered = TypeVar("_Numbered", Met, Refused)


def _keep_first(ours: dict[str, _Numbered], others: dict[str, _Numbered]) -> None:
    for name, found in others.items():
        ours[name] = min(ours.get(name, found), found, key=_number)


def _number(found: Any) -> int:
    return found.number  # type: ignore[no-any-return]
