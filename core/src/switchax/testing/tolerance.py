"""How far from the oracle a right result may be: the one table of tolerances."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["ROUNDING", "allowed", "distance"]

# The unit roundoff of what is stored and of what is accumulated (R8): half the distance
# from 1 to the next number. From it, in units of the largest entry of what is compared:
#
# - Output and gradients are stored once, 1 unit; an operation may also store the
#   weights, and going backward their cotangents, in the operands' dtype, 1 unit each:
#   3 units of what is stored.
# - A product errs by some units of what is accumulated: errors of n terms are random
#   and add up to sqrt(n) of them only while the terms are alike. A logit x errs by
#   units of x, which is a relative error of its weight. So 2 * (1 + largest logit)
#   units for each of the two products on the way to the result. That is why inputs
#   times five, whose logits are 25 times as large, need no row of their own.
# - A gradient of bias is a sum of cotangents of logits, which cancel along a row. Each
#   errs by units of the products d_output @ value that it is a difference of, so for
#   it the largest of those counts, if it is larger than the largest logit.
# - Going backward, an operation may start from the output as it returned it, rounded
#   once: where rows sum up thousands of d_output * output, what that changes is added
#   entry by entry (`slack`), since it is not of the size of the result.
# - lse and weights are not stored in the operands' dtype: the second part alone.
ROUNDING = {
    "float16": (2**-11, 2**-24),
    "bfloat16": (2**-8, 2**-24),
    "float32": (2**-24, 2**-24),
    "float64": (2**-53, 2**-53),
}


def allowed(dtype: str, growth: float, stored: int = 3) -> float:
    """Returns the error allowed, in units of the largest entry (or 1, if less).

    Args:
        dtype: Of the operands.
        growth: The largest number whose rounding error is one of the result, such as
            a logit.
        stored: How many times something is rounded to dtype on the way.
    """
    unit, accumulated = ROUNDING[dtype]
    return stored * unit + 4 * accumulated * (1 + growth)


def distance(
    got: Any, expected: Any, limit: float, slack: Any = None
) -> tuple[float, str]:
    """Returns the largest error in units of what is allowed, and what else is wrong.

    Args:
        got: What an operation returned, any dtype.
        expected: What the oracle says, float64.
        limit: From `allowed`.
        slack: Of each entry, what it may differ by beside that; None is nothing.

    Returns:
        The error, and "" or what makes the two incomparable: another shape, NaN, or
        -inf elsewhere.
    """
    got = np.asarray(got).astype("float64")
    expected = np.asarray(expected, "float64")
    if got.shape != expected.shape:
        return math.inf, f"has shape {got.shape}, not {expected.shape}"
    if np.isnan(got).any() and not np.isnan(expected).any():
        return math.inf, f"holds {int(np.isnan(got).sum())} NaN of {got.size}"
    if ((got == -math.inf) != (expected == -math.inf)).any():
        differ = int(((got == -math.inf) != (expected == -math.inf)).sum())
        return math.inf, f"is -inf elsewhere, in {differ} of {got.size}"
    finite = np.isfinite(expected)
    if not np.isfinite(got[finite]).all():
        return math.inf, "overflows"
    if not finite.any():
        return 0.0, ""
    scale = max(float(np.abs(expected[finite]).max()), 1.0)
    errors = np.abs(got[finite] - expected[finite])
    if slack is not None:
        errors = np.maximum(errors - np.broadcast_to(slack, got.shape)[finite], 0)
    return float(errors.max()) / scale / limit, ""
