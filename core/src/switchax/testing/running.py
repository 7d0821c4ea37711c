"""How an operation under check is run, whatever its kind."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import jax

from switchax.errors import UnsupportedError, first_line
from switchax.operation import BaseOperation, defined_methods

__all__ = ["RefusedLate", "devices", "watched", "wide_types"]


class RefusedLate(Exception):
    """A forward method refused its call, which is too late."""


def wide_types(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """JAX has float64 only where it is enabled."""
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def devices() -> list[str]:
    """Returns Python that gives a CPU as many devices as it has here."""
    if jax.default_backend() != "cpu":
        return []
    flag = f"--xla_force_host_platform_device_count={jax.device_count()}"
    return ["import os", "", f'os.environ["XLA_FLAGS"] = "{flag}"', ""]


def watched(cls: type[BaseOperation]) -> type[BaseOperation]:
    """Returns a subclass whose forward methods raise `RefusedLate` for a refusal."""

    def watch(method: str) -> Callable[..., Any]:
        original = getattr(cls, method)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return original(self, *args, **kwargs)
            except UnsupportedError as error:
                text = f"refuses only after {method} has started: "
                raise RefusedLate(text + first_line(error)) from error

        signature: Any = inspect.signature(original)
        forward.__signature__ = signature  # type: ignore[attr-defined]
        return forward

    methods = {name: watch(name) for name in defined_methods(cls)}
    return type(cls.__name__, (cls,), methods)
