"""What every test runs under: eight CPU devices, no implicit promotion."""

import os

# Read once, when JAX starts its backend.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = " ".join(
    [os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
).strip()

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(autouse=True)
def no_manager_left_behind():
    """Forget the manager that a test made last, so that none sees another's."""
    yield
    from switchax.partition.context import last_made

    if last_made.peek() is not None:
        last_made.set(None)


@pytest.fixture
def standard_promotion():
    """Promote dtypes as JAX does by default: sdpa refuses half precision without."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def quick_compilation():
    """Compile without most optimisations: twice as fast, and means the same."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
