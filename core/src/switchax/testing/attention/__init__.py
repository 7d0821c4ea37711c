"""Conformance of the kind `attention`: calls, tolerances, checks, the suite."""

from .calls import AttentionCall, Drawn, draw
from .suite import AttentionCase, AttentionSuite

__all__ = ["AttentionCall", "AttentionCase", "AttentionSuite", "Drawn", "draw"]
