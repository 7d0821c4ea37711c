"""The plugin `chunked`; importing it registers its operation."""

from .operation import ChunkedAttention

__all__ = ["ChunkedAttention"]

SWITCHAX_CONTRACT = 1
