"""The "blocksparse" operation: attention for TPU that visits what a pattern shows."""

from switchax_pallas_flash import PallasFlashConfig as BlockSparseConfig

__all__ = ["BlockSparseConfig"]
