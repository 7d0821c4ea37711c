"""`OperationMetadata`: its fields, where they come from, and what it is as a value."""

import copy
import dataclasses
import enum
import pickle
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh

import switchax
from switchax import OperationMetadata, UnsupportedError
from switchax.axes import MODE_TRAIN
from switchax.metadata.fields import CONFIG_NAMES
from switchax.partition import (
    PartitionAxis,
    PartitionManager,
    get_partition_manager,
)

from .meshes import entered

FIELDS = tuple(CONFIG_NAMES)
PAXIS = PartitionAxis(tensor_parallel_axis="model")


def mesh_of(name):
    return Mesh(np.array(jax.devices()[:2]), (name,))


# Defaults.


def test_every_field_has_a_working_default():
    """The reference needs `platform` and a mesh, or fails."""
    metadata = OperationMetadata()
    assert metadata.runtime_dtype is None
    assert metadata.runtime_softmax_dtype == np.float32
    assert metadata.sequence_axis_name == "sp"
    assert metadata.platform is metadata.backend is metadata.mesh is None
    assert metadata.partition_axis == PartitionAxis()
    assert metadata.partition_manager == PartitionManager(PartitionAxis())
    assert metadata.operation_configs == {}
    assert {field.name for field in dataclasses.fields(metadata)} >= set(FIELDS)


@pytest.mark.parametrize("field", FIELDS)
def test_none_is_the_default(field):
    assert OperationMetadata(**{field: None}) == OperationMetadata()
    assert OperationMetadata.from_config({CONFIG_NAMES[field]: None}) == (
        OperationMetadata()
    )


def test_float32_softmax_default_applies_to_a_config_without_one():
    """The reference documents it, and never applies it."""
    metadata = OperationMetadata.from_config({"attn_softmax_dtype": None})
    assert metadata.runtime_softmax_dtype == np.float32


# Dtypes.


@pytest.mark.parametrize("field", ["runtime_dtype", "runtime_softmax_dtype"])
@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_a_dtype_of_any_spelling_is_kept_as_numpys(field, name):
    spellings = [name, getattr(jnp, name), jnp.dtype(name), np.dtype(name).type]
    kept = {getattr(OperationMetadata(**{field: s}), field) for s in spellings}
    assert kept == {jnp.dtype(name)}
    assert all(isinstance(dtype, np.dtype) for dtype in kept)
    assert getattr(OperationMetadata(**{field: "f4"}), field) == np.float32


def test_a_dtype_of_the_other_byte_order_is_canonical():
    metadata = OperationMetadata(runtime_dtype=np.dtype(">f4"))
    assert metadata.runtime_dtype == np.dtype("float32")
    assert metadata == OperationMetadata(runtime_dtype="float32")


@pytest.mark.parametrize("field", ["runtime_dtype", "runtime_softmax_dtype"])
@pytest.mark.parametrize(
    "value", ["x", "int32", jnp.int8, np.complex64, bool, 3, [1], object(), "f4,f4"]
)
def test_what_is_no_floating_dtype_is_one_clear_error(field, value):
    with pytest.raises(TypeError, match=f"^OperationMetadata: .* got {field}="):
        OperationMetadata(**{field: value})


def test_a_misspelt_dtype_names_the_near_miss():
    with pytest.raises(TypeError, match="did you mean 'bfloat16'"):
        OperationMetadata(runtime_dtype="bfloat6")
    with pytest.raises(TypeError, match=r"got attn_dtype='float31' .*'float32'"):
        OperationMetadata.from_config({"attn_dtype": "float31"})


def call(metadata, dtype="float32"):
    x = jnp.ones((1, 4, 2, 8), dtype)
    return switchax.attention(x, x, x, operation="vanilla", metadata=metadata)


def test_runtime_float64_without_x64_raises_in_the_call():
    metadata = OperationMetadata(runtime_dtype="float64")
    assert metadata.runtime_dtype == np.float64
    with pytest.raises(ValueError, match=r"^attention: .*float64 .*jax_enable_x64"):
        call(metadata)
    jax.config.update("jax_enable_x64", True)
    try:
        assert call(metadata).dtype == np.float32
        assert call(metadata, "float64").dtype == np.float64
    finally:
        jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_softmax_dtype_is_the_least_precision(dtype):
    metadata = OperationMetadata(runtime_softmax_dtype=dtype)
    assert metadata.runtime_softmax_dtype == jnp.dtype(dtype)
    x = jax.random.normal(jax.random.key(0), (1, 8, 2, 8), jnp.bfloat16)
    given = {"operation": "vanilla", "return_lse": True}
    plain = switchax.attention(x, x, x, **given)
    asked = switchax.attention(x, x, x, metadata=metadata, **given)
    assert asked.lse.dtype == np.float32
    np.testing.assert_array_equal(asked.lse, plain.lse)


def test_softmax_in_float64_needs_operands_in_float64():
    metadata = OperationMetadata(runtime_softmax_dtype="float64")
    with pytest.raises(UnsupportedError, match="runtime_softmax_dtype=float64") as e:
        call(metadata)
    assert e.value.refusals["attention"][0].field == "runtime_softmax_dtype"
    jax.config.update("jax_enable_x64", True)
    try:
        assert call(metadata, "float64").dtype == np.float64
        with pytest.raises(UnsupportedError):
            call(metadata, "float32")
    finally:
        jax.config.update("jax_enable_x64", False)


# Devices and axes.


@pytest.mark.parametrize("backend", ["cpu", "cuda", "rocm", "tpu", "tt", " TPU "])
def test_backend_is_kept(backend):
    assert OperationMetadata(backend=backend).backend == backend.strip().lower()


def test_gpu_is_resolved_to_its_vendor():
    assert OperationMetadata(backend="gpu").backend in ("cuda", "rocm")


class Backend(enum.Enum):
    TPU = "tpu"


class TextBackend(enum.StrEnum):
    TPU = "tpu"


@pytest.mark.parametrize("backend", [Backend.TPU, TextBackend.TPU])
def test_a_member_of_an_enumeration_is_its_value(backend):
    kept = OperationMetadata(backend=backend).backend
    assert kept == "tpu"
    assert type(kept) is str


@pytest.mark.parametrize("field", ["platform", "backend"])
def test_unknown_platform_and_backend_name_the_near_miss(field):
    with pytest.raises(ValueError, match=f"^OperationMetadata: .*{field}='tpuu' .*tpu"):
        OperationMetadata(**{field: "tpuu"})
    with pytest.raises(TypeError, match=f"{field} to be a str"):
        OperationMetadata(**{field: 3})


def test_a_backend_has_no_generation_since_it_would_be_ignored():
    with pytest.raises(ValueError, match="backend='tpu:v5e'"):
        OperationMetadata(backend="tpu:v5e")


@pytest.mark.parametrize("platform", ["jax", "pallas", "triton"])
def test_a_platform_that_is_a_language_is_carried(platform):
    metadata = OperationMetadata(platform=platform, backend="cpu")
    assert (metadata.platform, metadata.backend) == (platform, "cpu")
    assert call(metadata).shape == (1, 4, 2, 8)


def test_a_platform_that_is_a_device_means_backend():
    assert OperationMetadata(platform="tpu").backend == "tpu"
    assert OperationMetadata(platform="gpu", backend="gpu").platform == "gpu"
    with pytest.raises(ValueError, match="platform='tpu', backend='cpu'"):
        OperationMetadata(platform="tpu", backend="cpu")


def test_sequence_axis_follows_the_partition_axis():
    paxis = PartitionAxis(sequence_parallel_axis="cp")
    assert OperationMetadata(partition_axis=paxis).sequence_axis_name == "cp"
    given = OperationMetadata(partition_axis=paxis, sequence_axis_name="ring")
    assert given.sequence_axis_name == "ring"
    assert OperationMetadata(sequence_axis_name=["a", "b"]).sequence_axis_name == (
        "a",
        "b",
    )


def test_a_sequence_axis_may_be_a_member_of_an_enumeration():
    name = enum.Enum("Axis", {"SP": "sp"}, type=str).SP
    metadata = OperationMetadata(sequence_axis_name=name)
    assert type(metadata.sequence_axis_name) is str
    assert metadata == OperationMetadata(sequence_axis_name="sp")
    assert OperationMetadata.from_json(metadata.to_json()) == metadata
    several = OperationMetadata(sequence_axis_name=[name, "b"]).sequence_axis_name
    assert several == ("sp", "b")
    assert {type(one) for one in several} == {str}


@pytest.mark.parametrize(
    ("value", "error"),
    [("", ValueError), ((), ValueError), (3, TypeError), (("a", "a"), ValueError)],
)
def test_a_sequence_axis_that_is_no_name_is_an_error(value, error):
    with pytest.raises(error, match="sequence_axis_name"):
        OperationMetadata(sequence_axis_name=value)


def test_a_sequence_axis_of_the_partition_axis_is_named_once_too():
    twice = OperationMetadata(
        partition_axis=PartitionAxis(sequence_parallel_axis=("a", "a"))
    )
    with pytest.raises(ValueError, match=r"sequence_parallel_axis=\('a', 'a'\)"):
        _ = twice.sequence_axis_name


def test_partition_axis_and_manager_follow_each_other():
    by_axis = OperationMetadata(partition_axis=PAXIS)
    assert by_axis.partition_manager == PartitionManager(PAXIS)
    manager = PartitionManager(PAXIS)
    by_manager = OperationMetadata(partition_manager=manager)
    assert by_manager.partition_axis == PAXIS
    assert by_manager.partition_manager is manager
    assert by_axis == by_manager
    assert hash(by_axis) == hash(by_manager)
    assert OperationMetadata(partition_axis={"tensor_parallel_axis": "model"}) == (
        by_axis
    )


def test_a_partition_axis_that_the_manager_contradicts_is_an_error():
    manager = PartitionManager(PartitionAxis())
    with pytest.raises(ValueError, match=r"partition_axis=.*partition_manager="):
        OperationMetadata(partition_axis=PAXIS, partition_manager=manager)
    same = OperationMetadata(
        partition_axis=PAXIS, partition_manager=PartitionManager(PAXIS)
    )
    assert same.partition_axis == PAXIS


def test_reading_a_default_makes_nobody_the_manager_last_made():
    last = PartitionManager(PAXIS)
    assert OperationMetadata().partition_manager.paxis == PartitionAxis()
    assert get_partition_manager() is last


def test_reading_json_makes_nobody_the_manager_last_made():
    text = OperationMetadata(partition_manager=PartitionManager(PAXIS)).to_json()
    last = PartitionManager(PartitionAxis(batch_axis="last"))
    read = OperationMetadata.from_json(text)
    assert read.partition_manager.paxis == PAXIS
    assert get_partition_manager() is last


def test_another_thread_does_not_see_the_current_manager():
    seen = []
    metadata = OperationMetadata()
    with PartitionManager(PAXIS):
        thread = threading.Thread(target=lambda: seen.append(metadata.partition_axis))
        thread.start()
        thread.join()
        assert metadata.partition_axis == PAXIS
    assert seen == [PartitionAxis()]


@pytest.mark.parametrize("field", ["partition_axis", "partition_manager", "mesh"])
def test_a_field_of_another_type_is_a_type_error(field):
    with pytest.raises(TypeError, match=f"^OperationMetadata: .*{field}="):
        OperationMetadata(**{field: 3})


# The mesh.


def test_precedence_of_the_mesh():
    argument, config, set_mesh, within = map(mesh_of, "abcd")
    bare = OperationMetadata()
    by_config = OperationMetadata.from_config({"mesh": config})
    by_argument = OperationMetadata.from_config({"mesh": config}, mesh=argument)
    assert bare.mesh is None
    with entered(within):
        assert bare.mesh == within
        assert by_config.mesh == config
    with jax.set_mesh(set_mesh):
        with entered(within):
            assert bare.mesh == set_mesh
        assert by_config.mesh == config
        assert by_argument.mesh == argument
        assert OperationMetadata(mesh=argument).mesh == argument
    assert bare.mesh is None
    assert by_argument.mesh == argument
    assert by_config.mesh == config


def test_an_abstract_mesh_is_a_mesh():
    abstract = AbstractMesh((2,), ("dp",))
    assert OperationMetadata(mesh=abstract).mesh == abstract


def test_the_mesh_is_no_part_of_equality():
    plain, meshed = OperationMetadata(), OperationMetadata(mesh=mesh_of("a"))
    assert plain == meshed
    assert hash(plain) == hash(meshed)


# From a configuration.


CONFIG = {
    "attn_dtype": jnp.bfloat16,
    "attn_softmax_dtype": jnp.float32,
    "sequence_axis_name": "ring",
    "platform": "pallas",
    "backend": "tpu",
    "partition_axis": PAXIS,
    "partition_manager": PartitionManager(PAXIS),
    "mesh": None,
    "operation_configs": {"nobody": ("frozen", 1)},
    "hidden_size": 4096,
}


class FlaxLike:
    """Attributes by `__getattr__`, as configurations of flax and others have."""

    def __init__(self, values):
        self._values = values

    def __getattr__(self, name):
        try:
            return self._values[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.mark.parametrize(
    "make",
    [dict, types.MappingProxyType, lambda c: types.SimpleNamespace(**c), FlaxLike],
    ids=["dict", "mapping", "object", "flax"],
)
def test_from_config_reads_every_field(make):
    metadata = OperationMetadata.from_config(make(CONFIG))
    for field, name in CONFIG_NAMES.items():
        assert getattr(metadata, field) == CONFIG[name]
    meshed = OperationMetadata.from_config(make(CONFIG | {"mesh": mesh_of("a")}))
    assert meshed.mesh == mesh_of("a")


@pytest.mark.parametrize("field", FIELDS)
def test_an_override_holds_whatever_the_config_says(field):
    others = {
        "runtime_dtype": np.dtype("float16"),
        "runtime_softmax_dtype": np.dtype("float64"),
        "sequence_axis_name": "other",
        "platform": "jax",
        "backend": "cpu",
        "partition_axis": PartitionAxis(head_axis="x"),
        "partition_manager": PartitionManager(PartitionAxis(head_axis="y")),
        "mesh": mesh_of("other"),
        "operation_configs": {"other": 1},
    }
    metadata = OperationMetadata.from_config(CONFIG, **{field: others[field]})
    assert getattr(metadata, field) == others[field]
    default = OperationMetadata.from_config(CONFIG, **{field: None})
    assert getattr(default, field) == getattr(OperationMetadata(), field)


def test_a_device_that_is_given_takes_the_place_of_the_configs():
    read = OperationMetadata.from_config
    for given in ({"backend": "cpu"}, {"platform": "cpu"}):
        for config in ({"platform": " TPU "}, {"backend": "tpu"}):
            assert read(config, **given).backend == "cpu"
    assert read({"platform": "tpu"}, backend=None).backend is None
    both = read({"platform": "triton", "backend": "tpu"}, backend="cpu")
    assert (both.platform, both.backend) == ("triton", "cpu")
    both = read({"backend": "tpu"}, platform="triton")
    assert (both.platform, both.backend) == ("triton", "tpu")
    with pytest.raises(ValueError, match="devices of one platform"):
        read({"platform": "tpu", "backend": "cpu"})


def test_missing_attributes_are_defaults():
    assert OperationMetadata.from_config(object()) == OperationMetadata()
    assert OperationMetadata.from_config({}) == OperationMetadata()


def test_a_property_that_raises_attribute_error_is_missing_and_no_other_error():
    class Config:
        @property
        def backend(self):
            raise AttributeError("no backend yet")

        @property
        def mesh(self):
            raise RuntimeError("no devices")

    with pytest.raises(RuntimeError, match="no devices"):
        OperationMetadata.from_config(Config())
    del Config.mesh
    assert OperationMetadata.from_config(Config()).backend is None


@pytest.mark.parametrize(
    "config", [None, "bfloat16", 3, 1.5, b"x", ["attn_dtype", "float16"], {"backend"}]
)
def test_what_is_no_config_is_a_type_error(config):
    with pytest.raises(TypeError, match=r"^OperationMetadata\.from_config: .*config="):
        OperationMetadata.from_config(config)


def test_an_unknown_override_names_the_near_miss():
    with pytest.raises(TypeError, match="did you mean 'backend'"):
        OperationMetadata.from_config({}, backnd="cpu")


def test_a_config_is_an_argument_too():
    metadata = OperationMetadata(runtime_dtype="float32", base_config=CONFIG)
    assert metadata.runtime_dtype == np.float32
    assert metadata.backend == "tpu"
    assert metadata == OperationMetadata.from_config(CONFIG, runtime_dtype="float32")


# Attributes of one's own.


def test_set_attrs_carefully_sets_what_is_not_set():
    config = {"attn_block": 128, "block": 256}
    metadata = OperationMetadata(base_config=config)
    metadata.set_attrs_carefully("by_pickup", 64, "attn_block")
    metadata.set_attrs_carefully("block", 64)
    metadata.set_attrs_carefully("missing", 64)
    metadata.set_attrs_carefully("own", 64, "attn_block", use_base_config=False)
    assert (metadata.by_pickup, metadata.block) == (128, 256)
    assert (metadata.missing, metadata.own) == (64, 64)
    metadata.set_attrs_carefully("own", 1)
    assert metadata.own == 64
    plain = OperationMetadata(backend="cpu")
    plain.set_attrs_carefully("backend", "tpu")
    plain.set_attrs_carefully("alone", 1, "attn_block")
    assert (plain.backend, plain.alone) == ("cpu", 1)


def test_an_attribute_of_ones_own_is_part_of_equality():
    one, two = OperationMetadata(), OperationMetadata()
    one.set_attrs_carefully("block", 1)
    two.set_attrs_carefully("block", 2)
    assert one != two
    assert one != OperationMetadata()
    for again in (pickle.loads(pickle.dumps(one)), one.replace(), copy.deepcopy(one)):
        assert again.block == 1
        assert again == one


def test_set_attrs_carefully_refuses_what_would_change_a_key():
    metadata = OperationMetadata()
    hash(metadata)
    with pytest.raises(ValueError, match="after this object was compared or hashed"):
        metadata.set_attrs_carefully("block", 1)
    with pytest.raises(TypeError, match="a hashable value"):
        OperationMetadata().set_attrs_carefully("block", [1])
    for name in ("get_shardings", "not a name", 3, "__dict__", "__hash__"):
        with pytest.raises(TypeError, match=r"set_attrs_carefully: expected"):
            OperationMetadata().set_attrs_carefully(name, 1)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Mine(OperationMetadata):
    block: int = switchax.axes.NOT_GIVEN

    def __post_init__(self):
        self.set_attrs_carefully("backend", "tpu", use_base_config=False)
        self.set_attrs_carefully("block", 64, "attn_block")
        super().__post_init__()


def test_a_subclass_sets_its_fields_when_it_is_made():
    assert (Mine().backend, Mine().block) == ("tpu", 64)
    assert Mine(backend="cpu", block=1).backend == "cpu"
    assert Mine.from_config({"attn_block": 128, "backend": "cpu"}).block == 128
    assert Mine(block=1) != Mine(block=2)
    assert Mine(block=1) == Mine(block=1).replace()
    assert Mine(block=1) == pickle.loads(pickle.dumps(Mine(block=1)))
    assert Mine(block=1, backend="cpu") != OperationMetadata(backend="cpu")


# As a value.


FULL = OperationMetadata(
    runtime_dtype="bfloat16",
    runtime_softmax_dtype="float64",
    sequence_axis_name=("a", "b"),
    platform="jax",
    backend="cpu",
    partition_axis=PAXIS,
    operation_configs={"nobody": ("frozen", 1)},
)


@pytest.mark.parametrize("metadata", [OperationMetadata(), FULL], ids=["bare", "full"])
def test_copies_are_equal_and_hash_alike(metadata):
    meshed = metadata.replace(mesh=mesh_of("a"))
    copies = [
        copy.copy(metadata),
        copy.deepcopy(metadata),
        copy.deepcopy(meshed),
        pickle.loads(pickle.dumps(metadata)),
        pickle.loads(pickle.dumps(meshed)),
        metadata.replace(),
        jax.tree.map(lambda leaf: leaf, metadata),
    ]
    for again in copies:
        assert again == metadata
        assert hash(again) == hash(metadata)
        for field in FIELDS:
            if field != "mesh":
                assert getattr(again, field) == getattr(metadata, field)
    assert copies[2].mesh == mesh_of("a")
    assert copies[4].mesh is None


@pytest.mark.parametrize(
    "change",
    [
        {"runtime_dtype": "float32"},
        {"runtime_softmax_dtype": "float32"},
        {"sequence_axis_name": "a"},
        {"platform": "pallas"},
        {"backend": "tpu"},
        {"partition_axis": PartitionAxis()},
        {"partition_manager": PartitionManager(PartitionAxis())},
        {"operation_configs": {"nobody": ("frozen", 2)}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_other_field_is_part_of_equality(change):
    assert FULL.replace(**change) != FULL
    assert FULL.replace(**change) == FULL.replace(**change)
    assert FULL != 3


def test_replace_does_not_fix_what_is_looked_up():
    metadata = OperationMetadata(backend="cpu")
    with PartitionManager(PAXIS), jax.set_mesh(mesh_of("a")):
        again = metadata.replace(backend="tpu")
        assert (again.partition_axis, again.mesh) == (PAXIS, mesh_of("a"))
    assert (again.partition_axis, again.mesh) == (PartitionAxis(), None)
    with pytest.raises(TypeError, match="did you mean 'backend'"):
        metadata.replace(backnd="cpu")


def test_replace_takes_the_later_of_two_devices():
    device = OperationMetadata(platform="tpu").replace(backend="cpu")
    assert (device.platform, device.backend) == (None, "cpu")
    device = OperationMetadata(backend="cuda").replace(platform="tpu")
    assert (device.platform, device.backend) == ("tpu", "tpu")
    both = OperationMetadata(platform="tpu", backend="tpu")
    language = both.replace(platform="pallas")
    assert (language.platform, language.backend) == ("pallas", "tpu")
    with pytest.raises(ValueError, match="devices of one platform"):
        both.replace(platform="cpu", backend="cuda")


def test_replace_keeps_the_config_that_attributes_come_from():
    metadata = OperationMetadata(base_config={"attn_block": 128, "platform": "jax"})
    again = metadata.replace(backend="cpu", platform=None)
    again.set_attrs_carefully("block", 64, "attn_block")
    assert (again.block, again.platform, again.backend) == (128, None, "cpu")


def test_what_a_subclass_makes_of_fields_is_made_anew_by_replace():
    class Mine(OperationMetadata):
        def __post_init__(self):
            super().__post_init__()
            object.__setattr__(self, "bits", self.runtime_dtype.itemsize * 8)

    metadata = Mine(runtime_dtype="float16")
    metadata.set_attrs_carefully("block", 64)
    again = metadata.replace(runtime_dtype="float32")
    assert (again.bits, again.block) == (32, 64)


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.backend = "tpu"
    with pytest.raises(dataclasses.FrozenInstanceError):
        FULL.mesh = None
    with pytest.raises(TypeError):
        FULL.operation_configs["x"] = 1


def test_a_mapping_changed_later_changes_nothing():
    configs = {"nobody": 1}
    metadata = OperationMetadata(operation_configs=configs)
    configs["nobody"] = 2
    assert metadata.operation_configs == {"nobody": 1}


def test_it_is_static_for_jit_and_has_no_leaves():
    traced = []

    def f(x, metadata):
        traced.append(metadata)
        return x

    jitted = jax.jit(f, static_argnums=1)
    for backend in ("cpu", "cpu", "tpu"):
        jitted(1.0, OperationMetadata(backend=backend))
    assert len(traced) == 2
    assert jax.tree.leaves(FULL) == []
    assert jax.jit(lambda metadata: metadata)(FULL) == FULL


def test_repr_says_what_was_given():
    assert repr(OperationMetadata()) == "OperationMetadata()"
    text = repr(OperationMetadata(runtime_dtype="bfloat16", backend="cpu"))
    assert text == "OperationMetadata(runtime_dtype='bfloat16', backend='cpu')"
    names = {"PartitionAxis": PartitionAxis, "OperationMetadata": OperationMetadata}
    assert eval(repr(FULL), names) == FULL


def test_specs_of_one_device_leave_an_array_as_it_is():
    """No mesh means one device."""
    metadata = OperationMetadata()
    spec = metadata.get_shardings(MODE_TRAIN).query
    x = jnp.ones((2, 4, 2, 8))
    assert switchax.sharding.constrain(x, spec, metadata.mesh) is x


def test_what_would_be_dropped_in_silence_is_an_error():
    metadata = OperationMetadata(runtime_dtype="float16")
    with pytest.raises(TypeError, match="use its replace"):
        OperationMetadata.from_config(metadata)
    with pytest.raises(TypeError, match="use its replace"):
        OperationMetadata(base_config=metadata)
    with pytest.raises(TypeError, match="base_config"):
        metadata.replace(base_config={"backend": "tpu"})
    with pytest.raises(TypeError, match="underscore"):
        OperationMetadata().set_attrs_carefully("_key", 1)
