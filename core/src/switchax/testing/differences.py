"""Derivatives of the oracle, which has none of its own, by differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["curvature", "slope"]

# Of central differences in float64: with the step halved once and extrapolated, what
# is cut off is of order step**4, and rounding is some 2**-50 / step.
_STEP = 2.0**-8


def slope(
    along: Callable[[float], Any], step: float = _STEP, size: float = 1.0
) -> tuple[Any, float]:
    """Returns the derivative of a float64 function at 0, and how far off it may be.

    By central differences of two steps and Richardson's extrapolation.

    Args:
        along: From a number to an array or number.
        step: The larger of the two.
        size: Of what a value is a sum of, the Euclidean norm: each is rounded.

    References:
        Lewis Fry Richardson, "The approximate arithmetical solution by finite
        differences of physical problems", 1911, section 2.1.
    """

    def difference(by: float) -> Any:
        return (np.asarray(along(by)) - along(-by)) / (2 * by)

    rounding = np.abs(along(0.0)).max(initial=max(size, 1.0)) / step
    return _extrapolated(difference, rounding, step)


def curvature(along: Callable[[float], Any], size: float = 1.0) -> tuple[Any, float]:
    """Returns the second derivative likewise; see `slope`."""
    middle = np.asarray(along(0.0))

    def difference(by: float) -> Any:
        return (along(by) - 2 * middle + along(-by)) / by**2

    rounding = np.abs(middle).max(initial=max(size, 1.0)) / _STEP**2
    return _extrapolated(difference, rounding, _STEP)


def _extrapolated(
    difference: Callable[[float], Any], rounding: float, step: float
) -> tuple[Any, float]:
    coarse, fine = difference(step), difference(step / 2)
    value = (4 * fine - coarse) / 3
    doubt = float(np.abs(value - fine).max(initial=0)) + 2.0**-48 * float(rounding)
    return value, doubt
