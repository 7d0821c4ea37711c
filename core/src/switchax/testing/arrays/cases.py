"""One call and what is asked of it, as a case of a suite."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from switchax.errors import UnsupportedError
from switchax.operation import BaseOperation
from switchax.target import Target
from switchax.testing.lowered import lower_for
from switchax.testing.running import wide_types
from switchax.testing.suite import Case, Finding

from .calls import ArrayCall
from .checks import CHECKS, Subject

__all__ = ["ROLES", "ArrayCase"]

ROLES = ("dtype", "precision", "gradient", "refusal", "transforms")


@dataclasses.dataclass(frozen=True)
class ArrayCase(Case):
    """One call, and what is asked of it.

    Attributes:
        rule: The rule that it is about.
        call: The call.
        check: "value", "refused", "keywords", "underivable", "transforms", "mesh",
            "in turn", "forward mode" or "second order".
        roles: The rules of what every kind is asked; see `ArraySuite`.
        programs: Jitted functions, shared by the cases of one run.
    """

    rule: str
    call: ArrayCall
    check: str = "value"
    roles: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: dict.fromkeys(ROLES, ""), compare=False, repr=False
    )
    programs: dict[Any, Any] = dataclasses.field(
        default_factory=dict, compare=False, repr=False
    )

    @property
    def title(self) -> str:  # type: ignore[override]
        """The check and the call."""
        return f"{self.check}, {self.call}"

    @property
    def dtype(self) -> str:  # type: ignore[override]
        """Dtype of the call."""
        return self.call.dtype

    @property
    def claims(self) -> frozenset[str]:  # type: ignore[override]
        """The call's features, where it must honour them."""
        return frozenset() if self.check == "refused" else self.call.features

    @property
    def computes(self) -> bool:  # type: ignore[override]
        """Whether its result counts."""
        return self.check == "value"

    def run(self, operation: BaseOperation) -> Finding:
        """Runs the check."""
        with wide_types(self.dtype):
            subject = Subject(operation, self.call, self.roles, self.programs)
            return CHECKS[self.check](subject)

    def lower(self, operation: BaseOperation, target: Target) -> Finding:
        """Compiles the call and its gradient; what needs values is passed over."""
        if self.check not in ("value", "refused"):
            return Finding()
        arguments = {**self.call.arrays(), **self.call.options()}
        with wide_types(self.dtype):
            try:
                lower_for(operation, arguments, target)
            except UnsupportedError:
                if self.check == "refused":
                    return Finding()
                raise
            subject = Subject(operation, self.call, self.roles, self.programs)
            if subject.differentiable and self.check == "value":
                lower_for(operation, arguments, target, subject.pulled_back)
        return Finding()

    def simpler(self) -> Iterator[Case]:
        """Yields cases of simpler calls."""
        for call in self.call.simpler():
            yield dataclasses.replace(self, call=call)

    def snippet(self, name: str) -> str:
        """Returns Python that runs the case again."""
        call = type(self.call)
        case = f"ArrayCase({self.rule!r}, call, {self.check!r})"
        return "\n".join(
            [
                "from switchax import OperationRegistry",
                "from switchax.testing.arrays import ArrayCase",
                f"from {call.__module__} import {call.__qualname__}",
                "",
                f"call = {self.call}",
                f"print({case}.run(OperationRegistry.create({name!r})))",
            ]
        )
