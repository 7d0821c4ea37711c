"""What an operation is created with, and how the arrays of attention are split."""

from .record import OperationMetadata
from .rules import AttnShardingRules

__all__ = ["AttnShardingRules", "OperationMetadata"]
