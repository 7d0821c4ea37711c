"""An identity that is checked when a program is lowered, where its platform is known.

While tracing, no tracer says what it will run on; `jax.export` and
`.lower(lowering_platforms=...)` decide that afterwards. A kernel chosen for one
platform must not end up in another's program unless it may run there just the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.interpreters import ad, batching, mlir

from .compat import Primitive

__all__ = ["check_when_lowered"]

_check: Any = Primitive("switchax_check_when_lowered")


def check_when_lowered(check: Callable[[str], None], x: Any) -> Any:
    """Returns x; lowering the program, or a derivative of it, calls the check.

    Args:
        check: Hashable; gets the name of each platform, and raises to refuse it.
        x: A floating array of any shape.

    Returns:
        The array; the lowered program has nothing more in it.
    """
    return _check.bind(x, check=check)


def _lower(ctx: Any, x: Any, *, check: Callable[[str], None]) -> list[Any]:
    for platform in ctx.module_context.platforms:
        check(platform)
    return [x]


def _transpose(cotangent: Any, _: Any, *, check: Callable[[str], None]) -> list[Any]:
    return [check_when_lowered(check, cotangent)]


_check.def_impl(lambda x, check: x)
_check.def_abstract_eval(lambda aval, check: aval)
mlir.register_lowering(_check, _lower)
batching.defvectorized(_check)  # type: ignore[no-untyped-call]
ad.deflinear2(_check, _transpose)  # type: ignore[no-untyped-call]
