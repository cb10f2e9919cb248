"""A row of tests: a file of tests/gpu through pytest, whose counts are known after every test."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.gpu.first_hour.outcome import NotPossibleError, Report

_SHOWN = 20  # failures that are named


class _Counts:
    """A plugin of pytest's that reports after every test."""

    def __init__(self, report: Report) -> None:
        self._report, self._counts, self._failures = report, Counter[str](), list[str]()
        self.reasons = Counter[str]()

    def pytest_collection_finish(self, session: Any) -> None:
        self._report(tests=len(session.items))

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when != "call" and report.passed:
            return
        self._counts[report.outcome] += 1
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = str(report.longrepr if crash is None else crash.message).strip().splitlines() or [""]
            self._failures.append(f"{report.nodeid.rpartition('/')[2]}: {why[0]}")
        if report.skipped:
            self.reasons[str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)] += 1
        self._report(**self._counts, failures=self._failures[:_SHOWN], doing=report.nodeid.rpartition("/")[2])


def run_tests(path: str, report: Report) -> None:
    """Run the tests of a file.

    Raises:
        NotPossibleError: There is no pytest, or all tests were skipped.
        RuntimeError: A test failed, or they could not be run.
    """
    try:
        import pytest
    except ImportError as error:
        raise NotPossibleError(f"pytest is not here: {error}") from error
    counts = _Counts(report)
    code = pytest.main([path, "-q", "-p", "no:cacheprovider", "--tb=short"], plugins=[counts])
    failed, passed = counts._counts["failed"], counts._counts["passed"]
    if failed:
        raise RuntimeError(f"{failed} of {failed + passed} tests failed, the first: {counts._failures[0]}")
    if code != pytest.ExitCode.OK:
        raise RuntimeError(f"pytest ended with {pytest.ExitCode(code).name}")
    if not passed and counts.reasons:
        raise NotPossibleError("; ".join(f"{count} tests: {why}" for why, count in counts.reasons.items()))
