"""Experts that move between actors: placed by their load, with the optimizer's state; the training stays the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.config.toml import load_run
from raypar.job.layout.rebalance import balanced, rebalanced
from raypar.reporting.run_folder.read import read
from tests.support.replicas import agrees
from tests.support.snapshots import loaded, saved
from tests.support.team import Team

TINY = rp.recipe("moe-tiny")
MODEL = replace(TINY.model, layers=2, dropout=0.0)
RUN = replace(TINY, model=MODEL, microbatches=2, steps=4, timeout=20.0, mesh=rp.Mesh(dp=2, ep=2))
ORDER = {"blocks.0.mlp.experts": "3 1 0 2", "blocks.1.mlp.experts": "2 3 0 1"}
LAYOUTS = {
    "replicas": {},
    "two groups, zero 3": {"mesh": rp.Mesh(dp=4, ep=2), "zero": 3},
    "on tensor ranks": {"mesh": rp.Mesh(dp=2, tp=2, ep=2)},
    "expert actors": {"mesh": rp.Mesh(dp=2, expert_actors=2)},
}


@pytest.mark.parametrize(
    ("loads", "parts", "sums"),
    [
        ((9, 8, 1, 2), 2, [10, 10]),
        ((5, 5, 5, 5), 2, [10, 10]),
        ((0, 0, 0, 100, 0, 90, 0, 80), 4, [0, 80, 90, 100]),
        ((9, 9, 9, 1, 1, 1), 2, [11, 19]),  # three are all that fit on one
        ((7,), 1, [7]),
    ],
)
def test_slices_have_about_as_many_tokens(loads, parts, sums):
    found = balanced(loads, parts)
    assert sorted(found) == list(range(len(loads)))
    room = len(loads) // parts
    slices = [found[at : at + room] for at in range(0, len(loads), room)]
    assert sorted(sum(loads[number] for number in one) for one in slices) == sums


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_placed_in_another_order_they_train_as_in_one_process(layout):
    team = Team.of(replace(RUN, expert_order=ORDER, **layout))
    agrees(team, 2e-5)
    held = {name.split(".")[4] for name in team.all[-1].holds() if name.startswith("blocks.0.mlp.experts.")}
    if "zero" not in layout:
        assert held == {"0", "2"}, "the second slice of the order"


def test_training_goes_on_with_the_same_numbers_after_a_move(tmp_path):
    """The rows of one expert are added up alike wherever it is, so that the losses have the same bits."""
    team = Team.of(RUN)
    for step in range(2):
        team.step(step)
    tensors = saved(team, tmp_path)
    moved = loaded(Team.of(replace(RUN, expert_order=ORDER)), tmp_path, tensors)
    for step in (2, 3):
        ours, theirs = ([result.losses for result in one.step(step)] for one in (moved, team))
        assert ours == theirs
    weights = team.weights()
    assert all(torch.equal(weight, weights[name]) for name, weight in moved.weights().items())


@pytest.mark.long
def test_a_job_moves_its_experts_in_mid_run(job_on):
    job, other = job_on(2), replace(RUN, seed=3)
    job.reset(other)
    wanted = [report.loss for report in job.train(4)]
    job.reset(other)
    before = [report.loss for report in job.train(2)]
    order = job.rebalance({"blocks.0.mlp.experts": [5, 4, 0, 0], "blocks.1.mlp.experts": [1, 1, 1, 1]})
    assert job.run.expert_order == order
    assert order["blocks.0.mlp.experts"] in ("0 3 1 2", "0 2 1 3")
    assert job.next_step == 2
    assert before + [report.loss for report in job.train(2)] == wanted
    assert job.rebalance().keys() == {"blocks.0.mlp.experts", "blocks.1.mlp.experts"}


@pytest.mark.long
def test_a_run_with_a_folder_goes_on_in_it(job_on, tmp_path):
    folder = tmp_path / "run"
    job = job_on(2)
    job.reset(replace(RUN, microbatches=1, folder=str(folder)))
    job.train(1)
    order = job.rebalance()
    job.train(1)
    job.reset(RUN)  # which closes the folder
    assert [one["step"] for one in read(folder).metrics if "step" in one] == [0, 1]
    assert load_run(folder / "run.toml").expert_order == order
    assert (folder / "checkpoints/step-00000001").is_dir()


def test_mistakes_are_told():
    with pytest.raises(rp.ConfigError, match=r"every replica has all experts: set mesh\.ep"):
        rebalanced(replace(RUN, mesh=rp.Mesh(dp=2)), None, None)
    with pytest.raises(rp.ConfigError, match="no step has reported the loads of experts: take one, or give loads"):
        rebalanced(RUN, None, None)
    with pytest.raises(rp.ConfigError, match=r"loads of blocks\.0 are of no multiple of 2 experts"):
        rebalanced(RUN, {"blocks.0": [1, 2, 3]}, None)
    told = "\n".join(rp.faults(replace(RUN, expert_order={"blocks.7.mlp.experts": "0 1", **ORDER})))
    assert "there are no experts 'blocks.7.mlp.experts': name a list of them, as 'blocks.0.mlp.experts'" in told
    told = "\n".join(rp.faults(replace(RUN, expert_order={"blocks.0.mlp.experts": "0 1 1 3"})))
    assert "'blocks.0.mlp.experts' is '0 1 1 3': give each of the numbers 0 to 3 once, with blanks" in told
