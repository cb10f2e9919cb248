"""Runs with planted faults, of ``tests/long/wrong_runs.py``, and values that mend a run for further checks."""

from __future__ import annotations

import pytest

import raypar as rp
from raypar.config.fields import field_faults
from raypar.config.mended import changed, mended
from tests.support.fixes import repaired, settings
from tests.support.wrong_runs import wrong_run


@pytest.mark.parametrize("first", range(0, 60, 10))
def test_each_planted_fault_is_named_at_once_and_its_fix_works_as_printed(first, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a fault may be a folder's name
    for case in range(1000 + first, 1010 + first):
        wrong = wrong_run(case)
        assert rp.faults(wrong.run) and not wrong.missing(), case
        run, rounds = repaired(wrong.run, wrong.before)
        assert not rp.faults(run) and rounds, case


def test_what_is_wrong_besides_is_said_whatever_a_wrong_field_should_have_been():
    run = rp.Run(rp.GPT(layers="x", gelu=[], vocab=300), optim=rp.AdamW(no_decay=("nothing.*",)), servers=2)
    faults = "\n".join(rp.faults(run))
    for named in ("model.layers is 'x'", "model.gelu is []", "optim.no_decay: 'nothing.*'", "servers is 2"):
        assert named in faults


@pytest.mark.parametrize(
    ("run", "not_said"),
    [
        (rp.Run(mesh=rp.Mesh(dp="2"), recheck_every=1), "recheck_every"),
        (rp.Run(mesh=rp.Mesh(dp="2"), zero=3), "zero is"),
        (rp.Run(data_parallel="server", servers=2), "servers is"),
        (rp.Run(rp.GPT(moe="8"), mesh=rp.Mesh(dp=2, ep=2)), "mesh.ep"),
        (rp.Run(rp.GPT(window=-1, window_first=1)), "window_first"),
        (rp.Run(rp.GPT(heads=7.0), mesh=rp.Mesh(tp=2)), "model.heads 7"),
    ],
)
def test_nothing_is_said_that_depends_on_what_a_wrong_field_should_have_been(run, not_said):
    assert len(rp.faults(run)) == 1 and not_said not in rp.faults(run)[0]


def test_each_field_of_a_run_that_has_a_usual_value_has_another_sound_one():
    run = rp.Run()
    given = {"model.kind", "data.kind", "optim.kind"}  # constants
    for path, _ in settings(run):
        wrong = [fault for fault in field_faults(changed(run, path, object())) if fault.path.startswith(path)]
        if path in given:
            continue
        assert wrong, path
        one, other = mended(run, wrong)
        assert dict(settings(one))[path] != dict(settings(other))[path], path
