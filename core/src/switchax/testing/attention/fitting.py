"""Brings calls to sizes that an operation takes, where it does not take any."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from switchax.matching import refusals_of
from switchax.operation import BaseOperation, forward_method
from switchax.target import Target, current_target
from switchax.testing.running import wide_types

from .calls import AttentionCall, draw

__all__ = ["Fitting"]


class Fitting:
    """Looks for the nearest call that an operation does not refuse.

    Args:
        operation: The class.
        platform: Where it runs.
    """

    def __init__(self, operation: type[BaseOperation], platform: str) -> None:
        self._operation = operation
        here = current_target()
        self._target = here if here.platform == platform else Target(platform)
        self._metadata = operation().metadata

    def fitted(self, call: AttentionCall) -> AttentionCall:
        """Returns the call, or one of other sizes, or the call if all are refused."""
        return next(filter(self._is_taken, self._nearby(call)), call)

    def _is_taken(self, call: AttentionCall) -> bool:
        cls, platform = self._operation, self._target.platform
        drawn = draw(call, dirty=False)
        shapes = {
            name: array
            if name == "dropout_key"
            else jax.ShapeDtypeStruct(array.shape, array.dtype)  # type: ignore[no-untyped-call]
            for name, array in drawn.arrays.items()
        }
        with wide_types(call.dtype):
            given = {**shapes, **drawn.options}
            request = cls.kind.request(self._metadata, **given)
            plan = cls.kind.plan(request, cls.capabilities)
            method = forward_method(cls, platform)
            return not refusals_of(cls, plan, self._target, method)

    def _nearby(self, call: AttentionCall) -> Iterator[AttentionCall]:
        yield call
        rounded = self._rounded(call)
        yield rounded
        for change in _CHANGES:
            yield self._rounded(dataclasses.replace(rounded, **change))

    def _rounded(self, call: AttentionCall) -> AttentionCall:
        """Sizes up to a multiple, down to a limit, in a layout that is declared."""
        declared = self._operation.capabilities
        sizes: dict[str, Any] = {}
        for name in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"):
            sizes[name] = self._size(name, getattr(call, name))
        if call.v_head_dim is not None:
            sizes["v_head_dim"] = self._size("v_head_dim", call.v_head_dim)
        if sizes["heads"] % sizes["kv_heads"]:
            sizes["heads"] = sizes["kv_heads"]
        if declared.layouts == ("thd",):
            sizes |= {"layout": "thd", "lengths": ""}
        return dataclasses.replace(call, **sizes)

    def _size(self, name: str, size: int) -> int:
        declared = self._operation.capabilities
        step = declared.multiples.get(name, 1)
        size = -(-size // step) * step
        most = declared.limits.get(name, size)
        return min(size, most - most % step or most)


# Forms that kernels are made for; the first ones change least.
_CHANGES: tuple[dict[str, Any], ...] = (
    {"head_dim": 64},
    {"head_dim": 128},
    {"q_len": 128, "kv_len": 128},
    {"q_len": 128, "kv_len": 128, "head_dim": 64},
    {"q_len": 128, "kv_len": 128, "head_dim": 128},
    {"heads": 8, "kv_heads": 8},
    {"heads": 8, "kv_heads": 8, "head_dim": 64},
    {"heads": 8, "kv_heads": 8, "head_dim": 128},
    {"heads": 8, "kv_heads": 8, "q_len": 128, "kv_len": 128, "head_dim": 128},
    {"q_len": 1},
    {"q_len": 1, "kv_len": 128, "head_dim": 128},
    {"causal": True},
    {"causal": True, "q_len": 128, "kv_len": 128, "head_dim": 128},
    {"layout": "thd", "lengths": ""},
)
