"""newkernel holds the contract of its kind."""

import os

import pytest

from switchax.testing import conform


def test_it_conforms(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("switchax_operation"):
        pytest.skip("its cases are asked one by one")
    # Read when JAX starts: a CPU stands for eight devices, so that meshes are tested.
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    report = conform("newkernel")
    assert report.passed, report
