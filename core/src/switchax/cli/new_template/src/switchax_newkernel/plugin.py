"""What the entry point loads: light, no kernel library; registers the operation."""

from .operation import NewkernelAttention

__all__ = ["NewkernelAttention"]

# The contract this is written for: a core that speaks another refuses to load it.
SWITCHAX_CONTRACT = 1
