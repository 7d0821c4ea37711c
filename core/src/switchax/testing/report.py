"""The outcome of a conformance run: what a plugin ships and a user may require."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Self

from switchax.checks import fail_value
from switchax.errors import described, printable

from .suite import LEVELS

__all__ = ["Failure", "Report", "Result"]

_FORMAT = 1
_MOST = 2**62  # of a count or a seed


@dataclasses.dataclass(frozen=True)
class Failure:
    """One failing case, made as small as it could be.

    Attributes:
        rule: The rule that is broken.
        title: The case that failed first.
        smallest: The smallest call found that still fails, as text.
        kind: "wrong", "refused" (what it declares), "accepted" (what it does not) or
            "raised".
        text: What is wrong in the smallest.
        snippet: Python that shows it.
    """

    rule: str
    title: str
    smallest: str
    kind: str
    text: str
    snippet: str

    def __str__(self) -> str:
        code = "\n".join(f"    {line}" for line in self.snippet.splitlines())
        told = f"smallest: {self.smallest}\n  {self.text}"
        return f"{self.rule} {self.title}\n  {told}\n{code}"


@dataclasses.dataclass(frozen=True)
class Result:
    """Cases of one rule and dtype.

    Attributes:
        rule: The rule.
        dtype: Dtype of the operands.
        passed: How many cases passed.
        failed: How many failed.
        refused: How many the operation refused although it declares them; see
            `Report.not_tested`.
        error: The largest error, in units of what is allowed.
        quantity: What that error is of.
    """

    rule: str
    dtype: str
    passed: int = 0
    failed: int = 0
    refused: int = 0
    error: float = 0.0
    quantity: str = ""


@dataclasses.dataclass(frozen=True)
class Report:
    """The outcome of a conformance run.

    Attributes:
        operation: Canonical name.
        kind: Name of its kind.
        plugin: Who owns it.
        level: "quick" or "full".
        seed: Of everything that was drawn.
        rules: One line for each rule of the kind.
        computed: Whether values were computed; else calls were compiled only.
        complete: Whether every case of the level was run.
        versions: Of switchax, the plugin's distribution, JAX, jaxlib and Python.
        device: What it ran on, such as "cpu" or "tpu:v5e", and how many.
        seconds: How long it took.
        results: One for each rule and dtype, in order.
        failures: The first of each rule, in the order in which they were met.
        not_tested: What could not be tested here, and why.
    """

    operation: str
    kind: str
    plugin: str
    level: str
    seed: int
    rules: Mapping[str, str]
    computed: bool
    complete: bool
    versions: Mapping[str, str]
    device: str
    seconds: float
    results: tuple[Result, ...]
    failures: tuple[Failure, ...] = ()
    not_tested: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether every case was run, some passed, and none failed; see `computed`."""
        failed = any(result.failed for result in self.results)
        passed = any(result.passed for result in self.results)
        return self.complete and passed and not failed and not self.failures

    @property
    def cases(self) -> int:
        """How many cases were run."""
        return sum(r.passed + r.failed + r.refused for r in self.results)

    @property
    def not_asked(self) -> list[str]:
        """The rules of which every case was refused."""
        return [
            rule
            for rule, results in self.by_rule().items()
            if not any(result.passed + result.failed for result in results)
        ]

    def by_rule(self) -> dict[str, list[Result]]:
        """The results of each rule."""
        found = defaultdict(list)
        for result in self.results:
            found[result.rule].append(result)
        return dict(found)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as JSON data."""
        return {"switchax_conformance": _FORMAT, **dataclasses.asdict(self)}

    def to_json(self) -> str:
        """Returns the report as JSON text."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the report that `to_json` wrote; executes nothing.

        Raises:
            ValueError: For anything else.
        """
        try:
            data = json.loads(text)
            number = data.pop("switchax_conformance")
            if type(number) is not int or number != _FORMAT:
                raise ValueError(f"switchax_conformance is not {_FORMAT}")
            for name in ("results", "failures"):
                if type(data[name]) is not list:
                    raise TypeError(f"wrong type of {name}")
            data["results"] = tuple(Result(**result) for result in data["results"])
            data["failures"] = tuple(Failure(**f) for f in data["failures"])
            report = cls(**data)
            _check_types(report)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            RecursionError,
            OverflowError,
        ) as error:
            got = described(error)
            todo = "write one with `switchax conform NAME --report FILE`"
            raise fail_value("Report.from_json", "a report", got, todo) from error
        return report

    def __str__(self) -> str:
        verdict = "conforms" if self.passed else "does not conform"
        if self.passed and not self.computed:
            verdict = "compiles"
        if not self.complete and not self.failures:
            verdict = "was not tested to the end"
        refused = sum(result.refused for result in self.results)
        text = f"{self.operation} {verdict} ({self.level}, {self.cases} cases"
        text += f", of which {refused} were refused, on " if refused else " on "
        text += f"{self.device} in {self.seconds:.0f} s"
        text += f"; not asked: {', '.join(self.not_asked)})" if self.not_asked else ")"
        parts = [text, *map(str, self.failures)]
        parts += [f"not tested: {what}: {why}" for what, why in self.not_tested.items()]
        lines = "\n".join(parts).splitlines()
        return "\n".join(map(printable, lines))


_TEXTS = ("operation", "kind", "plugin", "level", "device")
_MAPPINGS = ("rules", "versions", "not_tested")


def _check_types(report: Report) -> None:
    """Raises where a field is not what `to_json` writes."""
    wrong = [n for n in _TEXTS if not isinstance(getattr(report, n), str)]
    wrong += [n for n in _MAPPINGS if not _is_text(getattr(report, n))]
    wrong += [
        n for n in ("complete", "computed") if type(getattr(report, n)) is not bool
    ]
    wrong += ["seed"] if not _is_count(report.seed) else []
    wrong += ["seconds"] if not _is_number(report.seconds) else []
    wrong += ["results"] if not all(map(_is_result, report.results)) else []
    texts = [text for f in report.failures for text in dataclasses.astuple(f)]
    wrong += ["failures"] if not all(isinstance(t, str) for t in texts) else []
    if wrong:
        raise TypeError(f"wrong type of {', '.join(sorted(wrong))}")
    if report.level not in LEVELS:
        raise ValueError(f"level {report.level!r} is none of {', '.join(LEVELS)}")


def _is_result(result: Result) -> bool:
    counts = (result.passed, result.failed, result.refused)
    texts = (result.rule, result.dtype, result.quantity)
    return (
        all(map(_is_count, counts))
        and all(isinstance(text, str) for text in texts)
        and _is_number(result.error)
    )


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value >= 0


def _is_text(mapping: Any) -> bool:
    return isinstance(mapping, dict) and all(
        isinstance(text, str) for pair in mapping.items() for text in pair
    )
