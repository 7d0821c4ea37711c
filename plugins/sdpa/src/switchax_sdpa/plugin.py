"""The plugin `sdpa`; importing it registers its operations."""

from .operation import CudnnAttention, SdpaAttention

__all__ = ["CudnnAttention", "SdpaAttention"]

SWITCHAX_CONTRACT = 1
