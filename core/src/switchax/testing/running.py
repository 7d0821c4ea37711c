"""How an operation under check is run, whatever its kind."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import jax

from switchax.operation import BaseOperation, defined_methods

__all__ = ["watched", "wide_types"]


def wide_types(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """JAX has float64 only where it is enabled."""
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


def watched(cls: type[BaseOperation], started: list[str]) -> type[BaseOperation]:
    """Returns a subclass that notes in `started` which forward method was."""

    def noting(method: str) -> Callable[..., Any]:
        original = getattr(cls, method)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            started.append(method)
            return original(self, *args, **kwargs)

        signature: Any = inspect.signature(original)
        forward.__signature__ = signature  # type: ignore[attr-defined]
        return forward

    return type(
        cls.__name__, (cls,), {name: noting(name) for name in defined_methods(cls)}
    )
