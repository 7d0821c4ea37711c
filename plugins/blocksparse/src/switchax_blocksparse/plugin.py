"""The plugin `blocksparse`; importing it registers its operation."""

from .operation import BlockSparseAttention

__all__ = ["BlockSparseAttention"]

SWITCHAX_CONTRACT = 1
