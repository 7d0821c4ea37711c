"""The vocabulary: tokens, modes, the sentinel and the presets."""

import copy
import importlib
import json
import pickle
import typing
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import switchax
from switchax import axes
from switchax.axes import (
    EMPTY_VAL,
    HEAD,
    MODE_DECODE,
    MODE_TRAIN,
    NOT_GIVEN,
    DynamicShardingAxes,
    HiddenStateSharding,
    RowWise,
    check_mode,
)

# Measured on eformer 0.0.101 with jax 0.10.2.
CASES = json.loads((Path(__file__).parent / "data" / "partition.json").read_text())
PRESETS = [
    value
    for value in vars(axes).values()
    if isinstance(value, type) and issubclass(value, DynamicShardingAxes)
]
PRESETS.remove(DynamicShardingAxes)


@pytest.mark.parametrize(("name", "value"), CASES["tokens"].items())
def test_token_has_the_measured_value(name, value):
    assert getattr(axes, name) == value


def test_modes_in_all_their_forms_agree_and_cannot_change():
    assert set(typing.get_args(axes.RUNTIME_MODE_TYPES)) == set(axes.RUNTIME_MODES)
    assert frozenset({"__autoregressive__", "__insert__"}) == axes.GENERATION_MODES
    assert isinstance(axes.GENERATION_MODES, frozenset)
    assert isinstance(axes.RUNTIME_MODES, tuple)


def test_everything_named_is_there():
    assert len(set(axes.__all__)) == len(axes.__all__)
    assert all(hasattr(axes, name) for name in axes.__all__)


def test_twice_the_mask_value_is_finite_in_the_narrow_types():
    assert pytest.approx(-2.381976426469702e38) == axes.DEFAULT_MASK_VALUE
    for dtype in (np.float32, jnp.bfloat16):
        value = np.asarray(axes.DEFAULT_MASK_VALUE, dtype)
        assert np.isfinite(value)
        assert np.isfinite(value / 2)


def test_sentinel_is_one_object_whatever_is_done_to_it():
    assert EMPTY_VAL is NOT_GIVEN
    assert type(NOT_GIVEN)() is NOT_GIVEN
    assert copy.copy(NOT_GIVEN) is NOT_GIVEN
    assert copy.deepcopy([NOT_GIVEN])[0] is NOT_GIVEN
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(NOT_GIVEN, protocol)) is NOT_GIVEN
    assert repr(NOT_GIVEN) == "NOT_GIVEN"


def test_sentinel_survives_a_reload():
    before = dict(vars(axes))
    try:
        importlib.reload(axes)
        assert axes.NOT_GIVEN is NOT_GIVEN
        assert axes.EMPTY_VAL is NOT_GIVEN
        assert axes.NotGiven() is NOT_GIVEN
        assert pickle.loads(pickle.dumps(NOT_GIVEN)) is NOT_GIVEN
    finally:
        vars(axes).update(before)  # other tests hold the classes from before


def test_there_are_seventeen_presets():
    assert len(PRESETS) == 17


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.__name__)
def test_preset_is_read_from_the_class_and_from_an_instance(preset):
    assert isinstance(preset.axes, tuple)
    assert preset().axes == preset.axes
    assert preset().mode == preset.mode
    own = preset(axes=[HEAD, ["a", "b"]], mode=MODE_DECODE)
    assert own.axes == (HEAD, ("a", "b"))
    assert own.mode == MODE_DECODE
    assert preset(axes=(HEAD,)).mode == preset.mode
    assert preset(mode=0).axes == preset.axes
    assert type(preset(mode=np.int64(0)).mode) is int
    assert preset.__doc__


def test_presets_are_values():
    own = DynamicShardingAxes(axes=[HEAD], mode=0)
    assert own == DynamicShardingAxes([HEAD], 0)
    assert hash(own) == hash(DynamicShardingAxes((HEAD,), 0))
    assert RowWise() == pickle.loads(pickle.dumps(RowWise()))
    assert RowWise() != HiddenStateSharding()
    assert "axes=('__HEAD__',), mode=0" in repr(own)
    with pytest.raises(AttributeError):
        own.mode = 1


def test_axes_without_a_preset_need_both():
    with pytest.raises(TypeError, match="no axes"):
        DynamicShardingAxes(mode=0)
    with pytest.raises(TypeError, match="no mode"):
        DynamicShardingAxes(axes=[HEAD])


def test_wrong_values_of_a_preset_are_found_when_it_is_made():
    with pytest.raises(ValueError, match="a sequence of axes"):
        HiddenStateSharding(axes="__HEAD__")
    with pytest.raises(ValueError, match="did you mean '__train__'"):
        HiddenStateSharding(mode="train")
    with pytest.raises(TypeError, match="sequence of axes"):
        HiddenStateSharding(axes=3)


@pytest.mark.parametrize("mode", axes.RUNTIME_MODES)
def test_check_mode_returns_a_mode(mode):
    assert check_mode("f", mode) == mode


@pytest.mark.parametrize("mode", [None, "train", "", 1, ["__train__"], b"__train__"])
def test_check_mode_refuses_everything_else(mode):
    expected = r"^f: expected a runtime mode, got mode=.*switchax.MODE_DECODE='__auto"
    with pytest.raises(ValueError, match=expected):
        check_mode("f", mode)


def test_modes_stay_what_they_were_for_everyone_else():
    assert switchax.MODE_TRAIN is MODE_TRAIN
