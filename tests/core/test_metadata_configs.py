"""Explicit configurations: whose they are, and metadata as JSON."""

import contextlib
import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import switchax
from switchax import (
    ContestedNameError,
    OperationMetadata,
    OperationRegistry,
    RegistrationError,
    UnknownOperationError,
)
from switchax.metadata.fields import CONFIG_NAMES
from switchax.partition import PartitionAxis, PartitionManager

from .standins import defined_elsewhere, registration, stand_in

PLUGIN = __name__.partition(".")[0]


@dataclasses.dataclass(frozen=True)
class Blocks:
    block_q: int = 128
    block_kv: int = 128
    stages: tuple = ()
    scale: float = 1.0
    note: str | None = None

    def __post_init__(self):
        if not isinstance(self.block_q, int) or self.block_q < 1:
            raise ValueError(f"Blocks: expected block_q > 0, got {self.block_q!r}")


@dataclasses.dataclass(frozen=True)
class Warps:
    warps: int = 4


def operation(*names, config_class=Blocks, seen=None, **capabilities):
    def forward_native(self, query, key, value, *, softmax_scale):
        if seen is not None:
            seen.append(self.config)
        return query

    cls = stand_in(*names, methods={"forward_native": forward_native}, **capabilities)
    cls.config_class = config_class
    return cls


@pytest.fixture
def register():
    with registration() as register:
        yield register


@pytest.fixture
def ours(register):
    """An operation of three names, and one that takes no config."""
    register(operation("blocked", "flash_test"))
    register(operation("plain", config_class=None))
    return OperationRegistry.get("blocked")


def qualified(name):
    entries = switchax.registrations.entries()
    return next(entry.qualified for entry in entries if entry.name == name)


def configured(**configs):
    return OperationMetadata(operation_configs=configs)


def call(name, metadata):
    x = jnp.ones((1, 4, 2, 8))
    return switchax.attention(x, x, x, operation=name, metadata=metadata)


# By name.


@pytest.mark.parametrize("given", ["blocked", "flash_test", "qualified"])
@pytest.mark.parametrize("asked", ["blocked", "flash_test", "qualified", " blocked "])
def test_a_config_is_found_by_any_name_of_the_operation(ours, given, asked):
    names = {"qualified": qualified("blocked")}
    config = Blocks(64)
    metadata = configured(**{names.get(given, given): config})
    assert metadata.get_operation_config(names.get(asked, asked)) is config
    assert ours(metadata).config is config


def test_without_a_config_there_is_none(ours):
    assert OperationMetadata().get_operation_config("blocked") is None
    assert configured(blocked=None).get_operation_config("blocked") is None
    assert configured(blocked=Blocks()).get_operation_config("plain") is None
    assert ours().config is None


def test_the_most_precise_name_wins(ours):
    full = qualified("blocked")
    configs = {"flash_test": Blocks(1), "blocked": Blocks(2), full: Blocks(3)}
    for name in (full, "blocked", "flash_test"):
        metadata = OperationMetadata(operation_configs=configs)
        assert metadata.get_operation_config("flash_test") == configs.pop(name)


def test_a_shared_name_is_the_operation_behind_it_on_the_device(register):
    register(operation("on_cpu", "shared_test", platforms={"cpu"}))
    register(operation("on_tpu", "shared_test", config_class=Warps, platforms={"tpu"}))
    blocks, warps = configured(shared_test=Blocks()), configured(shared_test=Warps())
    assert blocks.get_operation_config("shared_test") == Blocks()
    assert blocks.get_operation_config("on_cpu") == Blocks()
    assert blocks.get_operation_config("on_tpu") is None
    assert warps.get_operation_config("shared_test") is None
    assert warps.replace(backend="tpu").get_operation_config("shared_test") == Warps()
    elsewhere = warps.replace(backend="rocm")
    assert elsewhere.get_operation_config("shared_test") == Warps()
    assert call("on_cpu", warps).shape == (1, 4, 2, 8)
    for metadata in (blocks, warps):
        assert OperationMetadata.from_json(metadata.to_json()) == metadata


def test_the_operation_sees_its_config(register):
    seen = []
    register(operation("blocked", "flash_test", seen=seen))
    for name in ("blocked", "flash_test"):
        call(name, configured(flash_test=Blocks(32)))
        call(name, configured(blocked=Blocks(64)))
    assert seen == [Blocks(32), Blocks(64)]  # traced once for each config


# What cannot be honoured.


USES = {
    "call": call,
    "create": OperationRegistry.create,
    "class": lambda name, metadata: OperationRegistry.get(name)(metadata),
    "get": lambda name, metadata: metadata.get_operation_config(name),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_config_for_an_unknown_operation_names_the_near_miss(ours, use):
    metadata = configured(blokced=Blocks())
    with pytest.raises(
        UnknownOperationError, match=r"'blokced'.*did you mean 'blocked'"
    ):
        use("blocked", metadata)


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_config_for_an_operation_that_takes_none_is_an_error(ours, use):
    with pytest.raises(ValueError, match=r"operation_configs\['plain'\].*takes none"):
        use("blocked", configured(plain=Blocks()))


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_config_of_another_class_is_a_type_error(ours, use):
    with pytest.raises(TypeError, match=r"expected a Blocks, got operation_configs"):
        use("blocked", configured(blocked=Warps()))
    with pytest.raises(TypeError, match="expected a Blocks"):
        use("blocked", configured(flash_test=("frozen", 1)))


def test_a_contested_name_is_an_error(register):
    register(operation("twice"))
    register(defined_elsewhere(operation("twice")))
    with pytest.raises(ContestedNameError, match="one owner of 'twice'"):
        configured(twice=Blocks()).get_operation_config("twice")


def test_get_operation_config_of_what_nobody_is(ours):
    with pytest.raises(UnknownOperationError, match="did you mean 'blocked'"):
        OperationMetadata().get_operation_config("blockd")
    with pytest.raises(TypeError, match="impl_name="):
        OperationMetadata().get_operation_config(3)


def test_an_operation_need_not_be_registered_to_be_configured():
    cls = operation("unregistered_test")
    assert cls(configured(unregistered_test=Blocks(8))).config == Blocks(8)
    with pytest.raises(UnknownOperationError, match="'nobody_test'"):
        cls(configured(nobody_test=Blocks()))


def test_operation_configs_are_a_mapping_of_frozen_configs():
    with pytest.raises(TypeError, match="a mapping from operation name to config"):
        OperationMetadata(operation_configs=[Blocks()])
    with pytest.raises(TypeError, match=r"frozen configs, got .*'blocked'"):
        configured(blocked={"block_q": 1})
    with pytest.raises(TypeError, match="names of operations"):
        OperationMetadata(operation_configs={1: Blocks()})


@dataclasses.dataclass
class Thawed:
    block_q: int = 1


@dataclasses.dataclass(frozen=True)
class Unhashable:
    block_q: int = 1
    __hash__ = None


@pytest.mark.parametrize("wrong", [Thawed, Unhashable, int, Blocks(), "Blocks"])
def test_a_config_class_is_a_frozen_dataclass(register, wrong):
    with pytest.raises(RegistrationError, match="expected config_class to be"):
        register(operation("wrong", config_class=wrong))


def test_create_says_that_a_mapping_is_no_metadata(ours):
    with pytest.raises(TypeError, match=r"an OperationMetadata, got metadata=\{\}"):
        OperationRegistry.create("blocked", {})


# JSON.


BLOCKS = st.builds(
    Blocks,
    block_q=st.integers(1, 2**62),
    stages=st.recursive(st.integers(-9, 9) | st.booleans(), lambda x: st.tuples(x, x)),
    scale=st.floats(allow_nan=False, allow_infinity=False),
    note=st.none() | st.text(max_size=8),
)
NAMES = st.sampled_from(["sp", "cp", "ring", "model"])
PAXES = st.builds(
    PartitionAxis,
    tensor_parallel_axis=NAMES,
    batch_axis=st.none() | st.tuples(NAMES, st.just("dp")),
    decode_head_axis=st.none() | NAMES,
)
DTYPES = st.none() | st.sampled_from(["bfloat16", "float16", "float32", "float64"])
METADATA = st.fixed_dictionaries(
    {},
    optional={
        "runtime_dtype": DTYPES | st.just(jnp.bfloat16),
        "runtime_softmax_dtype": DTYPES,
        "sequence_axis_name": st.none()
        | NAMES
        | st.lists(NAMES, min_size=1, max_size=3, unique=True).map(tuple),
        "platform": st.none() | st.sampled_from(["jax", "pallas", "triton"]),
        "backend": st.none() | st.sampled_from(["cpu", "cuda", "rocm", "tpu", "tt"]),
        "operation_configs": st.dictionaries(
            st.sampled_from(["blocked", "flash_test", f"{PLUGIN}:blocked"]), BLOCKS
        ),
    },
)
PARTITIONS = st.one_of(
    st.just({}),
    PAXES.map(lambda paxis: {"partition_axis": paxis}),
    PAXES.map(lambda paxis: {"partition_manager": PartitionManager(paxis)}),
)


@settings(deadline=None)
@given(values=METADATA, partition=PARTITIONS)
def test_json_round_trips(values, partition):
    with registration() as register:
        register(operation("blocked", "flash_test"))
        configs = values.get("operation_configs", {})
        names = {f"{PLUGIN}:blocked": qualified("blocked")}
        renamed = {names.get(name, name): c for name, c in configs.items()}
        metadata = OperationMetadata(
            **{**values, **partition, "operation_configs": renamed}
        )
        data = metadata.to_dict()
        assert json.loads(json.dumps(data)) == data
        for again in (
            OperationMetadata.from_json(metadata.to_json()),
            OperationMetadata.from_json(metadata.to_json(indent=2)),
            OperationMetadata.from_dict(data),
        ):
            assert again == metadata
            assert hash(again) == hash(metadata)
            for field in CONFIG_NAMES:
                assert getattr(again, field) == getattr(metadata, field)


def test_the_mesh_is_no_part_of_json():
    meshed = OperationMetadata(mesh=jax.make_mesh((2,), ("dp",)))
    assert meshed.to_dict() == OperationMetadata().to_dict()


def test_numbers_of_numpy_are_plain_numbers_in_json(ours):
    metadata = configured(blocked=Blocks(stages=(np.int32(3), np.float32(0.5))))
    assert OperationMetadata.from_json(metadata.to_json()) == metadata


@pytest.mark.parametrize(
    "value", [object(), jnp.float32, {1}, float("inf"), 2**63, ((),) * 2 + (1j,)]
)
def test_a_config_that_is_no_json_data_is_a_type_error(ours, value):
    note = value if not isinstance(value, set) else frozenset(value)
    with pytest.raises(TypeError, match=r"operation_configs\['blocked'\].*note="):
        configured(blocked=Blocks(note=note)).to_json()


def test_attributes_of_ones_own_are_not_lost_in_silence():
    metadata = OperationMetadata()
    metadata.set_attrs_carefully("block", 1)
    with pytest.raises(TypeError, match="the attribute 'block'"):
        metadata.to_json()


def test_a_config_of_no_operation_is_not_written(ours):
    with pytest.raises(UnknownOperationError, match="'nobody'"):
        configured(nobody=Blocks()).to_json()
    with pytest.raises(ValueError, match="a config of the operation"):
        configured(blocked=Warps()).to_json()


CONFIG = '{"operation_configs": {"blocked": %s}}'
VALUES = CONFIG % '{"operation": "blocked", "values": %s}'
HOSTILE = [
    "",
    "nonsense",
    "null",
    "3",
    "[]",
    '{"runtime_dtpe": "float32"}',
    '{"mesh": null}',
    '{"base_config": {}}',
    '{"__class__": "os.system"}',
    '{"py/object": "os.system"}',
    '{"runtime_dtype": "x"}',
    '{"runtime_dtype": 3}',
    '{"runtime_dtype": ["float32"]}',
    '{"runtime_dtype": "%s"}' % ("f4," * 100_000),
    '{"runtime_dtype": "float32", "runtime_dtype": "float16"}',
    '{"runtime_softmax_dtype": "int32"}',
    '{"runtime_softmax_dtype": {"names": ["a"], "formats": ["f4"]}}',
    '{"platform": "jx"}',
    '{"platform": %s}' % ("9" * 4000),
    '{"backend": %s}' % ("9" * 10_000),
    '{"backend": "%s"}' % ("tpu" * 100_000),
    '{"backend": 1e999}',
    '{"backend": NaN}',
    '{"platform": "tpu", "backend": "cpu"}',
    '{"sequence_axis_name": 3}',
    '{"sequence_axis_name": ""}',
    '{"sequence_axis_name": ["sp", 1]}',
    '{"sequence_axis_name": [["sp"]]}',
    '{"partition_axis": 3}',
    '{"partition_axis": "tp"}',
    '{"partition_axis": {"head_axs": "tp"}}',
    '{"partition_axis": {"head_axis": {}}}',
    '{"partition_axis": {"head_axis": "a"}, "partition_manager": {"paxis": {}}}',
    '{"partition_manager": []}',
    '{"partition_manager": {}}',
    '{"partition_manager": {"paxis": {"head_axis": 1.5}}}',
    '{"operation_configs": 3}',
    '{"operation_configs": []}',
    '{"operation_configs": {"nobody": {"operation": "nobody", "values": {}}}}',
    '{"operation_configs": {"os:system": {"operation": "os", "values": {}}}}',
    '{"operation_configs": {"plain": {"operation": "plain", "values": {}}}}',
    CONFIG % "3",
    CONFIG % "null",
    CONFIG % "{}",
    CONFIG % '{"operation": "blocked"}',
    CONFIG % '{"operation": 3, "values": {}}',
    CONFIG % '{"operation": "plain", "values": {}}',
    CONFIG % '{"operation": "os.system", "values": {}}',
    CONFIG % '{"operation": "subprocess:Popen", "values": {"args": "id"}}',
    CONFIG % '{"operation": "blocked", "values": {}, "module": "os"}',
    CONFIG % '{"module": "os", "class": "system"}',
    VALUES % "3",
    VALUES % "[128]",
    VALUES % '{"blok_q": 1}',
    VALUES % '{"__class__": 1}',
    VALUES % '{"block_q": 0}',
    VALUES % '{"block_q": "x"}',
    VALUES % '{"block_q": {}}',
    VALUES % '{"block_q": %s}' % ("9" * 30),
    VALUES % '{"scale": 1e999}',
    VALUES % ('{"stages": ' + "[" * 40 + "]" * 40 + "}"),
    VALUES % ('{"stages": ' + "[" * 900 + "]" * 900 + "}"),
    VALUES % ('{"stages": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    "[" * 100_000,
    '{"operation_configs": ' * 50_000 + "1" + "}" * 50_000,
    "\x00",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_json_gives_one_clear_error(ours, text):
    before = set(sys.modules)
    with pytest.raises(ValueError, match=r"^(OperationMetadata|Partition)\w*[.:]") as e:
        OperationMetadata.from_json(text)
    assert len(str(e.value)) < 2000
    assert set(sys.modules) == before, "nothing was imported"


@pytest.mark.parametrize("data", [None, 3, "x", [1]])
def test_from_dict_of_what_is_no_mapping(data):
    with pytest.raises(TypeError, match=r"^OperationMetadata\.from_dict: "):
        OperationMetadata.from_dict(data)


def test_from_json_of_what_is_no_text():
    with pytest.raises(TypeError, match=r"^OperationMetadata\.from_json: "):
        OperationMetadata.from_json(b"{}")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["blocked", "operation", "values", "block_q", "paxis"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)
MEMBERS = st.dictionaries(st.sampled_from([*CONFIG_NAMES]), JSON, max_size=4)


@settings(deadline=None)
@given(data=JSON | MEMBERS)
def test_any_json_is_metadata_or_a_value_error(data):
    with registration() as register:
        register(operation("blocked", "flash_test"))
        metadata = None
        with contextlib.suppress(ValueError):
            metadata = OperationMetadata.from_json(json.dumps(data))
        if metadata is not None:
            assert OperationMetadata.from_json(metadata.to_json()) == metadata
