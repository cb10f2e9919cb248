"""The load of experts and auxiliary losses in reports, in the line of a step, in metrics, and at trackers."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

import raypar as rp
from raypar.actors.mesh.world import World
from raypar.actors.specs.results import AddedLoss, ExpertLoad, StepResult
from raypar.config.run import check_run
from raypar.reporting.experts import Loads, loads_of
from raypar.reporting.progress import _figures
from raypar.reporting.record import Record
from raypar.reporting.report import report_of
from raypar.reporting.run_folder.read import read
from raypar.reporting.summary import closing_rows
from raypar.reporting.trackers.tracker import scalars
from tests.support.routed import routed
from tests.support.team import Team

NOTHING = StepResult((2.0,), (4,), 1.0, 0.1, 1.0, 0.0, 2.0, None, 1, 0)


def result(factor=1.0, tokens=(3, 1), dropped=(0, 0), layers=(2, 10)):
    return replace(
        NOTHING,
        auxiliary=tuple(AddedLoss(f"blocks.{n}.mlp", kind, factor * n) for kind in ("switch", "z") for n in layers),
        loads=tuple(ExpertLoad(f"blocks.{n}.mlp", tokens, dropped) for n in layers),
    )


def report(*results, mesh=None):
    return report_of(4, 1.0, results, World.of(mesh or rp.Mesh(dp=len(results)), "all_reduce", 1, 0))


def test_losses_are_means_over_replicas_and_tokens_are_sums():
    made = report(result(1.0, dropped=(1, 0), layers=(10, 2)), result(3.0, tokens=(9, 1)))
    assert made.aux == {"switch": 24.0, "z": 24.0}
    assert list(made.aux_by_layer["z"].items()) == [("blocks.2.mlp", 4.0), ("blocks.10.mlp", 20.0)]
    assert made.loads.layers == tuple(ExpertLoad(f"blocks.{n}.mlp", (12, 2), (1, 0)) for n in (2, 10))
    assert made.loads.max_load == pytest.approx(12 / 7)
    assert made.loads.dropped == pytest.approx(1 / 14)
    assert repr(made.loads) == "<Loads of 2 layers: max/mean 1.71 in blocks.2.mlp, 7.1% dropped>"


def test_context_ranks_have_the_loss_of_the_whole_sequences():
    assert report(result(), result(), mesh=rp.Mesh(cp=2)).aux == {"switch": 12.0, "z": 12.0}


def test_a_step_without_experts_tells_nothing_of_them():
    made = report(NOTHING)
    assert (made.aux, made.loads) == ({}, None)
    assert not {"max_load", "dropped"} & made.to_dict().keys()
    assert "load" not in _figures(made, "tokens")


def test_experts_that_nobody_chose_are_even():
    assert loads_of([result(tokens=(0, 0))]).max_load == 1.0
    assert loads_of([result(tokens=(0, 0))]).dropped == 0.0


def test_the_line_of_a_step_has_the_load():
    assert "loss 2.0000  aux 24.0000  load 1.50  grad" in _figures(report(result()), "tokens")
    assert "load 1.50  dropped 25.0%  grad" in _figures(report(result(dropped=(1, 1)), result()), "tokens")
    assert "blocks.2.mlp" in report(result())._repr_html_()


def test_trackers_get_numbers_by_name():
    reported = scalars(report(result(dropped=(1, 0))).to_dict())
    assert {
        name: reported[name] for name in ("train/aux/switch", "train/aux/z", "train/max_load", "train/dropped")
    } == {
        "train/aux/switch": 12.0,
        "train/aux/z": 12.0,
        "train/max_load": 1.5,
        "train/dropped": 0.25,
    }


@pytest.fixture
def run(tmp_path):
    team = Team(routed, 2, 2, steps=1000)
    return replace(team.run, folder=str(tmp_path / "run"))


def test_metrics_have_the_tokens_of_some_steps_and_the_load_of_all(run):
    record, made = Record(run), report(result(dropped=(1, 0)))
    record.begin(run, check_run(run)["train"], 0, "job")
    for step in range(3):
        record.write(replace(made, step=step))
    record.close()
    lines = read(Path(run.folder)).metrics
    assert [line["max_load"] for line in lines] == [1.5] * 3
    assert [line["loads"] is None for line in lines] == [True, False, True]
    assert lines[1]["loads"]["layers"][0] == {"layer": "blocks.2.mlp", "asked": [3, 1], "dropped": [1, 0]}
    assert json.loads(json.dumps(lines[0]["aux"])) == {"switch": 12.0, "z": 12.0}


def test_the_summary_has_the_load(run):
    reports = [report(result(tokens=(n, 1))) for n in (1, 3, 9)]
    rows = dict(closing_rows(run, check_run(run)["train"], reports, rp.Evaluation(3, 2.0, 4, 1.0), 1.0, 2.0, {}))
    assert rows["switch loss"] == "12"
    assert rows["expert load"] == "max/mean 1.80 in blocks.2.mlp, 1.50 (median)"
    assert "choices dropped" not in rows


def test_the_least_even_layer_is_named():
    loads = Loads((ExpertLoad("a", (1, 1), (0, 0)), ExpertLoad("b", (3, 1), (0, 0))))
    assert loads.worst.layer == "b"
