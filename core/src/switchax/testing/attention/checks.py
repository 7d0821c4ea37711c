"""What is asked of one call: each check compares an operation with the oracle."""

from __future__ import annotations

from collections.abc import Callable

from switchax.testing.suite import Finding

from .refusals import check_keywords, check_refused, check_underivable
from .subject import Subject
from .transforms import (
    check_forward_mode,
    check_mapped,
    check_mapped_dropout,
    check_mapped_operands,
    check_mesh,
    check_second_order,
    check_sequence_mesh,
    check_shard_map,
    check_transforms,
)
from .turns import check_at_once, check_in_turn
from .values import (
    check_accumulation,
    check_alone,
    check_effect,
    check_lse,
    check_value,
    check_weights,
)
from .weights import check_dropout, check_hidden

__all__ = ["CHECKS"]

CHECKS: dict[str, Callable[[Subject], Finding]] = {
    "value": check_value,
    "x64": check_value,  # where JAX has 64-bit types: see `AttentionCase.run`
    "accumulation": check_accumulation,
    "alone": check_alone,
    "lse": check_lse,
    "weights": check_weights,
    "effect": check_effect,
    "hidden": check_hidden,
    "dropout": check_dropout,
    "refused": check_refused,
    "underivable": check_underivable,
    "keywords": check_keywords,
    "transforms": check_transforms,
    "mapped": check_mapped,
    "mapped dropout": check_mapped_dropout,
    "mapped operands": check_mapped_operands,
    "in turn": check_in_turn,
    "at once": check_at_once,
    "mesh": check_mesh,
    "sequence mesh": check_sequence_mesh,
    "shard_map": check_shard_map,
    "forward mode": check_forward_mode,
    "second order": check_second_order,
}
