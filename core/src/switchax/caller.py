"""Warns whoever called Switchax, however many frames lie between."""

from __future__ import annotations

import os
import sys
import warnings

import jax

__all__ = ["warn_caller"]

_INNER = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep
    for file in (__file__, str(jax.__file__))
)


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line that is neither Switchax's nor JAX's."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_INNER):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
