"""How far from the oracle a right result may be: the one table of tolerances."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["ROUNDING", "allowed", "distance", "farthest"]

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
# - Going backward, an operation may start from the output as it returned it. The sum of
#   d_output * output, which is taken from every cotangent of a weight, is then off by
#   that of d_output * (returned - output): up to 1 unit of sum |d_output * output| for
#   the output, and of sum |weight * (d_output @ value)| for the weights in it. That
#   times weight * scale * key is no error of the size of the gradient of query where
#   one key has nearly all the weight, and neither is what rounding the cotangents of
#   logits adds up to. Both are added entry by entry (`slack`); of the first, what was
#   returned tells how large it is. See `attention.gradients`.
# - lse and weights are not stored in the operands' dtype: the second part alone.
# - A long sum of terms that are alike may be taken one by one: n additions, each off by
#   up to a unit of the sum, are off by sqrt(n) units (`attention.values`, R8 alone).
# - A jvp is compared as its product with cotangents. Its entries err by themselves, so
#   the product errs by the norm of the cotangents; see `attention.transforms`.
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


def farthest(got: Any, expected: Any, slack: Any = None) -> str:
    """Says where two arrays of one shape, whose error is finite, differ the most.

    Args:
        got: As for `distance`, likewise the next two.
        expected: What the oracle says.
        slack: Of each entry, what it may differ by; None is nothing.
    """
    got = np.asarray(got).astype("float64")
    expected = np.asarray(expected, "float64")
    finite = np.isfinite(expected)
    with np.errstate(invalid="ignore"):  # inf - inf, which is not looked at
        errors = np.abs(got - expected)
    if slack is not None:
        errors = errors - slack
    errors = np.where(finite, errors, -math.inf)
    place = np.unravel_index(int(errors.argmax()), errors.shape)
    index = ", ".join(map(str, place))
    return f"at [{index}] {got[place]:.6g} instead of {expected[place]:.6g}"
