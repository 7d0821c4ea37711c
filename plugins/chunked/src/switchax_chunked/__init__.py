"""The "chunked" operation: attention in plain JAX, in memory linear in the lengths."""

from .borrowed import borrow_backward
from .tiling import ChunkedConfig

__all__ = ["ChunkedConfig", "borrow_backward"]
