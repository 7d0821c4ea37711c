"""Attention on a mesh of eight devices: same values, no collective, or a refusal."""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import switchax
from switchax import ATTENTION, Cost, OperationMetadata, UnsupportedError
from switchax.partition import PartitionAxis

from .kernels import kernel
from .meshes import entered
from .standins import registration, stand_in

pytestmark = pytest.mark.heavy

P = PartitionSpec
FEATURES = set(ATTENTION.features) - {"weights"}
DERIVATIVES = {"query", "key", "value", "bias", "softmax_aux", "lse"}


@pytest.fixture(scope="module", autouse=True)
def opaque_operations():
    """Stand-ins for Pallas kernels: they see what one device holds, and count on it."""
    with registration() as register:
        for name, shardable in [
            ("opaque", {"batch", "heads"}),
            ("opaque_batch", {"batch"}),
            ("opaque_whole", set()),
        ]:
            register(
                kernel(
                    name,
                    features=FEATURES,
                    opaque=True,
                    shardable=shardable,
                    differentiable=DERIVATIVES,
                )
            )
        yield


def mesh_of(types=AxisType.Auto, **sizes):
    names = tuple(sizes)
    return jax.make_mesh(tuple(sizes.values()), names, axis_types=(types,) * len(names))


AUTO = {"types": AxisType.Auto, "dp": 2, "fsdp": 1, "tp": 4, "sp": 1}
EXPLICIT = {**AUTO, "types": AxisType.Explicit}


def drawn(shape, seed=0):
    return jax.random.normal(jax.random.key(seed), shape)


def operands(batch=4, q_len=6, kv_len=6, heads=8, kv_heads=4, head_dim=16):
    kv = (batch, kv_len, kv_heads, head_dim)
    return drawn((batch, q_len, heads, head_dim)), drawn(kv, 1), drawn(kv, 2)


@dataclasses.dataclass
class Call:
    """A call of attention: sizes of its operands, what changes them, options."""

    name: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    sizes: dict[str, int] = dataclasses.field(default_factory=dict)
    change: Callable[[Any], Any] = lambda x: x

    def __str__(self):
        return self.name

    def arguments(self):
        return tuple(self.change(x) for x in operands(**self.sizes))

    def loss(self, operation):
        def loss(*arguments):
            outputs = switchax.attention(
                *arguments, operation=operation, **self.options
            )
            leaves = [x for x in jax.tree.leaves(outputs) if x is not None]
            return sum(
                jnp.sum(jnp.where(jnp.isfinite(x), x, 0) ** 2) for x in leaves
            ), (outputs)

        return jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)


IDS = jnp.arange(24).reshape(4, 6) % 3
CALLS = [
    Call("plain", {"causal": True}),
    Call("one kv head", {"causal": True}, {"kv_heads": 1}),
    Call("two kv heads", {}, {"kv_heads": 2}),
    Call("heads that do not divide", {}, {"heads": 6, "kv_heads": 3}),
    Call("batch that does not divide", {}, {"batch": 3}),
    Call("batch of one", {}, {"batch": 1}),
    Call("one head", {}, {"heads": 1, "kv_heads": 1}),
    Call("bias of each head", {"bias": drawn((8, 1, 6))}),
    Call("bias of each key", {"bias": drawn((6,))}),
    Call("mask", {"mask": drawn((4, 1, 6, 6)) > 0}),
    Call("segments", {"q_segment_ids": IDS, "kv_segment_ids": IDS}),
    Call(
        "lengths",
        {"q_lengths": jnp.array([6, 3, 0, 2]), "kv_lengths": jnp.array([1, 3, 5, 0])},
    ),
    Call(
        "offsets",
        {"window": (2, 0), "q_offset": jnp.array([0, 1, 2, 4]), "return_lse": True},
        {"q_len": 2},
    ),
    Call("offset", {"causal": True, "q_offset": jnp.int32(3)}, {"q_len": 2}),
    Call("sinks", {"softmax_aux": drawn((8, 2)), "return_lse": True}),
    Call("one sink", {"softmax_aux": drawn((8,))}),
    Call(
        "bhtd",
        {"layout": "bhtd", "return_lse": True},
        change=lambda x: jnp.swapaxes(x, 1, 2),
    ),
    Call(
        "thd",
        {
            "layout": "thd",
            "return_lse": True,
            "q_segment_ids": IDS[0],
            "kv_segment_ids": IDS[0],
        },
        change=lambda x: x[0],
    ),
    Call("no batch", {}, {"batch": 0}),
    Call("no keys", {}, {"kv_len": 0}),
]


def assert_same(found, expected):
    for got, want in zip(
        jax.tree.leaves(found), jax.tree.leaves(expected), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("call", CALLS, ids=str)
def test_a_mesh_changes_neither_values_nor_gradients(call):
    arguments = call.arguments()
    expected = jax.jit(call.loss("vanilla"))(*arguments)
    for sizes, name in [(AUTO, "vanilla"), (AUTO, "opaque"), (EXPLICIT, "opaque")]:
        with jax.set_mesh(mesh_of(**sizes)):
            assert_same(jax.jit(call.loss(name))(*arguments), expected)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("call", CALLS[1:4], ids=str)
def test_explicit_axes_change_nothing_for_plain_jax(call):
    arguments = call.arguments()
    expected = jax.jit(call.loss("vanilla"))(*arguments)
    with jax.set_mesh(mesh_of(**EXPLICIT)):
        assert_same(jax.jit(call.loss("vanilla"))(*arguments), expected)


@pytest.mark.parametrize("name", ["vanilla", "sdpa", "opaque"])
@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jit"])
def test_explicit_axes_need_not_be_set_to_be_honoured(name, is_jitted):
    mesh, metadata = mesh_of(**EXPLICIT), OperationMetadata(mesh=mesh_of(**EXPLICIT))
    query, key, value = operands(kv_heads=2)
    expected = switchax.attention(query, key, value, operation="vanilla")
    split = jax.device_put(query, NamedSharding(mesh, P("dp", None, "tp")))
    by_batch = [jax.device_put(x, NamedSharding(mesh, P("dp"))) for x in (key, value)]
    called = [([query, key, value], metadata), ([split, *by_batch], metadata)]
    if name != "opaque":  # which is refused without a mesh
        called.append(([split, *by_batch], None))
    for arrays, metadata in called:

        def attend(*arrays, metadata=metadata):
            return switchax.attention(*arrays, operation=name, metadata=metadata)

        found = jax.jit(attend)(*arrays) if is_jitted else attend(*arrays)
        assert_same(found, expected)
        if arrays[0] is split:  # no type is lost, so it can be added to what it came of
            assert jax.typeof(found) == jax.typeof(split)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", ["vanilla", "sdpa", "opaque"])
@pytest.mark.parametrize("how", ["explicit", "spmd_axis_name", "nested"])
def test_what_a_vmap_has_split_is_not_split_again(name, how):
    x = drawn((2, 4, 6, 8, 4))
    mesh = mesh_of(
        AxisType.Explicit if how == "explicit" else AxisType.Auto, dp=2, tp=4
    )

    def gradient(x):
        def loss(x):
            return (switchax.attention(x, x, x, operation=name) ** 2).sum()

        return jax.value_and_grad(loss)(x)

    expected = jax.vmap(gradient)(x)
    axis = None if how == "explicit" else "dp"
    mapped = jax.vmap(gradient, spmd_axis_name=axis)
    if how == "nested":
        mapped = jax.vmap(jax.vmap(gradient, spmd_axis_name="tp"), spmd_axis_name="dp")
        x = x[:, :, None]
        expected = jax.vmap(jax.vmap(gradient))(x)
    with jax.set_mesh(mesh):
        if how == "explicit":
            x = jax.device_put(x, NamedSharding(mesh, P("dp")))
            assert_same(mapped(x), expected)
        assert_same(jax.jit(mapped)(x), expected)


def test_a_split_head_dim_stays_in_the_type_where_value_has_it_too():
    x, mesh = drawn((4, 6, 8, 4)), mesh_of(AxisType.Explicit, dp=2, tp=4)
    with jax.set_mesh(mesh):
        x = jax.device_put(x, NamedSharding(mesh, P(None, None, None, "tp")))
        same = switchax.attention(x, x, x, operation="vanilla")
        narrow = x[..., : x.shape[-1]].reshape(4, 6, 8, 2, 2, out_sharding=P())[..., 0]
        other = switchax.attention(x, x, narrow, operation="vanilla")
    assert jax.typeof(same) == jax.typeof(x)
    assert jax.typeof(other).sharding.spec == P(None, None, None, None)


@pytest.mark.parametrize("sizes", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    ("name", "kv_heads"), [("opaque", 8), ("opaque", 4), ("vanilla", 4), ("sdpa", 4)]
)
def test_batch_and_heads_are_split_without_a_collective(name, sizes, kv_heads):
    call = Call("plain", {"causal": True})
    mesh = mesh_of(**sizes)
    split = NamedSharding(mesh, P("dp", None, "tp", None))
    arguments = [jax.device_put(x, split) for x in operands(kv_heads=kv_heads)]

    def gradient(*arguments):
        def loss(*arguments):
            return (
                switchax.attention(*arguments, causal=True, operation=name) * w
            ).sum()

        return jax.grad(loss, argnums=(0, 1, 2))(*arguments)

    w = jax.device_put(drawn(arguments[0].shape, 3), split)
    with jax.set_mesh(mesh):
        forward = jax.jit(
            lambda *a: switchax.attention(*a, operation=name, **call.options)
        )
        for function in (forward, jax.jit(gradient)):
            compiled = function.lower(*arguments).compile()
            for leaf in jax.tree.leaves(compiled.output_shardings):
                assert leaf.shard_shape((4, 6, 8, 16))[::2] == (2, 2)
            assert not collectives(compiled)


IDLE = {"types": AxisType.Auto, "dp": 2, "tp": 2, "idle": 2}


def test_an_axis_that_splits_nothing_adds_no_collective_to_the_gradient():
    arguments = operands()

    def gradient(operation):
        def loss(*arguments):
            found = switchax.attention(*arguments, causal=True, operation=operation)
            return (found * drawn(found.shape, 3)).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

    expected = gradient("vanilla")(*arguments)
    mesh = mesh_of(**IDLE)
    split = NamedSharding(mesh, P("dp", None, "tp", None))
    arguments = [jax.device_put(x, split) for x in arguments]
    with jax.set_mesh(mesh):
        compiled = gradient("opaque").lower(*arguments).compile()
    assert not collectives(compiled)
    assert_same(compiled(*arguments), expected)


@pytest.mark.parametrize("name", ["vanilla", "opaque"])
def test_a_bias_that_lies_as_its_heads_is_not_gathered(name):
    mesh = mesh_of(**AUTO)
    split = NamedSharding(mesh, P("dp", None, "tp"))
    query = jax.ShapeDtypeStruct((4, 6, 8, 16), "float32", sharding=split)
    split = NamedSharding(mesh, P("dp", "tp"))
    bias = jax.ShapeDtypeStruct((4, 8, 6, 6), "float32", sharding=split)

    def gradient(query, bias):
        def loss(query, bias):
            seen = jax.lax.stop_gradient(bias) > 0
            options = {"bias": bias, "mask": seen, "operation": name}
            return switchax.attention(query, query, query, **options).sum()

        return jax.grad(loss, argnums=(0, 1))(query, bias)

    with jax.set_mesh(mesh):
        assert not collectives(jax.jit(gradient).lower(query, bias).compile())


@pytest.mark.parametrize("axes", [("tp", "ep"), ("ep", "tp")])
def test_a_mask_follows_the_order_of_the_axes_of_heads(axes):
    mesh = mesh_of(AxisType.Auto, dp=2, tp=2, ep=2)
    axis = PartitionAxis(head_axis=axes, kv_head_axis=axes)
    metadata = OperationMetadata(partition_axis=axis)
    split = NamedSharding(mesh, P("dp", None, axes))
    query = jax.ShapeDtypeStruct((4, 6, 8, 16), "float32", sharding=split)
    split = NamedSharding(mesh, P("dp", axes))
    mask = jax.ShapeDtypeStruct((4, 8, 6, 6), "bool", sharding=split)

    def attend(query, mask):
        given = {"metadata": metadata, "operation": "vanilla"}
        return switchax.attention(query, query, query, mask=mask, **given)

    with jax.set_mesh(mesh):
        assert not collectives(jax.jit(attend).lower(query, mask).compile())


@pytest.mark.usefixtures("quick_compilation")
def test_beside_an_axis_that_splits_nothing_what_is_shared_is_summed_once():
    bias, options = drawn((8, 1, 6)), {"softmax_aux": drawn((8,)), "return_lse": True}

    def gradient(operation):
        def loss(bias, *arguments):
            found, _, lse = switchax.attention(
                *arguments, bias=bias, operation=operation, **options
            )
            return (found**2).sum() + (lse**2).sum()

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))

    expected = gradient("vanilla")(bias, *operands(kv_heads=1))
    with jax.set_mesh(mesh_of(**IDLE)):
        found = gradient("opaque")(bias, *operands(kv_heads=1))
    assert_same(found, expected)


def collectives(compiled):
    pattern = r"\b(all-\w+|reduce-scatter|collective-\w+)(?:-start)?\("
    return re.findall(pattern, compiled.as_text())


def test_a_collective_would_be_found():
    mesh = mesh_of(**AUTO)
    x = jax.device_put(drawn((8, 8)), NamedSharding(mesh, P("dp", "tp")))
    assert collectives(jax.jit(jnp.sum).lower(x).compile())


@pytest.mark.parametrize(
    "enter",
    [
        lambda mesh: (jax.set_mesh(mesh), None),
        lambda mesh: (entered(mesh), None),
        lambda mesh: (contextlib.nullcontext(), OperationMetadata(mesh=mesh)),
    ],
    ids=["set_mesh", "with mesh", "metadata"],
)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "jit"])
@pytest.mark.usefixtures("quick_compilation")
def test_every_way_to_give_a_mesh_splits_the_kernel(enter, traced):
    seen = []

    def look(result):
        seen.append(result.attention_outputs.shape)
        return result

    context, metadata = enter(mesh_of(**AUTO))
    operation = kernel("looks", returns=look, opaque=True, shardable={"batch", "heads"})

    def attend(*arguments):
        return switchax.attention(*arguments, operation="looks", metadata=metadata)

    with registration() as register, context:
        register(operation)
        arguments = operands(kv_heads=8)
        output = (jax.jit(attend) if traced else attend)(*arguments)
    assert seen == [(2, 6, 2, 16)]
    assert len(output.sharding.device_set) == 8
    assert output.sharding.shard_shape(output.shape) == (2, 6, 2, 16)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", ["vanilla", "opaque"])
def test_axes_that_the_metadata_names_are_known(name, strict):
    """Also where the mesh lacks them: a warning would be an error here."""
    axes = {"tensor_parallel_axis": "model", "sequence_parallel_axis": "rings"}
    metadata = OperationMetadata(partition_axis=PartitionAxis(**axes))
    with jax.set_mesh(mesh_of(dp=2, model=4)), switchax.use(strict=strict):
        output = jax.jit(
            lambda *x: switchax.attention(*x, metadata=metadata, operation=name)
        )(*operands())
    assert output.sharding.shard_shape(output.shape)[2] == output.shape[2] // 4


def test_another_mesh_than_the_one_in_force_is_an_error():
    metadata = OperationMetadata(mesh=mesh_of(dp=8))
    with (
        jax.set_mesh(mesh_of(dp=2, tp=4)),
        pytest.raises(ValueError, match="the one in force"),
    ):
        switchax.attention(*operands(), metadata=metadata, operation="vanilla")


def test_the_same_axes_on_other_devices_are_another_mesh():
    names, devices = ("dp", "tp"), np.array(jax.devices())
    set_one, other = (
        jax.sharding.Mesh(half.reshape(2, 2), names) for half in np.split(devices, 2)
    )
    with jax.set_mesh(set_one), pytest.raises(ValueError, match="same devices"):
        switchax.attention(*operands(), metadata=OperationMetadata(mesh=other))


@pytest.mark.parametrize("name", ["vanilla", "sdpa", "opaque"])
@pytest.mark.usefixtures("quick_compilation")
def test_a_jitted_function_runs_under_a_like_mesh_of_other_devices(name):
    devices = np.array(jax.devices())
    arguments = jax.tree.map(np.asarray, operands())
    attend = jax.jit(lambda *a: switchax.attention(*a, operation=name))
    expected = attend(*arguments)
    for half in (devices[:4], devices[4:], devices[3::-1]):
        mesh = jax.sharding.Mesh(half.reshape(2, 2), ("dp", "tp"))
        with jax.set_mesh(mesh):
            found = attend(*arguments)
        assert found.sharding.device_set == set(half)
        np.testing.assert_allclose(found, expected, atol=1e-6)


def test_an_abstract_mesh_runs_no_opaque_kernel_but_lowers_it():
    mesh = jax.sharding.AbstractMesh((2, 4), ("dp", "tp"), (AxisType.Auto,) * 2)

    def attend(*arguments):
        return switchax.attention(*arguments, operation="opaque")

    with jax.sharding.use_abstract_mesh(mesh):
        with pytest.raises(ValueError, match="a mesh with devices"):
            attend(*operands())
        assert "manual_computation" in jax.jit(attend).lower(*operands()).as_text()


def test_a_symbolic_batch_is_not_split():
    (batch,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in operands()]

    def exported(name):
        attend = jax.jit(lambda *a: switchax.attention(*a, operation=name))
        return jax.export.export(attend)(*shapes)

    with jax.set_mesh(mesh_of(**AUTO)):
        assert exported("vanilla").out_avals[0].shape[0] == batch
        with pytest.raises(UnsupportedError, match="sizes=b"):
            exported("opaque")


@pytest.mark.parametrize("axes", [("x", "y"), ("y", "x")])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.usefixtures("quick_compilation")
def test_kv_heads_are_repeated_over_several_explicit_axes(axes, kv_heads):
    rules = PartitionAxis(batch_axis=None, head_axis=axes, kv_head_axis=axes)
    metadata = OperationMetadata(partition_axis=rules)
    call = Call("plain", {"metadata": metadata}, {"kv_heads": kv_heads})
    expected = call.loss("vanilla")(*call.arguments())
    with jax.set_mesh(mesh_of(AxisType.Explicit, x=2, y=4)):
        assert_same(call.loss("opaque")(*call.arguments()), expected)


def test_a_length_that_an_array_s_type_splits_is_refused():
    mesh = mesh_of(AxisType.Explicit, dp=2, x=2)
    split = NamedSharding(mesh, P("dp", "x"))
    arguments = [jax.device_put(x, split) for x in operands()]
    with jax.set_mesh(mesh), pytest.raises(UnsupportedError, match="over x=2"):
        switchax.attention(*arguments, operation="opaque")


@pytest.mark.parametrize("name", ["value", "mask", "bias", "kv_segment_ids"])
def test_a_length_that_another_array_s_type_splits_is_refused(name):
    """It would be gathered in silence."""
    query, key, value = operands(kv_len=8, heads=4, kv_heads=4, q_len=8)
    given = {
        "value": value,
        "mask": jnp.ones((4, 1, 8, 8), bool),
        "bias": jnp.ones((8, 8)),
        "kv_segment_ids": jnp.zeros((4, 8), jnp.int32),
    }
    last = (
        P(None, "tp") if name == "value" else P(*[None] * (given[name].ndim - 1), "tp")
    )
    with jax.set_mesh(mesh_of(AxisType.Explicit, dp=2, tp=4)):
        arrays = {name: jax.device_put(given[name], last)}
        if name == "kv_segment_ids":
            arrays["q_segment_ids"] = given[name]
        call = {"value": value, **arrays}
        with pytest.raises(UnsupportedError, match="kv_len=split over tp=4"):
            switchax.attention(query, key, operation="opaque", **call)


def test_partial_sums_are_summed_first():
    mesh = mesh_of(AxisType.Explicit, dp=2, tp=4)
    query, key, value = operands()
    with jax.set_mesh(mesh):
        shared = jax.device_put(query, NamedSharding(mesh, P("dp", reduced={"tp"})))
        found = switchax.attention(shared, key, value, operation="vanilla")
    expected = switchax.attention(query, key, value, operation="vanilla")
    assert_same(found, expected)


def test_a_mesh_of_types_alone_must_be_set_for_opaque_kernels():
    mesh = mesh_of(AxisType.Explicit, dp=2, tp=4)
    split = NamedSharding(mesh, P("dp", None, "tp"))
    arguments = [jax.device_put(x, split) for x in operands(kv_heads=8)]
    with pytest.raises(UnsupportedError, match=r"jax\.set_mesh"):
        switchax.attention(*arguments, operation="opaque")


@pytest.mark.usefixtures("quick_compilation")
def test_rules_of_ones_own_name_the_axes():
    axes = PartitionAxis(batch_axis="x", head_axis="y", kv_head_axis="y")
    metadata = OperationMetadata(partition_axis=axes, mesh=mesh_of(x=4, y=2))
    for name in ("opaque", "vanilla"):
        output = switchax.attention(*operands(), operation=name, metadata=metadata)
        assert output.sharding.shard_shape(output.shape) == (1, 6, 4, 16)


def refused(name, *, sizes=None, q_len=6, options=None, **axes):
    arguments = operands(**(sizes or {}), q_len=q_len)
    with jax.set_mesh(mesh_of(**axes)), pytest.raises(UnsupportedError) as error:
        switchax.attention(*arguments, operation=name, **(options or {}))
    ((_, reasons),) = error.value.refusals.items()
    return str(error.value), reasons


def test_a_mesh_that_no_rule_names_warns_once_or_raises_when_strict():
    mesh = mesh_of(batch=2, model=4)
    shapes = {name: operands()[0] for name in ("query", "key", "value")}
    axes = PartitionAxis(batch_axis="batch", head_axis="model", kv_head_axis="model")
    with jax.set_mesh(mesh):
        with switchax.use(strict=True), pytest.raises(ValueError, match="batch=2, mod"):
            switchax.explain(**shapes)
        with pytest.warns(
            switchax.sharding.UnknownMeshAxisWarning, match="nothing"
        ) as caught:
            switchax.explain(**shapes)
        switchax.explain(**shapes)
        metadata = OperationMetadata(partition_axis=axes)
        found = switchax.explain(**shapes, metadata=metadata, operation="opaque")
    assert {warning.filename for warning in caught} == {__file__}
    assert "batch over batch=2, heads over model=4" in str(found)


def test_explain_gives_the_reason_of_the_mesh_that_metadata_brings():
    mesh = mesh_of(dp=2, sp=4)
    shapes = {name: operands()[0] for name in ("query", "key", "value")}
    metadata = OperationMetadata(mesh=mesh)
    found = switchax.explain(**shapes, metadata=metadata, operation="opaque")
    assert found.chosen is None
    assert "split over sp=4" in str(found)
    assert switchax.explain(**shapes, operation="opaque").chosen is not None


@pytest.mark.parametrize("kv_len", [6, 7])
def test_a_sequence_axis_is_refused_with_its_name(kv_len):
    sizes = {"kv_len": kv_len}
    message, reasons = refused("opaque", sizes=sizes, dp=2, sp=2, tp=2)
    assert [r.field for r in reasons] == ["q_len", "kv_len"]
    assert all(r.actual == "split over sp=2" for r in reasons)
    assert "that shards sequences" in message
    assert "such as vanilla" in message


def test_one_query_row_is_never_split_but_keys_are():
    _, reasons = refused("opaque", q_len=1, dp=2, sp=4)
    assert [r.field for r in reasons] == ["kv_len"]


def test_kv_heads_that_fit_no_way_are_refused():
    sizes = {"heads": 12, "kv_heads": 6}
    message, reasons = refused("opaque", sizes=sizes, dp=2, tp=4)
    assert [r.field for r in reasons] == ["kv_heads"]
    assert "tp=4" in message


@pytest.mark.parametrize(
    ("name", "fields"),
    [("opaque_batch", ["heads"]), ("opaque_whole", ["batch", "heads"])],
)
def test_what_is_not_declared_shardable_is_refused(name, fields):
    message, reasons = refused(name, dp=2, tp=4)
    assert [r.field for r in reasons] == fields
    assert "split over tp=4" in message


def test_a_refusal_of_one_device_s_part_says_so():
    options = {"bias": drawn((8, 1, 6))}
    with registration() as register:
        register(kernel("narrow", opaque=True, shardable={"batch", "heads"}))
        message, _ = refused("narrow", options=options, dp=2, tp=4)
    assert "bias=float32[2,1,6]" in message
    assert "on each device of the mesh: attention float32 query 2x6x2x16" in message


def test_head_dim_is_never_split():
    axes = PartitionAxis(attention_dim_axis="tp", head_axis=None)
    metadata = OperationMetadata(partition_axis=axes, mesh=mesh_of(dp=2, tp=4))
    with pytest.raises(UnsupportedError, match="head_dim=split over tp=4"):
        switchax.attention(*operands(), operation="opaque", metadata=metadata)


def test_auto_takes_what_can_be_split_and_explain_says_why():
    fused = stand_in("fused_whole", cost=Cost.FUSED, opaque=True)
    with registration() as register:
        register(fused)
        arguments = operands(heads=4)
        mesh = mesh_of(dp=2, tp=4)
        with jax.set_mesh(mesh), pytest.warns(UserWarning, match="fused_whole"):
            switchax.attention(*arguments)
        query, key, value = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arguments)
        explanation = switchax.explain(query=query, key=key, value=value, mesh=mesh)
        assert explanation.chosen == "chunked:chunked"
        assert "split over tp=4" in str(explanation)
        whole = switchax.explain(query=query, key=key, value=value)
        assert whole.chosen.endswith(":fused_whole")


def test_explain_lists_the_split_and_what_it_costs():
    query = jax.ShapeDtypeStruct((4, 6, 8, 16), "float32")
    key = jax.ShapeDtypeStruct((4, 6, 2, 16), "float32")
    mesh = mesh_of(dp=2, tp=4)
    text = str(switchax.explain(query=query, key=key, value=key, mesh=mesh))
    assert "shard (batch over dp=2, heads over tp=4; free, no collective)" in text
    assert "each kv head 2 times" in text


def test_a_decision_on_a_mesh_is_one_of_its_own(tmp_path):
    switchax.decisions.clear()
    arguments = operands()
    switchax.attention(*arguments, operation="vanilla")
    switchax.decisions.save(tmp_path / "lock")
    with switchax.use(lock=tmp_path / "lock"):
        switchax.attention(*arguments, operation="vanilla")
    with (
        switchax.use(lock=tmp_path / "lock"),
        jax.set_mesh(mesh_of(dp=2, tp=4)),
        pytest.raises(switchax.DecisionLockError, match="mesh dp=2,tp=4"),
    ):
        switchax.attention(*arguments, operation="vanilla")


@pytest.mark.parametrize("key", [jax.random.key(1), jax.random.PRNGKey(1)])
@pytest.mark.usefixtures("quick_compilation")
def test_each_device_drops_its_own_and_repeats_it(key):
    query = jnp.zeros((4, 6, 8, 16))
    value = jnp.ones((4, 6, 8, 16))

    def attend():
        with jax.set_mesh(mesh_of(**AUTO)):
            return switchax.attention(
                query,
                query,
                value,
                operation="opaque",
                dropout_prob=0.5,
                dropout_key=key,
                return_lse=True,
            )

    first, second = attend(), attend()
    assert (first.attention_outputs == second.attention_outputs).all()
    np.testing.assert_allclose(first.lse, np.log(6), atol=1e-6)
    shards = np.asarray(first.attention_outputs)[..., 0].reshape(2, 2, 6, 4, 2)
    patterns = {shards[b, :, :, h].tobytes() for b in range(2) for h in range(4)}
    assert len(patterns) == 8


@pytest.mark.usefixtures("quick_compilation")
def test_devices_that_hold_the_same_drop_the_same():
    with jax.set_mesh(mesh_of(dp=2, ep=4)):
        output = switchax.attention(
            *operands(kv_heads=8),
            operation="opaque",
            dropout_prob=0.5,
            dropout_key=jax.random.key(1),
        )
    by_place = {}
    for shard in output.addressable_shards:
        held = by_place.setdefault(str(shard.index), np.asarray(shard.data))
        np.testing.assert_array_equal(shard.data, held)
    assert len(by_place) == 2


@pytest.mark.parametrize("name", ["opaque", "vanilla"])
@pytest.mark.parametrize("sizes", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.usefixtures("quick_compilation")
def test_inside_shard_map_the_kernel_runs_as_it_is(name, sizes):
    arguments = operands()
    expected = switchax.attention(*arguments, operation="vanilla")
    mesh = mesh_of(**sizes)
    spec = P("dp", None, "tp")

    @jax.jit
    def attend(*arguments):
        return jax.shard_map(
            lambda *a: switchax.attention(*a, operation=name),
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )(*arguments)

    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arguments]
        np.testing.assert_allclose(attend(*split), expected, atol=2e-6)


@pytest.mark.parametrize("kv_len", [0, 3])
@pytest.mark.parametrize("sinks", [None, jnp.ones(1)], ids=["", "sinks"])
def test_inside_shard_map_the_types_are_those_of_the_operands(kv_len, sinks):
    def attend(x, key):
        given = {"softmax_aux": sinks, "return_lse": True, "return_weights": True}
        found = switchax.attention(x, key, key, operation="vanilla", **given)
        assert jax.typeof(found.attention_weights) == jax.typeof(
            jnp.einsum("bqhd,bkhd->bhqk", x, key)
        )
        return found.attention_outputs, found.lse

    def twice(x, key):
        def step(carry, _):
            return attend(carry[0], key), None

        lse = jax.lax.full_like(x[..., 0].swapaxes(1, 2), 0)
        return jax.lax.scan(step, (x, lse), None, length=2)[0]

    x, key = jnp.ones((2, 3, 1, 2)), jnp.ones((2, kv_len, 1, 2))
    mesh = mesh_of(AxisType.Auto, b=2)
    found = jax.shard_map(twice, mesh=mesh, in_specs=P("b"), out_specs=P("b"))(x, key)
    expected = attend(attend(x, key)[0], key)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("types", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.usefixtures("quick_compilation")
def test_a_region_that_is_manual_in_part_is_for_plain_jax_only(types):
    def attend(name):
        return jax.shard_map(
            lambda *a: switchax.attention(*a, operation=name),
            in_specs=P("dp"),
            out_specs=P("dp"),
            axis_names={"dp"},
        )

    mesh = mesh_of(types, dp=2, tp=4)
    arguments = operands()
    expected = switchax.attention(*arguments, operation="vanilla")
    with jax.set_mesh(mesh):
        split = [jax.device_put(x, NamedSharding(mesh, P("dp"))) for x in arguments]
        found = jax.jit(attend("vanilla"))(*split)
        np.testing.assert_allclose(found, expected, atol=2e-6)
        with pytest.raises(UnsupportedError, match="tp not manual"):
            jax.jit(attend("opaque"))(*split)


@pytest.mark.usefixtures("quick_compilation")
@pytest.mark.parametrize("name", ["opaque", "vanilla"])
@pytest.mark.parametrize("sizes", [AUTO, EXPLICIT], ids=["auto", "explicit"])
def test_transforms_mean_the_same_on_a_mesh(name, sizes):
    def loss(q, k, v):
        return (switchax.attention(q, k, v, causal=True, operation=name) ** 2).sum()

    def layers(q, k, v):
        def layer(x, _):
            return switchax.attention(x, k, v, operation=name), None

        return (jax.lax.scan(jax.remat(layer), q, None, length=2)[0] ** 2).sum()

    stacked = tuple(jnp.stack([x, 2 * x]) for x in operands())
    every = (0, 1, 2)
    for function, arguments in [
        (jax.vmap(jax.grad(loss, argnums=every)), stacked),
        (jax.grad(layers, argnums=every), operands()),
    ]:
        expected = jax.jit(function)(*arguments)
        mesh = mesh_of(**sizes)
        with jax.set_mesh(mesh):
            spec = P(*[None] * (arguments[0].ndim - 4), "dp", None, "tp")
            split = [jax.device_put(x, NamedSharding(mesh, spec)) for x in arguments]
            for given in (arguments, split):
                assert_same(jax.jit(function)(*given), expected)


@pytest.mark.usefixtures("quick_compilation")
def test_arrays_of_one_device_are_moved():
    arguments = [jax.device_put(x, jax.devices()[3]) for x in operands()]
    expected = switchax.attention(*arguments, operation="vanilla")
    for name in ("opaque", "vanilla"):
        with jax.set_mesh(mesh_of(**AUTO)):
            found = switchax.attention(*arguments, operation=name)
        np.testing.assert_allclose(found, expected, atol=2e-6)


def test_a_mesh_of_one_device_adds_nothing():
    devices = jax.devices()[:1]
    mesh = jax.make_mesh((1,), ("dp",), (AxisType.Auto,), devices=devices)
    with jax.set_mesh(mesh):
        text = jax.jit(
            lambda *a: switchax.attention(*a, operation="opaque_whole")
        ).lower(*operands())
    assert "sharding_constraint" not in text.as_text()
