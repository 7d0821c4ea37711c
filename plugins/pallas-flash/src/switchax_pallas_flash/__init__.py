"""The "pallas_flash" operation: flash attention for TPU, in Pallas."""

from .blocks import PallasFlashConfig

__all__ = ["PallasFlashConfig"]
