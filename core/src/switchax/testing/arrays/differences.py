"""Derivatives of the oracle, which has none of its own, by differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["curvature", "slope"]

# Of central differences in float64: with the step halved once and extrapolated, what
# is cut off is of order step**4, and rounding is some 2**-50 / step.
_STEP = 2.0**-8


def slope(along: Callable[[float], Any]) -> tuple[Any, float]:
    """Returns the derivative of a float64 function at 0, and how far off it may be.

    By central differences of two steps and Richardson's extrapolation.

    Args:
        along: From a number to an array or number.

    References:
        Lewis Fry Richardson, "The approximate arithmetical solution by finite
        differences of physical problems", 1911, section 2.1.
    """

    def difference(step: float) -> Any:
        return (np.asarray(along(step)) - along(-step)) / (2 * step)

    return _extrapolated(difference, np.abs(along(0.0)).max(initial=1) / _STEP)


def curvature(along: Callable[[float], Any]) -> tuple[Any, float]:
    """Returns the second derivative likewise; see `slope`."""
    middle = np.asarray(along(0.0))

    def difference(step: float) -> Any:
        return (along(step) - 2 * middle + along(-step)) / step**2

    return _extrapolated(difference, np.abs(middle).max(initial=1) / _STEP**2)


def _extrapolated(
    difference: Callable[[float], Any], rounding: float
) -> tuple[Any, float]:
    coarse, fine = difference(_STEP), difference(_STEP / 2)
    value = (4 * fine - coarse) / 3
    doubt = float(np.abs(value - fine).max(initial=0)) + 2.0**-48 * float(rounding)
    return value, doubt
