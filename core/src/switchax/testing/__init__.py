"""The conformance kit: holds an operation against the rules of its kind.

Ten lines of pytest in a plugin, or `switchax conform NAME`:

    from switchax.testing import conform

    def test_it_conforms():
        report = conform("my_flash")
        assert report.passed, report
"""

from .conformance import conform
from .report import Failure, Report, Result
from .suite import Case, Finding, Suite

__all__ = ["Case", "Failure", "Finding", "Report", "Result", "Suite", "conform"]
