"""`OperationMetadata`: dtypes, devices, axes and configurations of an operation."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

import jax
import numpy as np
from jax.typing import DTypeLike

from switchax.axes import NOT_GIVEN, AxisType
from switchax.checks import brief, check_keywords, fail_type, fail_value
from switchax.sameness import is_same

from . import document, fields
from .fields import CONFIG_NAMES
from .live import MESH, PARTITION_AXIS, PARTITION_MANAGER, SEQUENCE_AXIS
from .rules import AttnShardingRules, attention_rules

if TYPE_CHECKING:
    from switchax.partition import PartitionAxis, PartitionManager
    from switchax.sharding import AnyMesh

__all__ = ["OperationMetadata"]

_LEFT_OUT: Any = NOT_GIVEN
# Neither compared nor pickled: a mesh is one process's devices.
_UNCOMPARED = ("_mesh", "base_config", "_key")
_UNSAID = ("runtime_softmax_dtype", "float32")


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class OperationMetadata:
    """Settings of one operation instance.

    Every field may be left out, or None; then the one of the same meaning in
    `base_config` holds (see `from_config`; for a field given as None the default), and
    without that the default. Where nothing says what `partition_axis`,
    `partition_manager`, `sequence_axis_name` or `mesh` is, it is looked up each time
    it is read; use `replace`, since `dataclasses.replace` would fix what it reads.

    Frozen, hashable, comparable, a static argument of jit, and a pytree without
    leaves. Copies are the same object. The mesh and `base_config` are part neither of
    equality nor of a pickle nor of JSON; so a jitted function that takes this as a
    static argument keeps the first mesh, and sees another by `jax.set_mesh` only.

    Attributes:
        runtime_dtype: A floating dtype that query, key and value are cast to first;
            kept as a numpy dtype. None leaves them, and then they must agree. A call
            with float64 raises where JAX would compute in float32
            (`jax_enable_x64`).
        runtime_softmax_dtype: The least precision of softmax and lse, float32 by
            default. They are always computed in float32, and in float64 for float64
            operands, so a narrower dtype changes nothing; float64 for other operands
            raises `UnsupportedError` in the call.
        sequence_axis_name: Mesh axis (or axes) of sequence parallelism, which an
            operation such as ring attention communicates over; by default
            `partition_axis.sequence_parallel_axis`, "sp".
        platform: What a model's configuration says its kernels are: "jax", "pallas" or
            "triton". It is carried for the model, and neither chooses nor refuses an
            operation: name one for that. The name of a device platform means `backend`.
        backend: Platform whose forward method runs: "cpu", "cuda", "rocm", "tpu",
            "tt", "gpu" (resolved to its vendor), or None for the target's own.
        partition_axis: What the dimensions of arrays mean on the mesh, or a mapping of
            its fields; by default that of `partition_manager`.
        partition_manager: Resolves the axes, by its `paxis` alone; by default one for
            `partition_axis`, else the current one (`with manager:`), else one for
            `PartitionAxis()`.
        mesh: The mesh in force: the one given, that of `base_config`, of
            `jax.set_mesh`, of `with mesh:`, else None, which is one device.
        operation_configs: Explicit configurations, each a frozen dataclass of the
            operation's `config_class`, by any of its names. One for an operation that
            is not installed, or takes none, raises where an operation is created or
            called. A config of None is left out.
        base_config: A model's configuration, which fields left out are read from once,
            when this is made.

    Raises:
        TypeError: For a value of another type: no floating dtype, an unhashable config,
            a `base_config` that is itself metadata (see `replace`), a str or a list.
        ValueError: For an unknown platform or backend (with the near miss), or fields
            that contradict each other: partition_axis and partition_manager,
            platform and backend.

    Example:
        >>> OperationMetadata(runtime_dtype="bfloat16").runtime_dtype
        dtype(bfloat16)
        >>> OperationMetadata().get_shardings(MODE_TRAIN).query
        PartitionSpec(('fsdp', 'dp'), 'sp', 'tp', None)
    """

    runtime_dtype: DTypeLike | None = _LEFT_OUT
    runtime_softmax_dtype: DTypeLike | None = _LEFT_OUT
    sequence_axis_name: AxisType = SEQUENCE_AXIS
    platform: str | None = _LEFT_OUT
    backend: str | None = _LEFT_OUT
    partition_axis: PartitionAxis = PARTITION_AXIS
    partition_manager: PartitionManager = PARTITION_MANAGER
    mesh: AnyMesh | None = MESH
    operation_configs: Mapping[str, Any] = _LEFT_OUT
    base_config: Any = None

    def __post_init__(self) -> None:
        where, kept = type(self).__name__, vars(self)
        given = {name: kept[slot] for name, slot in _SLOTS.items()}
        labels = _NAMES if self.base_config is None else self._read_config(given)
        for name, slot in _SLOTS.items():
            kept[slot] = fields.checked(where, name, labels[name], given[name])
        if kept["_partition_manager"] is not None:
            self._settle_partition(where)
        if self.platform is not None:
            self._settle_backend(where, self.platform)

    def _read_config(self, given: dict[str, Any]) -> Mapping[str, str]:
        """Fills in what was left out; returns what the caller calls each field."""
        _check_config(type(self).__name__, "base_config", self.base_config)
        labels = dict(_NAMES)
        pair = ("partition_axis", "partition_manager")
        paired = any(given[name] is not NOT_GIVEN for name in pair)
        found = {
            name: fields.from_config(self.base_config, label)
            for name, label in CONFIG_NAMES.items()
            # Either one given takes the place of both.
            if given[name] is NOT_GIVEN and not (paired and name in pair)
        }
        # So does a device, which either may name.
        if "backend" not in found and fields.is_device(found.get("platform")):
            del found["platform"]
        if fields.is_device(given["platform"]):
            found.pop("backend", None)
        given.update(found)
        labels.update({name: CONFIG_NAMES[name] for name in found})
        return labels

    def _settle_partition(self, where: str) -> None:
        axis = vars(self)["_partition_axis"]
        manager = vars(self)["_partition_manager"]
        if axis is not None and axis != manager.paxis:
            got = f"partition_axis={axis!r}, partition_manager={manager!r}"
            todo = "pass one of them"
            raise fail_value(where, "axes of one meaning", got, todo)
        object.__setattr__(self, "partition_axis", manager.paxis)

    def _settle_backend(self, where: str, platform: str) -> None:
        if platform not in fields.DEVICES:
            return
        meant = fields.device(platform)
        if self.backend not in (None, meant):
            got = f"platform={platform!r}, backend={self.backend!r}"
            todo = "pass backend alone"
            raise fail_value(where, "devices of one platform", got, todo)
        object.__setattr__(self, "backend", meant)

    @classmethod
    def from_config(cls, config: Any, **overrides: Any) -> Self:
        """Returns the metadata that a model's configuration asks for.

        Args:
            config: An object (its attributes) or a mapping (its keys): attn_dtype,
                attn_softmax_dtype, sequence_axis_name, platform, backend,
                partition_axis, partition_manager, mesh, operation_configs. What is
                missing, or None, is the default. A property that raises
                AttributeError is missing; another error is not caught.
            **overrides: Fields that hold whatever the configuration says; None is the
                default. partition_axis or partition_manager takes the place of both,
                platform or backend likewise if they would contradict each other.

        Raises:
            TypeError: For an unknown field, a config that is None, a str, a number or
                a list, or a value of another type.
            ValueError: For an unknown value.

        Example:
            >>> OperationMetadata.from_config({"attn_dtype": "float16"}, backend="tpu")
            OperationMetadata(runtime_dtype='float16', backend='tpu')
        """
        where = f"{cls.__name__}.from_config"
        known = [field.name for field in dataclasses.fields(cls)]
        known.remove("base_config")
        check_keywords(where, overrides, known)
        _check_config(where, "config", config)
        return cls(base_config=config, **overrides)

    def replace(self, **updates: Any) -> Self:
        """Returns a copy with other values; what was looked up is not fixed.

        Args:
            **updates: Fields and their values; None is the default. partition_axis or
                partition_manager takes the place of both. So does backend, or a
                platform that is a device, where both name devices.

        Raises:
            TypeError: For an unknown field, or a value of another type.
            ValueError: As for a new one.

        Example:
            >>> metadata.replace(runtime_dtype="float32")
        """
        where = f"{type(self).__name__}.replace"
        known = [field.name for field in dataclasses.fields(self)]
        known.remove("base_config")  # what it says is in the fields already
        check_keywords(where, updates, known)
        kept = {n: vars(self)[_SLOTS.get(n, n)] for n in known}
        partition = {"partition_axis", "partition_manager"}
        dropped = set() if partition.isdisjoint(updates) else partition
        if "backend" in updates and fields.is_device(self.platform):
            dropped = {*dropped, "platform"}
        if "platform" in updates and fields.is_device(updates["platform"]):
            dropped = {*dropped, "backend"}
        # None, since what is left out would be read from base_config.
        given = {**kept, **dict.fromkeys(dropped), **updates}
        copy = type(self)(**given, base_config=self.base_config)
        for name, value in self._own_attributes().items():
            if name not in vars(copy):  # else a subclass has made it anew
                object.__setattr__(copy, name, value)
        return copy

    def get_shardings(
        self,
        mode: str,
        layout: str = "bthd",
        qkv_mni_sharding: bool = False,
        softmax_aux: Any = None,
    ) -> AttnShardingRules:
        """Returns how each array of attention is to be split.

        Args:
            mode: A runtime mode.
            layout: "bthd" or "bhtd"; or "thd", packed tokens, where query and output
                are [tokens, heads, head_dim] and segment ids [tokens].
            qkv_mni_sharding: Whether the heads and head_dim of key and value are split
                as those of query are.
            softmax_aux: The sinks, [heads] or [heads, num_sinks], or None. Only the
                rank counts.

        Returns:
            The specs, not corrected for any shape or mesh.

        Raises:
            TypeError: For an argument of another type.
            ValueError: For an unknown mode, sinks of another rank, or a mesh axis that
                would split two dimensions of one array.
            UnsupportedError: For an unknown layout, with the near miss.

        Example:
            >>> OperationMetadata().get_shardings(MODE_TRAIN, "thd").key
            PartitionSpec('sp', 'tp', None)
        """
        return attention_rules(
            self.partition_manager, mode, layout, qkv_mni_sharding, softmax_aux
        )

    def get_operation_config(self, impl_name: str) -> Any:
        """Returns the explicit configuration for an operation, or None.

        Args:
            impl_name: Any of its names: canonical, shared, or `plugin:operation`. A
                shared name is the operation behind it on `backend`'s platform, else
                on the present device.

        Returns:
            What `operation_configs` holds for it: under a qualified name, else under
            its canonical one, else under a shared one if it is of the operation's
            `config_class`.

        Raises:
            TypeError: If impl_name is no str, or a config of another class.
            UnknownOperationError: If no operation has the name, or that of a config.
            ContestedNameError: If several claim it.
            ValueError: If a config is for an operation that takes none.

        Example:
            >>> metadata = OperationMetadata(operation_configs={"flash_attn2": config})
            >>> metadata.get_operation_config("pallas_flash") is config
            True
        """
        from .configs import named_config

        return named_config(self, impl_name)

    def set_attrs_carefully(
        self,
        attr_name: str,
        default: Any,
        pickup_name: str | None = None,
        use_base_config: bool = True,
    ) -> None:
        """Sets an attribute that is not set yet; one that is keeps its value.

        For attributes of a model's own, or in a subclass's `__post_init__` before
        that of this class. It must happen before this object is first hashed
        (compared, given to jit or to an operation's call), since the attribute is
        part of its equality. Fields are set from the start.

        Args:
            attr_name: The attribute.
            default: Its value where there is no `base_config`, or that has none.
            pickup_name: What `base_config` calls it; `attr_name` by default.
            use_base_config: Whether to look there.

        Raises:
            TypeError: If attr_name is no name of an attribute of one's own, or its
                value cannot be hashed.
            ValueError: If this object was hashed already.

        Example:
            >>> metadata = OperationMetadata(base_config={"attn_block": 128})
            >>> metadata.set_attrs_carefully("block", 64, "attn_block")
            >>> metadata.block
            128
        """
        where = f"{type(self).__name__}.set_attrs_carefully"
        is_name = isinstance(attr_name, str) and attr_name.isidentifier()
        if not is_name or attr_name.startswith("_"):
            todo = "pass the name of an attribute, without a leading underscore"
            raise fail_type(where, "a name", f"attr_name={brief(attr_name)}", todo)
        slot = _SLOTS.get(attr_name, attr_name)
        if vars(self).get(slot, NOT_GIVEN) is not NOT_GIVEN:
            return
        if hasattr(type(self), attr_name) and slot not in vars(self):
            got, todo = f"attr_name={attr_name!r}, which it has", "choose another name"
            raise fail_type(where, "an attribute of one's own", got, todo)
        if "_key" in vars(self):
            got = f"{attr_name!r} after this object was compared or hashed"
            todo = "set it right after making the object"
            raise fail_value(where, "attributes to be set first", got, todo)
        value = default
        if use_base_config and self.base_config is not None:
            found = fields.from_config(self.base_config, pickup_name or attr_name)
            value = default if found is NOT_GIVEN else found
        if attr_name not in _SLOTS:  # a field is checked when all are there
            try:
                hash(value)
            except TypeError:
                got, todo = f"{attr_name}={brief(value)}", "pass a tuple, or freeze it"
                raise fail_type(where, "a hashable value", got, todo) from None
        object.__setattr__(self, attr_name, value)

    def to_dict(self) -> dict[str, Any]:
        """Returns this metadata as JSON data, without the mesh and `base_config`.

        Returns:
            Every other field that was given, and `runtime_softmax_dtype`; dtypes by
            name, configs with the name of their operation.

        Raises:
            TypeError: If a config, or an attribute of one's own, is no JSON data.
            ValueError: If a config is of no installed operation's `config_class`.

        Example:
            >>> OperationMetadata(runtime_dtype="bfloat16").to_dict()["runtime_dtype"]
            'bfloat16'
        """
        return document.to_data(self, self._own_attributes())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the metadata that `to_dict` described.

        Configs are made by the `config_class` that an installed operation of their
        name declares; nothing is imported or executed because of a name in data.

        Args:
            data: Fields and their values; what is missing is the default.

        Raises:
            TypeError: If data is no mapping.
            ValueError: For everything else that `to_dict` would not return.

        Example:
            >>> OperationMetadata.from_dict(metadata.to_dict()) == metadata
            True
        """
        where = f"{cls.__name__}.from_dict"
        return cls(**document.from_data(where, data, cls))

    def to_json(self, *, indent: int | None = None) -> str:
        """Returns `to_dict` as JSON text.

        Raises:
            TypeError: As `to_dict`.
            ValueError: As `to_dict`.

        Example:
            >>> OperationMetadata.from_json(metadata.to_json()) == metadata
            True
        """
        return document.to_text(self.to_dict(), indent)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the metadata that `to_json` described; executes nothing.

        Args:
            text: JSON text from anywhere.

        Raises:
            TypeError: If text is no str.
            ValueError: For everything else that `to_json` would not write.
        """
        from switchax.partition.document import read_object

        return cls.from_dict(read_object(f"{cls.__name__}.from_json", text))

    def _own_attributes(self) -> dict[str, Any]:
        """Attributes beside the fields: a subclass's, or `set_attrs_carefully`'s."""
        kept = vars(self)
        if kept.keys() <= _KEPT:
            return {}
        return {name: kept[name] for name in kept if name not in _KEPT}

    def _identity(self) -> tuple[int, tuple[Any, ...]]:
        """What equality compares, with its hash; fixed from here on."""
        kept = vars(self)
        if "_key" not in kept:
            key = (
                tuple([kept[slot] for slot in _COMPARED]),
                frozenset(self.operation_configs.items()),
                frozenset(self._own_attributes().items()),
            )
            kept["_key"] = hash(key), key
        return kept["_key"]  # type: ignore[no-any-return]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OperationMetadata) or type(self) is not type(other):
            return NotImplemented
        return self is other or self._identity() == other._identity()

    def is_same_as(self, other: OperationMetadata) -> bool:
        """Whether no compiled program can tell them apart: more than equal."""
        return self == other and is_same(
            (self.operation_configs, self._own_attributes()),
            (other.operation_configs, other._own_attributes()),
        )

    def without_config(self) -> Self:
        """Returns it without `base_config`, which is part of no trace's key."""
        if self.base_config is None:
            return self
        bare = object.__new__(type(self))
        vars(bare).update({**vars(self), "base_config": None})
        return bare

    def __hash__(self) -> int:
        return self._identity()[0]

    def __repr__(self) -> str:
        shown = {n: vars(self)[slot] for n, slot in _SLOTS.items()}
        shown |= self._own_attributes()
        if shown["partition_manager"] is not None:
            del shown["partition_axis"]
        shown["operation_configs"] = shown["operation_configs"] or None
        values = []
        for name, value in shown.items():
            if value is None or (name, str(value)) == _UNSAID:
                continue
            if name in ("runtime_dtype", "runtime_softmax_dtype"):
                value = value.name
            elif name == "operation_configs":
                value = dict(value)
            values.append(f"{name}={value!r}")
        return f"{type(self).__name__}({', '.join(values)})"

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        state = {n: value for n, value in vars(self).items() if n not in _UNCOMPARED}
        state["operation_configs"] = dict(self.operation_configs)
        return _restored, (type(self), state)


_NO_CONFIGS: tuple[type, ...] = (str, bytes, bytearray, int, float, complex)
_NO_CONFIGS += (np.generic, np.ndarray, jax.Array, list, set, frozenset)
_LIVE = ("sequence_axis_name", "partition_axis", "partition_manager", "mesh")
_SLOTS: Mapping[str, str] = types.MappingProxyType(
    {name: f"_{name}" if name in _LIVE else name for name in CONFIG_NAMES}
)
"""Where an instance keeps what was given as each field."""
_NAMES: Mapping[str, str] = types.MappingProxyType({name: name for name in _SLOTS})
# The manager adds nothing to its axis, which is kept beside it.
_COMPARED = tuple(
    slot
    for name, slot in _SLOTS.items()
    if name not in ("partition_manager", "operation_configs", "mesh")
)
_KEPT = frozenset({*_SLOTS.values(), *_UNCOMPARED})


def _check_config(where: str, label: str, config: Any) -> None:
    got = f"{label}={brief(config)}"
    if isinstance(config, OperationMetadata):
        raise fail_type(where, "a model's configuration", got, "use its replace")
    if config is None or isinstance(config, _NO_CONFIGS) or type(config) is tuple:
        todo = "pass the model's configuration, or a mapping"
        raise fail_type(where, "an object or a mapping", got, todo)


def _restored(cls: type[OperationMetadata], state: dict[str, Any]) -> OperationMetadata:
    metadata = object.__new__(cls)
    configs = types.MappingProxyType(state["operation_configs"])
    vars(metadata).update(
        {**state, "operation_configs": configs, "_mesh": None, "base_config": None}
    )
    return metadata
