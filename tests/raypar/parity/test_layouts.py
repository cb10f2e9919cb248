"""Layouts that Hypothesis thinks of compute what one plain process does. Always the same; layout_fuzz.py has others."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings

from tests.support.layouts import layouts, verdict_of


@pytest.mark.long
@settings(max_examples=8, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(layouts())
def test_any_layout_is_one_plain_process_within_the_bounds(run):
    verdict = verdict_of(run)
    assert verdict.ok, str(verdict)
