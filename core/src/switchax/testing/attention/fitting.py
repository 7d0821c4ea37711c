"""Brings calls to sizes that an operation takes, where it does not take any."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from typing import Any

import jax
import numpy as np

from switchax.errors import Refusal
from switchax.kinds.attention.features import FEATURES
from switchax.matching import refusals_of
from switchax.operation import BaseOperation, forward_method
from switchax.target import Target, current_target
from switchax.testing.running import wide_types

from .calls import AttentionCall, draw

__all__ = ["Fitting"]

_Change = tuple[tuple[str, Any], ...]

_AXES = {"batch", "q_len", "kv_len", "heads", "kv_heads", "head_dim", "v_head_dim"}
_ROUNDS = 6
# Of the numbers in a refusal's text: more, or larger, are hardly sizes to test with.
_MOST, _LARGEST = 3, 2048
_LONG = 512  # from here on one sample is enough


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
        self._fitted: list[_Change] = []
        self._known: dict[AttentionCall, bool] = {}

    def fitted(self, call: AttentionCall) -> AttentionCall:
        """Returns the call, or one of other sizes, or the call if all are refused."""
        if self._is_taken(call):
            return call
        if not self._can_fit(AttentionCall(dtype=call.dtype)):
            return call
        if not self._can_fit(_alike(call)):
            return call
        return self._first(call) or call

    def beside(self, call: AttentionCall) -> AttentionCall:
        """Returns a call of something undeclared, in sizes that are taken without it.

        So that it is refused for what it uses, and for no size.
        """
        dtypes = self._operation.capabilities.dtypes
        plain = AttentionCall(dtype=call.dtype if call.dtype in dtypes else min(dtypes))
        taken = self._first(plain) if self._can_fit(plain) else None
        if taken is None or taken == plain:
            return call
        changed = _applied(call, _difference(plain, taken))
        if call.kv_heads < call.heads:
            heads = max(changed.heads, 2)
            changed = dataclasses.replace(changed, heads=heads, kv_heads=heads // 2)
        if call.v_head_dim is not None:
            v_head_dim = max(changed.head_dim // 2, 1)
            changed = dataclasses.replace(changed, v_head_dim=v_head_dim)
        if changed.offset == "last" and changed.q_len == changed.kv_len:
            changed = dataclasses.replace(changed, offset="traced")  # 0 is no feature
        return changed

    def _can_fit(self, call: AttentionCall) -> bool:
        """Whether any form of a call is taken; asked once of each."""
        if call not in self._known:
            self._known[call] = self._first(call) is not None
        return self._known[call]

    def _first(self, call: AttentionCall) -> AttentionCall | None:
        """The first form of a call that is taken; what fitted before comes first."""
        rounded = self._rounded(call)
        if self._is_taken(rounded):
            return rounded
        if any(refusal.field == "batch" for refusal in self._declared(rounded)):
            return None  # packed tokens are one sample, and no form changes that
        if any(_is_of_dtype(refusal) for refusal in self._refusals(rounded)):
            return None  # nor a dtype
        said = self._as_told(rounded)
        numbers = _numbers(self._refusals(said))
        needed = tuple(p for p in _difference(rounded, said) if p[0] in _USING)
        changes = [*_CHANGES, *_of_numbers(numbers)]
        if needed:
            changes = [change + needed for change in changes] + changes
        else:
            changes += self._using_one(rounded)
        changes = [_difference(rounded, said), *self._fitted, *changes]
        for change in dict.fromkeys(changes):
            changed = self._rounded(_applied(rounded, change))
            if self._is_taken(changed):
                self._fitted.append(change)
                return changed
        return None

    def _using_one(self, call: AttentionCall) -> list[_Change]:
        """Forms that use one thing more of what is declared, which may be needed."""
        declared = self._operation.capabilities.features
        using: list[_Change] = [
            _use_of(feature, declared)
            for feature in _NEEDED
            if feature in declared - call.features
        ]
        return _products(_HEAD_DIMS, [(), (("q_len", 1),)], using)

    def _as_told(self, call: AttentionCall) -> AttentionCall:
        """The call with what refusals name, sizes and features, one after the other."""
        declared = self._operation.capabilities.features
        for _ in range(_ROUNDS):
            refusals = self._refusals(call)
            change = tuple(_named_sizes(call, refusals).items())
            for feature in sorted(_named_features(refusals) & declared - call.features):
                change += _use_of(feature, declared)
            changed = self._rounded(_applied(call, change))
            if changed == call:
                break
            call = changed
        return call

    def _is_taken(self, call: AttentionCall) -> bool:
        return not self._refusals(call)

    def _refusals(self, call: AttentionCall) -> list[Refusal]:
        """Why a call is refused; rules that raise are none of it."""
        cls, platform = self._operation, self._target.platform
        drawn = draw(call, dirty=False, rng=_Zeros())
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
            refusals = refusals_of(cls, plan, self._target, method)
            return [refusal for refusal in refusals if refusal.code != "fault"]

    def _declared(self, call: AttentionCall) -> list[Refusal]:
        """Those refusals of a call that `multiples` and `limits` say."""
        told = {"multiple", "limit"}
        return [refusal for refusal in self._refusals(call) if refusal.code in told]

    def _rounded(self, call: AttentionCall) -> AttentionCall:
        """Sizes up to a multiple, down to a limit, in a layout that is declared."""
        declared = self._operation.capabilities
        sizes: dict[str, Any] = {}
        for name in ("batch", "heads", "kv_heads", "q_len", "kv_len", "head_dim"):
            sizes[name] = self._size(name, getattr(call, name))
        if call.v_head_dim is not None:
            sizes["v_head_dim"] = self._size("v_head_dim", call.v_head_dim)
        sizes["kv_heads"] = math.gcd(sizes["heads"], sizes["kv_heads"])
        if declared.layouts == ("thd",):
            sizes |= {"layout": "thd"}
        return dataclasses.replace(call, **sizes)

    def _size(self, name: str, size: int) -> int:
        declared = self._operation.capabilities
        step = declared.multiples.get(name, 1)
        size = -(-size // step) * step
        most = declared.limits.get(name, size)
        return min(size, most - most % step or most)


def _is_of_dtype(refusal: Refusal) -> bool:
    words = set(re.findall(r"\w+", refusal.field))
    return "dtype" in words and not words & _AXES


def _named_sizes(call: AttentionCall, refusals: list[Refusal]) -> dict[str, Any]:
    """The sizes of axes that refusals name, each the nearest from the call's on."""
    allowed: dict[str, list[int]] = {}
    for refusal in refusals:
        for axis in _AXES & set(re.findall(r"\w+", refusal.field)):
            allowed.setdefault(axis, []).extend(_numbers([refusal]))
        for axis, number in re.findall(r"(\w+)\W{1,4}(\d+)", refusal.allowed):
            if axis in _AXES and 0 < int(number) <= _LARGEST:
                allowed.setdefault(axis, []).append(int(number))
    sizes = {}
    for axis, numbers in allowed.items():
        now = getattr(call, axis)
        now = call.head_dim if now is None else now
        later = [n for n in numbers if n > now]
        if numbers and now not in numbers:
            sizes[axis] = min(later) if later else max(numbers)
    return sizes


def _named_features(refusals: list[Refusal]) -> set[str]:
    """The features that refusals name, by their own name or by their arguments'."""
    names = {argument: n for n, f in FEATURES.items() for argument in f.arguments}
    names |= {n: n for n in _NEEDED}
    words = re.findall(r"\w+", " ".join(f"{r.field} {r.allowed}" for r in refusals))
    return {names[word] for word in words if names.get(word) in _NEEDED}


def _use_of(feature: str, declared: AbstractSet[str]) -> _Change:
    """How a call uses a feature, beside what is declared."""
    use = _NEEDED[feature]
    if "offset" in use and "causal" not in declared:
        use = {"offset": use["offset"], **_NEEDED["window"]}
    return tuple(use.items())


def _numbers(refusals: list[Refusal]) -> list[int]:
    """The numbers in what refusals allow that could be sizes."""
    found = re.findall(r"(?<![\w.])\d+(?![\w.])", " ".join(r.allowed for r in refusals))
    return sorted({int(n) for n in found if 0 < int(n) <= _LARGEST})[:_MOST]


def _difference(one: AttentionCall, other: AttentionCall) -> _Change:
    fields = dataclasses.fields(one)
    pairs = [(f.name, getattr(other, f.name)) for f in fields]
    return tuple((n, x) for n, x in pairs if getattr(one, n) != x)


def _applied(call: AttentionCall, change: _Change) -> AttentionCall:
    """A changed call, which uses of what it used what it did."""
    default, fields = AttentionCall(), dict(change)
    for name in _USING & fields.keys():
        now = getattr(call, name)
        if fields[name] == getattr(default, name) or now == getattr(default, name):
            continue
        is_other = {now, fields[name]} == {"q", "kv"}
        fields[name] = "both" if is_other else now
    return dataclasses.replace(call, **fields)


def _of_numbers(numbers: list[int]) -> list[_Change]:
    """Forms in which numbers that refusals speak of are sizes of any axis."""
    if not numbers:
        return []
    head_dims: list[_Change] = [(), *((("head_dim", n),) for n in numbers)]
    head_dims += [
        (("head_dim", one), ("v_head_dim", other))
        for one, other in itertools.permutations(numbers, 2)
    ]
    lengths: list[_Change] = [()]
    for n in numbers:
        few: _Change = (("batch", 1),) if n > _LONG else ()
        lengths += [(("q_len", n), ("kv_len", n), *few)]
        lengths += [(("q_len", 1), ("kv_len", n))]
    pair: _Change = (("heads", 2), ("kv_heads", 1))
    return _products(head_dims, lengths, [(), pair, *_GROUPS[1:]], _OTHERS)


def _products(*choices: Iterable[_Change]) -> list[_Change]:
    """One of each, those first that change the fewest things."""
    return [
        sum(parts, ())
        for parts in sorted(
            itertools.product(*choices), key=lambda parts: sum(map(bool, parts))
        )
    ]


def _alike(call: AttentionCall) -> AttentionCall:
    """A call that uses the same, in the sizes and with the values of the default."""
    default = AttentionCall()
    sizes = ("batch", "q_len", "kv_len", "head_dim")
    values = ("factor", "alike", "seed", "bias_level", "sink_level")
    return dataclasses.replace(
        call, **{name: getattr(default, name) for name in sizes + values}
    )


# How a call uses what a kernel may need.
_NEEDED: dict[str, dict[str, Any]] = {
    "bias": {"bias": "full"},
    "mask": {"mask": "full"},
    "mask_pattern": {"pattern": "noise"},
    "segment_ids": {"segments": "ids"},
    "q_lengths": {"lengths": "q"},
    "kv_lengths": {"lengths": "kv"},
    "causal": {"causal": True},
    "window": {"window": (64, 0)},
    "q_offset": {"causal": True, "offset": "last"},
    "q_offset_per_batch": {"causal": True, "offset": "batch"},
    "logits_soft_cap": {"soft_cap": 2.0},
    "softmax_aux": {"sinks": 0},
}
_USING = {name for use in _NEEDED.values() for name in use}


class _Zeros(np.random.Generator):
    """Draws zeros: a call's shapes are wanted, not its values."""

    def __init__(self) -> None:
        super().__init__(np.random.PCG64(0))

    def normal(self, *args: Any, size: Any = None, **rest: Any) -> Any:
        """Returns zeros."""
        return np.zeros(size)

    def random(self, size: Any = None, *args: Any, **rest: Any) -> Any:
        """Returns zeros."""
        return np.zeros(size)


_HEAD_DIMS: tuple[_Change, ...] = (
    (),
    (("head_dim", 64),),
    (("head_dim", 128),),
    *((("head_dim", size),) for size in (32, 80, 96, 256)),
    (("head_dim", 192), ("v_head_dim", 128)),
    (("head_dim", 192),),
)
_LENGTHS: tuple[_Change, ...] = (
    (),
    *((("q_len", size), ("kv_len", size)) for size in (128, 256, 512)),
    (("q_len", 1),),
    *((("q_len", 1), ("kv_len", size)) for size in (128, 512)),
)
_GROUPS: tuple[_Change, ...] = (
    (),
    (("heads", 8), ("kv_heads", 8)),
    (("heads", 8), ("kv_heads", 1)),
    (("heads", 1), ("kv_heads", 1)),
    (("heads", 32), ("kv_heads", 4)),
)
_OTHERS: tuple[_Change, ...] = (
    (),
    (("causal", True),),
    (("batch", 1),),
    (("layout", "thd"),),
    (("segments", "ids"),),
    (("segments", "ids"), ("causal", True)),  # a decoder's kernel of packed tokens
)
# Forms that kernels are made for: first those that change one thing.
_CHANGES = _products(_HEAD_DIMS, _LENGTHS, _GROUPS, _OTHERS)
