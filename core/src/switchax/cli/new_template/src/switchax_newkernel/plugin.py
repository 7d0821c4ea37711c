"""What the entry point loads: light, no kernel library; registers the operation."""

from .operation import NewkernelAttention

__all__ = ["NewkernelAttention"]

SWITCHAX_CONTRACT = 1
