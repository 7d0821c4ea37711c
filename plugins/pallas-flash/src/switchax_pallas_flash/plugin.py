"""The plugin `pallas_flash`; importing it registers its operation."""

from .operation import PallasFlashAttention

__all__ = ["PallasFlashAttention"]

SWITCHAX_CONTRACT = 1
