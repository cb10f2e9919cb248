"""The tests that have failed on other machines pass under the conditions of these: see tests/support/conditions.py."""

from __future__ import annotations

import sys

import pytest

from tests.support.conditions import CONDITIONS, lacks, run_under

SUSPECTS = (  # without Ray, so that they are quick
    "tests/raypar/cluster/test_hosts.py::test_hosts_are_apart_and_reach_one_another_until_the_cable_is_cut",
    "tests/raypar/cluster/lifecycle/test_release.py",
    "tests/raypar/reporting/html/test_live.py",
    "tests/actors/data/test_text_files.py::test_a_device_is_no_missing_file",
)
WITH_ACTORS = (
    "tests/raypar/job/test_job.py",
    "tests/raypar/job/test_faults.py",
    "tests/raypar/cli/test_cli.py",
    "tests/raypar/doctor",
    "tests/raypar/job/recover/test_recovery.py",
    "tests/actors/checkpoint",
    "tests/actors/data",
    "tests/actors/collective/test_shm.py",
    "tests/raypar/cluster/test_interrupts.py",
    "tests/test_house.py",
)
AT_ONCE = [name for name in CONDITIONS if name != "other-user"]


def passes(conditions, tests, timeout):
    possible = [name for name in conditions if not lacks(name)]
    code, printed = run_under(possible, [sys.executable, "-m", "pytest", *tests], timeout)
    assert code == 0, printed
    assert " passed" in printed or "%]" in printed, printed


@pytest.mark.timeout(300)
def test_suspects_pass_in_the_background_below_tmp_with_little_room():
    passes(AT_ONCE, SUSPECTS, 280)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_tests_on_actors_pass_under_the_same_conditions():
    passes(AT_ONCE, WITH_ACTORS, 1180)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(lacks("other-user")), reason=lacks("other-user"))
def test_suspects_pass_as_another_user():
    passes(["background", "below-tmp", "other-user"], SUSPECTS, 280)


def test_a_condition_is_what_it_says():
    """Each is looked at by a program that runs under it."""
    looks = {
        "background": "import signal as s; assert s.getsignal(s.SIGINT) == s.getsignal(s.SIGHUP) == s.SIG_IGN",
        "below-tmp": "import os; assert os.getcwd().startswith('/tmp/') and ' ' in os.getcwd(); os.stat('raypar/cli')",
        "long-tmpdir": "import os; assert len(os.environ['TMPDIR']) > 107 and os.access(os.environ['TMPDIR'], os.W_OK)",
        "read-only-home": "import os; assert os.statvfs(os.environ['HOME']).f_flag & os.ST_RDONLY",
        "small-shm": "import os; s = os.statvfs('/dev/shm'); assert s.f_blocks * s.f_frsize == 16 << 20",
        "other-user": "import os; assert os.getuid() == 65534",
    }
    assert looks.keys() == CONDITIONS.keys()
    for name, look in looks.items():
        if not lacks(name):
            assert run_under([name], [sys.executable, "-c", look], 60) == (0, ""), name
