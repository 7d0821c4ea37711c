"""An identity on tangents that can be transposed but not evaluated.

Reverse mode transposes what it computed of tangents; forward mode evaluates it. So a
tangent that went through here serves `grad` and `vjp`, while `jvp` raises. A
`jax.custom_vjp` draws the same line, but with an error of JAX's own that cannot name
the operation.
"""

from __future__ import annotations

from typing import Any, NoReturn

from jax.interpreters import ad, batching, mlir

from .compat import Primitive
from .errors import UnsupportedError

__all__ = ["reverse_only"]

_reverse_only: Any = Primitive("switchax_reverse_only")


def reverse_only(message: str, tangent: Any) -> Any:
    """Returns a tangent that raises UnsupportedError(message) in forward mode."""
    return _reverse_only.bind(tangent, message=message)


def _refuse(*_: Any, message: str, **__: Any) -> NoReturn:
    raise UnsupportedError(message)


def _transpose(cotangent: Any, _: Any, *, message: str) -> list[Any]:
    return [cotangent]


_reverse_only.def_impl(_refuse)
_reverse_only.def_abstract_eval(lambda aval, message: aval)
mlir.register_lowering(_reverse_only, _refuse)
batching.defvectorized(_reverse_only)  # type: ignore[no-untyped-call]
ad.deflinear2(_reverse_only, _transpose)  # type: ignore[no-untyped-call]
