"""The kind `attention`: its arguments, its meaning, and how calls are adapted."""

from .adaptation import AttentionPlan
from .definition import ATTENTION, AttentionKind
from .outcome import AttentionOutput
from .pattern import MaskPattern
from .request import AttentionRequest
from .sinks import share_with_sinks
from .visibility import position_mask, seen, sees_everything, visibility

__all__ = [
    "ATTENTION",
    "AttentionKind",
    "AttentionOutput",
    "AttentionPlan",
    "AttentionRequest",
    "MaskPattern",
    "position_mask",
    "seen",
    "sees_everything",
    "share_with_sinks",
    "visibility",
]
