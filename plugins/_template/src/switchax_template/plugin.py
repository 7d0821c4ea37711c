"""What the entry point loads: light, no kernel library; registers the operation."""

from .operation import TemplateAttention

__all__ = ["TemplateAttention"]

SWITCHAX_CONTRACT = 1
