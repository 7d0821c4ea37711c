"""Our own operations conform: quickly here, fully by `tox -e conform`."""

import pytest

from switchax.testing import conform

pytestmark = pytest.mark.heavy


@pytest.mark.parametrize("name", ["vanilla", "sdpa"])
def test_our_operations_conform(name):
    report = conform(name)
    assert report.passed, report
    assert report.not_tested["platform tpu"] == "this is cpu"
    assert ("dtype float16" in report.not_tested) is (name == "sdpa")
