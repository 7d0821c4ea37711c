"""Our own operations conform: quickly here, fully by `tox -e conform`."""

import jax
import pytest

from switchax.testing import conform

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("name", ["vanilla", "sdpa"])
def test_our_operations_conform(name):
    # JAX itself does not lower a bfloat16 gradient of its function under "strict".
    with jax.numpy_dtype_promotion("standard" if name == "sdpa" else "strict"):
        report = conform(name)
    assert report.passed, report
    assert report.not_tested["platform tpu"] == "this is cpu"
    assert ("dtype float16" in report.not_tested) is (name == "sdpa")
