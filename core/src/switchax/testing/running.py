"""How an operation under check is run, whatever its kind."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax

from switchax.errors import UnsupportedError, described, first_line
from switchax.operation import BaseOperation, defined_methods

__all__ = ["RefusedLate", "compiled_quickly", "devices", "jitted"]
__all__ += ["shortened", "watched", "wide_types"]

# Most of a run is compilation, of which this leaves out more than half on a CPU.
_QUICKLY = {"xla_backend_optimization_level": 0}
_SHOWN = 300  # of an error's text, at either end
_options: ContextVar[dict[str, Any] | None] = ContextVar("options", default=None)


class RefusedLate(Exception):
    """A forward method refused its call, which is too late."""


def wide_types(dtype: str) -> contextlib.AbstractContextManager[Any]:
    """JAX has float64 only where it is enabled."""
    return jax.enable_x64(True) if dtype == "float64" else contextlib.nullcontext()


@contextlib.contextmanager
def compiled_quickly() -> Iterator[None]:
    """Lets `jitted` compile without most of XLA's optimisations, in this context."""
    token = _options.set(_QUICKLY)
    try:
        yield
    finally:
        _options.reset(token)


def jitted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function under jit, as a suite's cases should use it."""
    options = _options.get()
    return jax.jit(function, compiler_options=options)


def devices() -> list[str]:
    """Returns Python that gives a CPU as many devices as it has here."""
    if jax.default_backend() != "cpu":
        return []
    flag = f"--xla_force_host_platform_device_count={jax.device_count()}"
    return ["import os", "", f'os.environ["XLA_FLAGS"] = "{flag}"', ""]


def shortened(error: BaseException) -> str:
    """Returns an error's text without its middle: the remedy stands at the end."""
    text = described(error)
    most = 2 * _SHOWN
    return text if len(text) <= most else f"{text[:_SHOWN]} ... {text[-_SHOWN:]}"


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
