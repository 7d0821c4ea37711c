"""newkernel holds the contract of its kind."""

from switchax.testing import conform


def test_it_conforms() -> None:
    report = conform("newkernel")
    assert report.passed, report
