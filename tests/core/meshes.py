"""Meshes for tests, entered in the way that JAX 0.12 deprecates."""

import contextlib
import warnings

__all__ = ["entered"]


@contextlib.contextmanager
def entered(mesh):
    """`with mesh:`, which JAX 0.12 deprecates."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        mesh.__enter__()
    try:
        yield
    finally:
        mesh.__exit__(None, None, None)
