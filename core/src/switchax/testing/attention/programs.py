"""Compiled calls of an operation, each kept for all cases of one suite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from switchax.kinds.attention import AttentionOutput
from switchax.operation import BaseOperation
from switchax.testing.running import jitted

from .calls import Drawn

__all__ = ["Programs", "on_host", "traced"]


class Programs:
    """Jitted functions by what they are compiled for; jit itself tells shapes apart."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {}

    def outputs(
        self, operation: BaseOperation, drawn: Drawn, **asked: bool
    ) -> AttentionOutput:
        """Returns the outputs of a call, from one compiled program.

        Args:
            operation: The operation.
            drawn: The call.
            **asked: `return_lse`, `return_weights`.
        """

        def build() -> Callable[..., Any]:
            return jitted(lambda arrays: operation(**arrays, **drawn.options, **asked))

        result = self._program("outputs", operation, drawn, asked, build)(traced(drawn))
        return on_host(result)

    def gradients(
        self,
        operation: BaseOperation,
        drawn: Drawn,
        names: Iterable[str],
        cotangents: Mapping[str, Any],
        **asked: bool,
    ) -> tuple[AttentionOutput, dict[str, Any]]:
        """Returns outputs and gradients of a call, from one compiled program.

        Args:
            operation: The operation.
            drawn: The call.
            names: The arguments to differentiate.
            cotangents: By field of `AttentionOutput`; 0 for those that are left out.
            **asked: `return_lse`, `return_weights`.
        """
        _, result, gradients = self._derived(
            operation, drawn, None, names, cotangents, asked
        )
        return on_host(result), gradients

    def outputs_and_gradients(
        self,
        operation: BaseOperation,
        drawn: Drawn,
        plainly: Mapping[str, bool],
        names: Iterable[str],
        cotangents: Mapping[str, Any],
        **asked: bool,
    ) -> tuple[AttentionOutput, AttentionOutput, dict[str, Any]]:
        """Returns what `outputs` and `gradients` do, from one program for both.

        It is compiled in little more than the time of the latter.

        Args:
            operation: The operation.
            drawn: The call.
            plainly: `return_lse`, `return_weights` of the outputs.
            names: The arguments to differentiate.
            cotangents: See `gradients`.
            **asked: `return_lse`, `return_weights` of what is differentiated.
        """
        plain, result, gradients = self._derived(
            operation, drawn, dict(plainly), names, cotangents, asked
        )
        return on_host(plain), on_host(result), gradients

    def _derived(
        self,
        operation: BaseOperation,
        drawn: Drawn,
        plainly: dict[str, bool] | None,
        names: Iterable[str],
        cotangents: Mapping[str, Any],
        asked: dict[str, bool],
    ) -> Any:
        names = tuple(names)

        def build() -> Callable[..., Any]:
            def run(floats: Any, rest: Any, cotangents: Any) -> Any:
                def outputs(floats: Any, asked: dict[str, bool]) -> Any:
                    return operation(**floats, **rest, **drawn.options, **asked)

                plain = None if plainly is None else outputs(floats, plainly)
                result, pull = jax.vjp(lambda f: outputs(f, asked), floats)
                zeros = jax.tree.map(jnp.zeros_like, result)
                return plain, result, pull(zeros._replace(**cotangents))[0]

            return jitted(run)

        of = (plainly, asked, names, sorted(cotangents))
        program = self._program("gradients", operation, drawn, of, build)
        arrays = traced(drawn)
        floats = {name: arrays.pop(name) for name in names}
        given = {field: jnp.asarray(array) for field, array in cotangents.items()}
        return program(floats, arrays, given)

    def _program(
        self,
        what: str,
        operation: BaseOperation,
        drawn: Drawn,
        asked: Any,
        build: Callable[[], Callable[..., Any]],
    ) -> Callable[..., Any]:
        options = dict(drawn.options)
        pattern = options.pop("mask_pattern", None)  # whose repr does not tell all
        of = repr(sorted(options.items())), pattern, repr(asked)
        key = (what, id(operation), *of, tuple(drawn.arrays))
        if key not in self._kept:
            self._kept[key] = build()
        return self._kept[key]  # type: ignore[no-any-return]


def traced(drawn: Drawn) -> dict[str, Any]:
    """Returns the arrays of a call as JAX arrays."""
    return {name: jnp.asarray(array) for name, array in drawn.arrays.items()}


def on_host(result: Any) -> AttentionOutput:
    """Returns outputs as numpy; an operation that returns another type is refused."""
    if not isinstance(result, AttentionOutput):
        text = (
            f"expected AttentionOutput from an operation, got {type(result).__name__}"
        )
        raise TypeError(f"conform: {text}; leave __call__ to BaseOperation")
    return AttentionOutput(*(None if x is None else np.asarray(x) for x in result))
