"""The plugin `vanilla`; importing it registers its operation."""

from .operation import VanillaAttention

__all__ = ["VanillaAttention"]

SWITCHAX_CONTRACT = 1
