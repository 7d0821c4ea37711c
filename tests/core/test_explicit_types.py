"""Arrays whose types have a mesh: where it splits nothing, where it is not set."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import switchax
from switchax import OperationMetadata, UnsupportedError
from switchax.sharding import constrain

from .kernels import kernel
from .standins import registration

pytestmark = [pytest.mark.heavy, pytest.mark.usefixtures("quick_compilation")]

P = PartitionSpec
FEATURES = {"causal", "gqa", "bias"}
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


@pytest.fixture(scope="module", autouse=True)
def opaque_operation():
    """A stand-in for a Pallas kernel."""
    with registration() as register:
        register(
            kernel(
                "opaque",
                features={"causal", "gqa", "bias"},
                opaque=True,
                shardable={"batch", "heads"},
                returns=lambda result: _written(result.attention_outputs),
            )
        )
        yield


def _written(x):
    """Writes into zeros, as a kernel does: their type knows of no mesh."""

    def write(i, output):
        part = jax.lax.dynamic_slice_in_dim(x, i, 1)
        return jax.lax.dynamic_update_slice_in_dim(output, part, i, 0)

    return jax.lax.fori_loop(0, len(x), write, jnp.zeros(x.shape, x.dtype))


def mesh_of(*types, **sizes):
    count = int(np.prod(list(sizes.values())))
    devices = jax.devices()[:count]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), types, devices=devices)


ONE = mesh_of(EXPLICIT, dp=1)
PRIME = mesh_of(EXPLICIT, dp=3)
BOTH = {
    "alone": mesh_of(EXPLICIT, AUTO, fsdp=2, dp=1),
    "before": mesh_of(EXPLICIT, AUTO, fsdp=2, dp=2),
    "behind": mesh_of(AUTO, EXPLICIT, fsdp=2, dp=2),
}


def operands():
    shapes = (4, 4, 4, 8), (4, 4, 2, 8), (4, 4, 2, 8)
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True))


def in_force(how, mesh):
    return jax.set_mesh(mesh) if how == "set" else contextlib.nullcontext()


def metadata_of(how, mesh):
    return OperationMetadata(mesh=mesh) if how == "metadata" else None


def attend(name, *arguments, metadata=None, **options):
    given = {"causal": True, "operation": name, "metadata": metadata}
    return switchax.attention(*arguments, **given, **options)


def pulled(function, arguments):
    """The output and all gradients, not under jit."""
    output, pull = jax.vjp(function, *arguments)
    return output, *pull(2 * output)


def check(function, arguments, expected):
    """Values, and types: the output's is query's, a gradient's is its argument's."""
    for compute in (pulled, jax.jit(pulled, static_argnums=0)):
        found = compute(function, arguments)
        for got, wish, given in zip(
            found, expected, (arguments[0], *arguments), strict=True
        ):
            np.testing.assert_allclose(got, wish, atol=2e-5, rtol=2e-5)
            type_ = jax.typeof(given).sharding
            assert type_.mesh.empty or jax.typeof(got).sharding == type_


@pytest.fixture(scope="module")
def expected():
    return pulled(lambda *a: attend("vanilla", *a), operands())


@pytest.mark.parametrize("name", ["vanilla", "opaque"])
@pytest.mark.parametrize("how", ["set", "metadata", "neither"])
@pytest.mark.parametrize("mesh", [ONE, PRIME], ids=["one", "three"])
def test_arrays_that_lie_whole_have_the_mesh_in_their_types(name, how, mesh, expected):
    given = [jax.device_put(x, NamedSharding(mesh, P())) for x in operands()]
    with in_force(how, mesh):
        metadata = metadata_of(how, mesh)
        check(lambda *a: attend(name, *a, metadata=metadata), given, expected)


SPECS = {
    "batch": (P("dp"),) * 3,
    "heads": (P(None, None, "dp"),) * 3,
    "sequence": (P(None, "dp"),) * 3,
    "mixed": (P(None, None, "dp"), P("dp"), P(None, "dp")),
}


@pytest.mark.parametrize("name", ["vanilla", "opaque"])
@pytest.mark.parametrize("how", ["set", "neither"])
@pytest.mark.parametrize("specs", SPECS.values(), ids=SPECS)
def test_one_device_is_split_over_in_types_alone(name, how, specs, expected):
    given = [
        jax.device_put(x, NamedSharding(ONE, spec))
        for x, spec in zip(operands(), specs, strict=True)
    ]
    with in_force(how, ONE):
        check(lambda *a: attend(name, *a), given, expected)


@pytest.mark.parametrize("name", ["vanilla", "opaque"])
def test_a_bias_may_lie_otherwise_on_one_device(name):
    bias = jax.random.normal(jax.random.key(4), (4, 4, 4, 4))
    expected = attend("vanilla", *operands(), bias=bias)
    heads = NamedSharding(ONE, P(None, None, "dp"))
    given = [jax.device_put(x, heads) for x in operands()]
    with jax.set_mesh(ONE):
        found = attend(name, *given, bias=jax.device_put(bias, P("dp")))
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("name", ["vanilla", "opaque"])
@pytest.mark.parametrize("mesh", BOTH.values(), ids=BOTH)
def test_axes_of_both_types_split_one_dimension(name, mesh, expected):
    """The gradient that runs at once lost the explicit ones."""
    explicit = mesh.axis_names[mesh.axis_types.index(EXPLICIT)]
    with jax.set_mesh(mesh):
        query, *rest = operands()
        given = [jax.device_put(query, P(explicit)), *rest]
        check(lambda *a: attend(name, *a), given, expected)


@pytest.mark.parametrize("mesh", BOTH.values(), ids=BOTH)
def test_constrain_keeps_the_type_of_a_gradient(mesh):
    x = operands()[0]
    with jax.set_mesh(mesh):
        found = jax.grad(lambda x: (constrain(x, P(("fsdp", "dp"))) ** 2).sum())(x)
    np.testing.assert_allclose(found, 2 * x)


@pytest.mark.parametrize("name", ["vanilla", "opaque"])
def test_the_gradient_of_what_was_made_outside_of_the_mesh_is_whole(name, expected):
    given = operands()
    with jax.set_mesh(mesh_of(EXPLICIT, EXPLICIT, dp=2, tp=2)):
        for compute in (pulled, jax.jit(pulled, static_argnums=0)):
            found = compute(lambda *a: attend(name, *a), given)
            for got, wish in zip(found, expected, strict=True):
                np.testing.assert_allclose(got, wish, atol=2e-5, rtol=2e-5)
                assert jax.typeof(got).sharding.spec == P(None, None, None, None)


def test_what_is_split_by_types_alone_is_refused_by_an_opaque_kernel():
    given = [
        jax.device_put(x, NamedSharding(mesh_of(EXPLICIT, dp=2), P("dp")))
        for x in operands()
    ]
    with pytest.raises(UnsupportedError, match=r"jax\.set_mesh"):
        attend("opaque", *given)


@pytest.fixture
def stacked():
    return [jnp.stack([x, 2 * x, x]) for x in operands()]


def mapped(name, metadata=None, spmd_axis_name=None):
    """The output and gradients of several calls at once."""

    def one(*arguments):
        return pulled(lambda *a: attend(name, *a, metadata=metadata), arguments)

    return jax.jit(jax.vmap(one, spmd_axis_name=spmd_axis_name))


def compare(found, expected):
    for got, wish in zip(found, expected, strict=True):
        np.testing.assert_allclose(got, wish, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("how", ["set", "metadata", "auto", "neither"])
def test_vmap_may_not_name_an_explicit_axis_that_splits_nothing_it_maps(how, stacked):
    """JAX's shard_map takes it for split, and its reshard does not."""
    expected = mapped("vanilla")(*stacked)
    given = [jax.device_put(x, NamedSharding(PRIME, P())) for x in stacked]
    mesh = mesh_of(AUTO, dp=3) if how == "auto" else PRIME
    metadata = OperationMetadata(mesh=mesh) if how in ("metadata", "auto") else None
    with in_force(how, PRIME):
        compare(mapped("vanilla", metadata, "dp")(*given), expected)
        with pytest.raises(UnsupportedError, match=r"expected mesh in"):
            mapped("opaque", metadata, "dp")(*given)


@pytest.mark.parametrize("name", ["vanilla", "opaque"])
@pytest.mark.parametrize("how", ["set", "metadata"])
def test_what_vmap_maps_may_be_split_over_an_explicit_axis(name, how, stacked):
    expected = mapped("vanilla")(*stacked)
    given = [jax.device_put(x, NamedSharding(PRIME, P("dp"))) for x in stacked]
    with in_force(how, PRIME):
        metadata = metadata_of(how, PRIME)
        compare(mapped(name, metadata)(*given), expected)
        compare(mapped(name, metadata, "dp")(*given), expected)


def test_what_vmap_maps_is_split_by_types_alone_for_plain_jax_only(stacked):
    expected = mapped("vanilla")(*stacked)
    given = [jax.device_put(x, NamedSharding(PRIME, P("dp"))) for x in stacked]
    compare(mapped("vanilla")(*given), expected)
    with pytest.raises(UnsupportedError, match=r"jax\.set_mesh"):
        mapped("opaque")(*given)
