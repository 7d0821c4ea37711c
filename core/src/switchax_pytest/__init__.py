"""The pytest plugin: `pytest --switchax-operation NAME` collects conformance cases.

A package of its own, since pytest imports it before any conftest, and with it nothing
of JAX, which reads its environment when imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

__all__ = ["ConformanceItem", "DeclarationItem"]

_EIGHT = "--xla_force_host_platform_device_count=8"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("switchax", "conformance of Switchax operations")
    group.addoption(
        "--switchax-operation",
        action="append",
        default=[],
        metavar="NAME",
        help="Hold this operation against the rules of its kind, a test for each case.",
    )
    group.addoption(
        "--switchax-level",
        choices=("quick", "full"),
        default="quick",
        help="How many cases: minutes (quick) or half an hour (full).",
    )
    group.addoption(
        "--switchax-seed", type=int, default=0, help="Of everything that is drawn."
    )


def pytest_configure(config: pytest.Config) -> None:
    """Lets a CPU stand for eight, so that meshes are tested, if JAX has not started."""
    flags = os.environ.get("XLA_FLAGS", "")
    if config.getoption("--switchax-operation") and "device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {_EIGHT}".strip()


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Adds a test for each case of each operation that was named."""
    for name in config.getoption("--switchax-operation"):
        items.extend(_items(session, config, name))


def _items(
    session: pytest.Session, config: pytest.Config, name: str
) -> Iterable[pytest.Item]:
    from switchax.testing.conformance import cases_of
    from switchax.testing.run import Run

    level, seed = (config.getoption(f"--switchax-{n}") for n in ("level", "seed"))
    try:
        operation, cases = cases_of(name, level, seed)
    except (TypeError, ValueError) as error:
        raise pytest.UsageError(str(error)) from error
    run = Run(operation, level)
    for number, case in enumerate(cases):
        title = f"{name}[{case.rule}-{number}-{case.title}]"
        yield ConformanceItem.from_parent(session, name=title, case=case, run=run)
    title, fresh = f"{name}[declaration]", Run(operation, level)
    yield DeclarationItem.from_parent(session, name=title, cases=cases, run=fresh)


class DeclarationItem(pytest.Item):
    """That nothing is declared and always refused, which no single case can tell."""

    def __init__(self, *, cases: Any, run: Any, **rest: Any) -> None:
        super().__init__(**rest)
        self.cases, self.run = cases, run

    def runtest(self) -> None:
        """Runs cases until each declared thing was honoured once."""
        failures = self.run.check_declaration(self.cases)
        if failures:
            pytest.fail("\n".join(map(str, failures)), pytrace=False)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Where it is: in no file."""
        return self.path, None, self.name


class ConformanceItem(pytest.Item):
    """One case as a test; it skips what the operation refuses although declared."""

    def __init__(self, *, case: Any, run: Any, **rest: Any) -> None:
        super().__init__(**rest)
        self.case, self.run = case, run

    def runtest(self) -> None:
        """Runs the case."""
        failure, refused = self.run.try_case(self.case)
        if failure is not None:
            pytest.fail(str(failure), pytrace=False)
        if refused:
            pytest.skip(refused)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Where it is: in no file."""
        return self.path, None, self.name
