"""What a kind asks of its operations: a suite of cases, each of one rule."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

from switchax.operation import BaseOperation
from switchax.target import Target

__all__ = ["LEVELS", "Case", "Finding", "Suite", "fields_that_differ", "worst"]

LEVELS = ("quick", "full")


@dataclasses.dataclass(frozen=True)
class Finding:
    """What one case found.

    Attributes:
        error: The largest error found, in units of what is allowed; up to 1 is right.
        text: What is wrong, one line; "" if nothing is.
        rule: The rule that is broken, if that is another than the case's.
        quantity: What the error is of, such as "output" or "d_query".
        accepted: Whether what is wrong is that something undeclared was not refused.
        where: Where the error is the largest, and what was found there instead of what.
    """

    error: float = 0.0
    text: str = ""
    rule: str = ""
    quantity: str = ""
    accepted: bool = False
    where: str = ""

    def __str__(self) -> str:
        if self.text:
            return f"wrong: {self.text}"
        return f"{'wrong' if self.is_wrong else 'right'}: {self.distance}"

    @property
    def distance(self) -> str:
        """How far from right it is, and where."""
        digits = (f"{self.error:.{count}g}" for count in range(3, 17))
        error = next((text for text in digits if text != "1"), "1")
        text = f"{self.quantity or 'everything'} is off by {error} times what "
        text += "rounding explains"
        return f"{text}, {self.where}" if self.where else text

    @property
    def is_wrong(self) -> bool:
        """Whether it is a failure; an error that is NaN is one."""
        return bool(self.text) or not self.error <= 1


def worst(findings: Iterable[Finding]) -> Finding:
    """Returns the first that is wrong, else that of the largest error.

    Of none it is one of no error.
    """
    found = list(findings)
    wrong = (finding for finding in found if finding.is_wrong)
    largest = max(found, key=lambda finding: finding.error, default=Finding())
    return next(wrong, largest)


class Case(abc.ABC):
    """One call, and what must come of it.

    Attributes:
        rule: The rule that it is about, such as "R5".
        title: One line that tells it from others.
        dtype: Dtype of the operands.
        claims: The features that the case uses. If every case of one that the
            operation declares is refused, its declaration is wrong.
        may_change_rule: Whether a simpler case that fails may be of another rule.
        computes: Whether a case that passed shows that what it claims is honoured.
    """

    rule: str
    title: str
    dtype: str
    claims: frozenset[str] = frozenset()
    computes: bool = True
    may_change_rule: bool = False

    @abc.abstractmethod
    def run(self, operation: BaseOperation) -> Finding:
        """Runs it.

        Args:
            operation: An instance; what it compiles may be kept for other cases.

        Returns:
            What was found.

        Raises:
            UnsupportedError: If the operation refuses the call.
            Exception: Whatever the operation raises, which is a failure of its own.
        """

    def lower(self, operation: BaseOperation, target: Target) -> Finding:
        """Compiles the call for a device that is not here; see `lower_for`.

        Args:
            operation: An instance.
            target: The device.

        Returns:
            A finding without an error.

        Raises:
            UnsupportedError: If the operation refuses the call there.
            Exception: Whatever lowering raises, which is a failure.
        """
        raise NotImplementedError(f"{type(self).__name__} is not lowered")

    def simpler(self) -> Iterator[Case]:
        """Yields cases that are simpler in one respect, best first; none by default."""
        return iter(())

    @abc.abstractmethod
    def snippet(self, name: str) -> str:
        """Returns Python that shows the failure, for an operation of that name."""


class Suite(abc.ABC):
    """Everything that conformance asks of one kind.

    Attributes:
        rules: One line for each rule.
        declaration: The rule that is broken by declaring what is always refused, by
            refusing late, and by changing what is global to the process.

    Example:
        >>> class RotarySuite(Suite):
        ...     rules = {"R1": "pairs are rotated by position times frequency"}
        ...
        ...     def cases(self, operation, platform, level, seed):
        ...         yield RotaryCase("R1", "plain", "float32")
    """

    rules: ClassVar[Mapping[str, str]]
    declaration: ClassVar[str] = "R12"

    @abc.abstractmethod
    def cases(
        self, operation: type[BaseOperation], platform: str, level: str, seed: int
    ) -> Iterator[Case]:
        """Yields the cases for an operation, the simplest first.

        What it declares must be right, and what it does not must be refused. A case
        should add one thing to those before it, so that the first failure names its
        cause.

        Args:
            operation: The class; its capabilities say what to ask.
            platform: Where it runs.
            level: "quick" or "full".
            seed: Of everything that is drawn.
        """

    def not_tested(
        self, operation: type[BaseOperation], platform: str
    ) -> Mapping[str, str]:
        """Returns what cannot be tested here, and why; nothing by default."""
        return {}


def fields_that_differ(case: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that are not their default."""
    return {
        field.name: getattr(case, field.name)
        for field in dataclasses.fields(case)
        if getattr(case, field.name) != field.default
    }
