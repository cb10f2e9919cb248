"""Hostile and clumsy runs: some of the cases of ``tests/long/config_fuzz.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raypar.config.schedule import load
from raypar.config.toml import load_run
from raypar.errors import ConfigError
from raypar.schedules.schedule import ScheduleError
from tests.long.config_fuzz import sandbox, violation

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "here"
    with sandbox(folder):
        yield folder


@pytest.mark.parametrize("kind", range(8))
def test_any_run_is_a_plan_or_mistakes_that_are_listed(here, kind):
    wrongs = {case: wrong for case in range(kind, 160, 8) if (wrong := violation(case, here)[1]) is not None}
    assert not wrongs


@pytest.mark.parametrize("name", ["pipe", "zero", "loop", "folder", "gone"])
def test_a_file_that_never_ends_is_not_waited_for(here, name):
    with pytest.raises(ConfigError, match="can't be read"):
        load_run(here / f"{name}.toml")
    with pytest.raises(ScheduleError, match="can't be read"):
        load(str(here / f"{name}.csv"), 2, 4, None)


def test_a_link_that_the_user_names_is_followed(here):
    for kind in ("csv", "toml"):
        (here / f"linked.{kind}").symlink_to(here / f"ok.{kind}")
    assert load(str(here / "linked.csv"), 2, 4, None).schedule.name == "linked"
    assert load_run(here / "linked.toml").steps == 20


def test_every_recipe_is_checked_without_torch(here):
    code = (
        "import sys\nfrom dataclasses import replace\nfrom raypar.config.run import check_run\n"
        "from raypar.config.recipe_tables import RECIPES\nfrom raypar.config.recipes import recipe\n"
        "from raypar.actors.specs.data import Text\n"
        "text = Text(sys.argv[1] + '/a.txt', cache=sys.argv[1] + '/cache')\n"
        "for name in RECIPES:\n    check_run(replace(recipe(name), data=text))\n"
        "assert not {'torch', 'ray'} & set(sys.modules)"
    )
    words = [sys.executable, "-c", code, str(here)]
    run = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
