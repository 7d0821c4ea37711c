"""A program lowered for another platform than an operation was chosen for."""

import jax
import jax.numpy as jnp
import pytest
from jax import export

import switchax
from switchax import UnsupportedError

from .kernels import kernel
from .standins import registration

X = jax.ShapeDtypeStruct((1, 4, 2, 8), "float32")


@pytest.fixture(scope="module", autouse=True)
def cpu_only():
    with registration() as register:
        register(kernel("cpu_only", platforms={"cpu"}, differentiable={"query"}))
        yield


def call(name):
    fixed = jnp.ones(X.shape)
    return lambda x: switchax.attention(x, fixed, fixed, operation=name)


def gradient(name):
    return jax.grad(lambda x: call(name)(x).sum())


@pytest.mark.parametrize("function", [call, gradient])
def test_a_kernel_does_not_end_up_in_a_program_for_another_platform(function):
    jitted = jax.jit(function("cpu_only"))
    assert export.export(jitted, platforms=("cpu",))(X).platforms == ("cpu",)
    for platforms in [("tpu",), ("cpu", "cuda")]:
        with pytest.raises(UnsupportedError, match=r"jax\.set_mesh") as error:
            export.export(jitted, platforms=platforms)(X)
        assert error.value.refusals["cpu_only"][0].field == "platform"
    with pytest.raises(UnsupportedError, match="got tpu"):
        jitted.trace(X).lower(lowering_platforms=("tpu",))


def test_what_means_the_same_there_is_lowered():
    exported = export.export(jax.jit(call("vanilla")), platforms=("cpu", "tpu"))(X)
    assert exported.platforms == ("cpu", "tpu")


def test_another_method_there_is_refused():
    # On CUDA sdpa may be cuDNN, which was not asked.
    with pytest.raises(UnsupportedError, match="sdpa: expected to be lowered for cpu"):
        jax.jit(call("sdpa")).trace(X).lower(lowering_platforms=("cuda",))


def test_vmap_of_a_lowered_program_is_checked_too():
    mapped = jax.jit(jax.vmap(call("cpu_only")))
    stacked = jax.ShapeDtypeStruct((3, *X.shape), X.dtype)
    with pytest.raises(UnsupportedError, match="got tpu"):
        mapped.trace(stacked).lower(lowering_platforms=("tpu",))


def test_a_platform_that_nobody_knows_is_refused():
    with pytest.raises(UnsupportedError, match="got nowhere"):
        jax.jit(call("vanilla")).trace(X).lower(lowering_platforms=("nowhere",))
