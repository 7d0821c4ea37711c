"""Rotary position embedding as an operation kind of its own for Switchax."""

from .api import rotary
from .kind import ROTARY
from .oracle import rotary_oracle
from .request import RotaryRequest

__all__ = ["ROTARY", "RotaryRequest", "rotary", "rotary_oracle"]
