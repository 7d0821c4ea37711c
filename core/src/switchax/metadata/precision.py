"""Which dtypes a call is computed in, as far as metadata says (rule R8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import numpy as np

from switchax.checks import fail_value
from switchax.errors import Refusal, UnsupportedError, house_message

if TYPE_CHECKING:
    from .record import OperationMetadata

__all__ = ["check_softmax_dtype", "runtime_dtype_name"]


def runtime_dtype_name(where: str, metadata: OperationMetadata) -> str | None:
    """Returns the name of the dtype that operands are cast to, or None for theirs.

    Args:
        where: Who was called.
        metadata: Its `runtime_dtype` counts.

    Raises:
        ValueError: For float64 where JAX would compute in float32 instead.
    """
    dtype = metadata.runtime_dtype
    if dtype is None:
        return None
    name = np.dtype(dtype).name
    if np.dtype(jax.dtypes.canonicalize_dtype(dtype)).name != name:
        rule = "a runtime_dtype that JAX computes in"
        got = f"runtime_dtype={name} while jax_enable_x64 is off"
        todo = "call jax.config.update('jax_enable_x64', True), or choose float32"
        raise fail_value(where, rule, got, todo)
    return name


def check_softmax_dtype(where: str, metadata: OperationMetadata, dtype: str) -> None:
    """Checks that softmax is at least as precise as `runtime_softmax_dtype`.

    Args:
        where: Who was called.
        metadata: Its `runtime_softmax_dtype` counts.
        dtype: Name of the operands' dtype; softmax runs in float64 for float64, in
            float32 for all others.

    Raises:
        UnsupportedError: If softmax would be less precise.
    """
    wanted = np.dtype(metadata.runtime_softmax_dtype).name
    if wanted != "float64" or dtype == "float64":
        return
    got = f"runtime_softmax_dtype={wanted} for operands of dtype {dtype}"
    hint = "pass runtime_dtype='float64' too, or leave runtime_softmax_dtype out"
    rule = "softmax in float32, or in float64 for float64 operands"
    refusal = Refusal("dtype", "runtime_softmax_dtype", wanted, "float32", hint)
    raise UnsupportedError(house_message(where, rule, got, hint), {where: (refusal,)})
