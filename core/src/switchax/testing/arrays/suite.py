"""From a list of calls, the cases that hold an operation against its declaration."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import jax

from switchax.capabilities import Capabilities
from switchax.checks import fail_value
from switchax.operation import BaseOperation
from switchax.testing.suite import Suite

from .calls import ArrayCall, fitted, moved
from .cases import ROLES, ArrayCase

__all__ = ["ROLES", "ArraySuite"]

_DTYPES = ("float32", "bfloat16", "float16", "float64")  # the first is asked most


class ArraySuite(Suite):
    """The cases of a kind that maps arrays to arrays, from a list of calls.

    A call that uses only what an operation declares must be right: output, dtype,
    gradients. Any other must be refused before a forward method starts. Each dtype
    is held likewise, and transforms, unknown keywords and undeclared derivatives.
    Fields of a call that are named as `sizes` of the kind are brought to what the
    operation's `limits` and `multiples` take.

    Attributes:
        rules: One line for each rule.
        roles: For each of `ROLES`, the rule of the kind that it falls under.
    """

    roles: ClassVar[Mapping[str, str]]

    @abc.abstractmethod
    def calls(self, level: str) -> Iterable[tuple[str, ArrayCall]]:
        """Yields calls with the rule that each is about, the simplest first.

        The first uses no feature. For each feature of the kind there should be one
        that uses no other, and that shows where sizes are small. Of each option some
        values should come in the same shape, so that what an operation keeps by shape
        is found. Those of the rule of "precision" are asked in every dtype, and at
        level "full" all.

        Args:
            level: "quick" or "full".
        """

    def cases(
        self, operation: type[BaseOperation], platform: str, level: str, seed: int
    ) -> Iterator[ArrayCase]:
        """Yields the cases; see `Suite.cases`."""
        yield from self._sharing(self._cases(operation.capabilities, level, seed))

    def _cases(
        self, capabilities: Capabilities, level: str, seed: int
    ) -> Iterator[ArrayCase]:
        declared = [dtype for dtype in _DTYPES if dtype in capabilities.dtypes]
        moving = (
            (rule, moved(call, declared[0], seed)) for rule, call in self.calls(level)
        )
        calls = _in_sizes_of(capabilities, moving)
        first = self._first(capabilities, calls)
        for rule, call in calls:
            if call.features <= capabilities.features:
                yield self._case(rule, call)
        for dtype in declared[1:]:
            for rule, call in calls:
                asked = level == "full" or rule == self.roles["precision"]
                asked |= bool(call.features) or call is first
                other = moved(call, dtype)
                if asked and call.features <= capabilities.features:
                    yield self._case(self.roles["precision"], other)
        yield from self._refusals(capabilities, calls, first)
        yield self._case(self.roles["refusal"], first, "keywords")
        yield self._case(self.roles["gradient"], first, "underivable")
        role = self.roles["transforms"]
        checks = ["transforms", "forward mode", "second order"]
        checks += ["mesh"] if jax.device_count() > 1 else []
        for call in dict.fromkeys((first, *_one_of_each(capabilities, calls))):
            for check in checks:
                yield self._case(role, call, check)
        yield self._case(role, first, "in turn")

    def _first(
        self, capabilities: Capabilities, calls: list[tuple[str, ArrayCall]]
    ) -> ArrayCall:
        """The first call that uses nothing but what is declared."""
        for _, call in calls:
            if call.features <= capabilities.features:
                return call
        sizes = {**capabilities.multiples, **capabilities.limits}
        todo = "declare less narrow sizes, or let `calls` yield one that fits them"
        rule, got = "a call that fits what is declared", f"none for {sizes}"
        raise fail_value(type(self).__name__, rule, got, todo)

    def _refusals(
        self,
        capabilities: Capabilities,
        calls: list[tuple[str, ArrayCall]],
        first: ArrayCall,
    ) -> Iterator[ArrayCase]:
        role = self.roles["refusal"]
        for _, call in calls:
            if len(call.features - capabilities.features) == 1:
                yield self._case(role, call, "refused")
        for dtype in _DTYPES:
            if dtype not in capabilities.dtypes:
                yield self._case(role, moved(first, dtype), "refused")

    def _case(self, rule: str, call: ArrayCall, check: str = "value") -> ArrayCase:
        return ArrayCase(rule, call, check, self.roles)

    def _sharing(self, cases: Iterable[ArrayCase]) -> Iterator[ArrayCase]:
        programs: dict[Any, Any] = {}
        for case in cases:
            yield dataclasses.replace(case, programs=programs)

    def not_tested(
        self, operation: type[BaseOperation], platform: str
    ) -> Mapping[str, str]:
        """Platforms that are not here, meshes, and features that no call uses."""
        elsewhere = operation.capabilities.platforms - {platform}
        used = {name for _, call in self.calls("full") for name in call.features}
        alone = {"meshes": "there is one device"} if jax.device_count() == 1 else {}
        return {
            **alone,
            **{f"platform {name}": f"this is {platform}" for name in sorted(elsewhere)},
            **{
                f"feature {name}": "no call of the suite uses it"
                for name in sorted(operation.kind.features.keys() - used)
            },
        }


def _in_sizes_of(
    capabilities: Capabilities, calls: Iterable[tuple[str, ArrayCall]]
) -> list[tuple[str, ArrayCall]]:
    """Brings calls to declared sizes, without those that are none in such."""
    found: dict[tuple[str, ArrayCall], None] = {}  # they may be alike now
    for rule, call in calls:
        other = fitted(call, capabilities)
        if other == call or _is_legal(other):
            found.setdefault((rule, other))
    return [*found]


def _varies(call: ArrayCall) -> bool:
    """Whether all arrays are others by another seed."""
    others = moved(call, call.dtype, 1).arrays()
    return all((x != others[name]).any() for name, x in call.arrays().items())


def _is_legal(call: ArrayCall) -> bool:
    try:
        return isinstance(call.features, frozenset)  # for which the kind is asked
    except (TypeError, ValueError):
        return False


def _one_of_each(
    capabilities: Capabilities, calls: list[tuple[str, ArrayCall]]
) -> list[ArrayCall]:
    """The first call of no feature, and of each declared one, best by itself.

    Best one whose arrays are all others by another seed: under vmap, what takes that of
    one call for all is then seen.
    """
    found: dict[str, ArrayCall] = {}
    declared = [call for _, call in calls if call.features <= capabilities.features]
    for call in sorted(declared, key=lambda x: (len(x.features), not _varies(x))):
        for feature in call.features or ("",):
            found.setdefault(feature, call)
    return list(dict.fromkeys(found.values()))
