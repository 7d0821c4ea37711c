"""Runtime modes: what a call is part of."""

from __future__ import annotations

__all__ = [
    "MODE_DECODE",
    "MODE_INSERT",
    "MODE_PREFILL",
    "MODE_TRAIN",
    "RUNTIME_MODES",
]

MODE_TRAIN = "__train__"
MODE_PREFILL = "__prefill__"
MODE_DECODE = "__autoregressive__"
MODE_INSERT = "__insert__"
RUNTIME_MODES = (MODE_TRAIN, MODE_PREFILL, MODE_DECODE, MODE_INSERT)
