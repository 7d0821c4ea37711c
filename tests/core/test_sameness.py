"""What one compiled program may stand for: values that nothing can tell apart."""

import dataclasses
import functools
import types
from decimal import Decimal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from switchax import (
    ATTENTION,
    BaseOperation,
    Capabilities,
    OperationMetadata,
    RegistrationError,
)
from switchax.sameness import is_same


@dataclasses.dataclass(frozen=True)
class Pair:
    left: object
    right: object = dataclasses.field(default=0, compare=False)


class Named(tuple):
    pass


class Raising:
    def __eq__(self, other):
        raise ValueError("never compared")

    __hash__ = object.__hash__


def named(values, name):
    result = Named(values)
    result.name = name
    return result


def holding_itself():
    values = [1]
    values.append(values)
    return values


ARRAY = np.ones(2)
DIFFERENT = [
    (1, True),
    (1, 1.0),
    (0.0, -0.0),
    (complex(0, 1), complex(-0.0, 1)),
    (np.float32(0), np.float32(-0.0)),
    (np.int32(1), np.int64(1)),
    (jnp.bfloat16(0), jnp.bfloat16(-0.0)),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ({1: 2}, {True: 2}),
    ({1, 2}, {1.0, 2}),
    (frozenset({0.0}), frozenset({-0.0})),
    ((1, 2), [1, 2]),
    (types.SimpleNamespace(a=1), types.SimpleNamespace(a=True)),
    (slice(0.0, 1), slice(-0.0, 1)),
    (Decimal("1.0"), Decimal("1.00")),
    (named((1,), "a"), named((1,), "b")),
    (Pair(1, 2), Pair(1, 3)),
    (Pair(1), Pair(True)),
    (Pair(np.ones(2)), Pair(np.ones(2))),
    (np.ones(2), np.ones(2)),
    (jnp.ones(2), jnp.ones(2)),
    (lambda: 1, lambda: 1),
    (Raising(), Raising()),
    (functools.partial(max, 1), functools.partial(max, 2)),
    (OperationMetadata(), OperationMetadata(backend="cpu")),
]
SAME = [
    (float("nan"), float("nan")),
    ((1, [2.5, {"a": None}]), (1, [2.5, {"a": None}])),
    ({3, 1, 2}, {2, 3, 1}),
    (Pair("x", (1,)), Pair("x", (1,))),
    (Pair(ARRAY), Pair(ARRAY)),
    (np.dtype("float32"), np.dtype("float32")),
    (np.float32(1.5), np.float32(1.5)),
    (Path("a/b"), Path("a/b")),
    (functools.partial(max, 1), functools.partial(max, 1)),
    (jax.sharding.PartitionSpec("dp"), jax.sharding.PartitionSpec("dp")),
    (OperationMetadata(), OperationMetadata()),
    (holding_itself(), holding_itself()),
]


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_what_can_be_told_apart(one, other):
    assert not is_same(one, other)
    assert not is_same((one,), (other,))


@pytest.mark.parametrize(("one", "other"), SAME)
def test_what_cannot_be_told_apart(one, other):
    assert is_same(one, other)
    assert is_same({"a": one}, {"a": other})


def operation(**body):
    def forward(self, query, key, value, *, softmax_scale):
        return query

    base = {
        "kind": ATTENTION,
        "capabilities": Capabilities(),
        "get_impl_name": classmethod(lambda cls: "mine"),
        "forward_native": forward,
    }
    return type("Mine", (BaseOperation,), base | body)


def test_an_operation_that_holds_itself_can_be_called_again():
    x = jnp.ones((1, 2, 1, 4))
    for _ in range(2):
        instance = operation()()
        instance.me = instance
        assert instance(x, x, x).attention_outputs.shape == x.shape


def test_attributes_in_slots_are_refused():
    x = jnp.ones((1, 2, 1, 4))
    with pytest.raises(RegistrationError, match="leave __slots__ out"):
        operation(__slots__=("gain",))()(x, x, x)


@pytest.mark.parametrize("body", [{"__slots__": ("gain",)}, {"__hash__": lambda s: 1}])
def test_metadata_that_is_compared_otherwise_is_refused(body):
    other = type("Other", (OperationMetadata,), body)
    with pytest.raises(TypeError, match=r"mine: expected metadata .*, got Other; "):
        operation()(other())


def test_metadata_as_a_plain_dataclass_is_told_what_to_add():
    @dataclasses.dataclass(frozen=True)
    class Gain(OperationMetadata):
        gain: float = 1.0

    with pytest.raises(TypeError, match="a dataclass with eq=False"):
        operation()(Gain(gain=2.0))
