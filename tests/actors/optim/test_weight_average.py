"""The average of the weights is that of torch's AveragedModel over a plain process, on every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import raypar as rp
from raypar.actors.checkpoint.snapshot import AVERAGE
from raypar.actors.specs.lora import is_adapter
from raypar.checkpoint.find import averaged
from raypar.config.run import check_run
from raypar.errors import ConfigError
from raypar.job.start.resume import prepared
from raypar.parity.reference import watch_plainly
from raypar.planner.memory.worker import states_of
from raypar.planner.sizes.sized_run import counts_of
from tests.support.hugging_face import checkpoint_of
from tests.support.layouts import SEQ, VOCAB, tokens
from tests.support.relayouts import relaid
from tests.support.team import Team, linears

DECAY, STEPS = 0.75, 3
MODEL = rp.GPT(layers=2, hidden=16, heads=2, seq=SEQ, vocab=VOCAB, tied=True)
RUN = rp.Run(
    model=MODEL,
    data=rp.Batches(tokens, tokens),
    microbatches=2,
    steps=STEPS,
    optim=rp.AdamW(lr=1e-2, eps=1e-4),
    ema=DECAY,
    timeout=20.0,
)
LAYOUTS = {
    "one": {},
    "pp 2": {"mesh": rp.Mesh(pp=2)},
    "tp 2": {"mesh": rp.Mesh(tp=2)},
    "cp 2": {"mesh": rp.Mesh(cp=2)},
    "grid": {"mesh": rp.Mesh(tp="2d:2x2")},
    **{f"zero {level}": {"mesh": rp.Mesh(dp=2), "zero": level, "microbatches": 1} for level in range(4)},
    "pp 2, zero 1": {"mesh": rp.Mesh(pp=2, dp=2), "microbatches": 1},
    "offloaded": {"mesh": rp.Mesh(dp=2), "zero": 3, "microbatches": 1, "offload": "parameters"},
}


@cache
def torch_averages(run):
    """torch's averages of the weights that a plain process has after each step, and its weights after the last one."""
    after = [watch_plainly(run, step).weights for step in range(1, STEPS + 1)]
    module = nn.ParameterList(after[0].values())
    mean = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(run.ema))
    for weights in after:
        for parameter, weight in zip(module, weights.values(), strict=True):
            parameter.data = weight.detach().clone()
        mean.update_parameters(module)
    return dict(zip(after[0], [one.detach() for one in mean.module], strict=True)), after[-1]


def trained(run, steps=STEPS):
    team = Team.of(run)
    for number in range(steps):
        team.step(number)
    return team


def use(team, *, averages):
    found = team.each(lambda actor: actor.use_averages(averages) or True)
    assert all(one is True for one in found), found


def whole_averages(team):
    """The averages, by the weights that every replica has while they are used."""
    own = [team.weights(dp) for dp in range(team.run.mesh.dp)]
    use(team, averages=True)
    use(team, averages=True)  # a second time does nothing
    found = [team.weights(dp) for dp in range(team.run.mesh.dp)]
    use(team, averages=False)
    again = [team.weights(dp) for dp in range(team.run.mesh.dp)]
    for before, after in zip(own, again, strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before), "the weights are as they were"
    assert all(torch.equal(found[0][name], one[name]) for one in found for name in one), "all replicas have them"
    return found[0]


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
def test_averages_are_those_of_torch_over_a_plain_process(layout):
    changes = LAYOUTS[layout]
    plain = replace(
        RUN, mesh=rp.Mesh(dp=changes.get("mesh", rp.Mesh()).dp), microbatches=changes.get("microbatches", 2)
    )
    wanted, weights = torch_averages(plain)
    found = whole_averages(trained(replace(RUN, **changes)))
    wanted = wanted | {"head.out.weight": wanted["embed.tokens.weight"]}  # which are tied
    weights = weights | {"head.out.weight": weights["embed.tokens.weight"]}
    assert wanted.keys() - {"head.out.weight"} <= found.keys() <= wanted.keys()
    for name, average in found.items():
        torch.testing.assert_close(average, wanted[name], rtol=0, atol=3e-6, msg=lambda text, n=name: f"{n}: {text}")
        assert (average - weights[name]).norm() > 1e-3 * weights[name].norm(), "and not the weights themselves"


@pytest.mark.parametrize("layout", ["one", "pp 2", "zero 0", "zero 1"])
def test_an_average_is_that_of_the_layouts_own_weights_bit_by_bit(layout):
    team, mean = Team.of(replace(RUN, **LAYOUTS[layout])), {}
    for number in range(STEPS):
        team.step(number)
        for name, weight in team.weights().items():
            mean[name] = mean[name].lerp(weight, 1 - DECAY) if name in mean else weight
    found = whole_averages(team)
    assert all(torch.equal(found[name], mean[name]) for name in mean)


def losses(team):
    return [loss for result in team.step(0, "evaluate") for loss in result.losses]


def test_evaluations_of_all_layouts_use_them():
    teams = [trained(replace(RUN, **LAYOUTS[name])) for name in ("one", "pp 2", "tp 2")]
    own = [losses(team) for team in teams]
    for team in teams:
        use(team, averages=True)
    found = [losses(team) for team in teams]
    for team in teams:
        use(team, averages=False)
    assert [losses(team) for team in teams] == own
    for one, other in ((found[0], found[1]), (found[0], found[2]), (own[0], own[1])):
        assert one == pytest.approx(other, rel=1e-5)
    assert found[0] != pytest.approx(own[0], rel=1e-4)


def test_before_the_first_update_they_are_the_weights():
    team = Team.of(RUN)
    before = team.weights()
    found = whole_averages(team)
    assert all(torch.equal(before[name], found[name]) for name in before)


def states(team):
    """All that the optimizers keep, by rank, weight and key."""
    return {
        (rank, name, key): value.detach().clone()
        for rank, actor in enumerate(team.all)
        for name, key, value in actor.member.parts.update.state()
    }


def test_a_skipped_step_leaves_them():
    def data(step, microbatch, dp):
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(step))
        return x, x.sin() if step != 1 else x * torch.inf

    team = Team(linears(2), 2, 1, data=data, ema=DECAY, nonfinite="skip")
    team.step(0)
    before = states(team)
    assert [result.is_skipped for result in team.step(1)] == [True, True]
    assert before and all(torch.equal(value, before[key]) for key, value in states(team).items())
    team.step(2)
    assert any(key[2] == AVERAGE and not torch.equal(value, before[key]) for key, value in states(team).items())


def test_adapters_alone_have_averages():
    model = rp.Llama(layers=2, hidden=16, heads=2, seq=SEQ, vocab=VOCAB, lora=rp.Lora(rank=2))
    team = trained(replace(RUN, model=model, mesh=rp.Mesh(dp=2), microbatches=1, zero=3))
    kept = {name for _, name, key in states(team) if key == AVERAGE}
    assert kept and all(map(is_adapter, kept))


def test_half_precision_averages_its_masters_in_fp32():
    team = trained(replace(RUN, precision=rp.Precision(compute="bf16"), mesh=rp.Mesh(pp=2)))
    assert {v.dtype for key, v in states(team).items() if key[2] == AVERAGE} == {torch.float32}
    own = team.weights()
    found = whole_averages(team)
    assert any(not torch.equal(found[name], own[name]) for name in own)


@pytest.mark.parametrize("optim", [rp.SGD(lr=0.1), rp.Muon(lr=1e-2, adamw_eps=1e-4)], ids=["sgd", "muon"])
def test_every_optimizer_keeps_them(optim):
    run = replace(RUN, optim=optim)
    wanted, _ = torch_averages(replace(run, mesh=rp.Mesh()))
    found = whole_averages(trained(replace(run, mesh=rp.Mesh(pp=2))))
    for name, average in wanted.items():
        torch.testing.assert_close(found[name], average, rtol=0, atol=1e-5)


def test_a_checkpoint_has_them_for_every_layout(tmp_path):
    team = trained(replace(RUN, **LAYOUTS["zero 3"]), 2)
    wanted, found = whole_averages(team), checkpoint_of(team, tmp_path, 2)
    kept = [name for name in found.manifest.tensors if name.endswith(f".{AVERAGE}")]
    assert len(kept) == len(wanted)
    other = Team.of(replace(RUN, mesh=rp.Mesh(pp=2, tp=2)))
    loaded = other.each(lambda actor: actor.load(str(found.path), found.manifest.tensors) or True)
    assert all(one is True for one in loaded), loaded
    again = whole_averages(other)
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)
    plain = Team.of(replace(RUN, ema=None))
    as_weights = averaged(found)
    plain.each(lambda actor: actor.load(str(as_weights.path), as_weights.manifest.tensors) or True)
    assert all(torch.equal(weight, wanted[name]) for name, weight in plain.weights().items())


def test_a_relayout_takes_them_along():
    team = trained(replace(RUN, mesh=rp.Mesh(pp=2)), 2)
    wanted = whole_averages(team)
    after, _, _ = relaid(team, replace(RUN, **LAYOUTS["zero 3"]))
    again = whole_averages(after)
    assert again and all(torch.equal(average, wanted[name]) for name, average in again.items())


def test_a_checkpoint_without_them_says_what_would_have_them(tmp_path):
    found = checkpoint_of(trained(replace(RUN, ema=None), 1), tmp_path)
    with pytest.raises(ConfigError, match=r"has no averages of its weights: leave ema out, or train with ema 0\.999"):
        averaged(found)


@pytest.mark.parametrize("optim", [rp.AdamW(), rp.SGD(), rp.SGD(momentum=0.0), rp.Muon()], ids=str)
def test_the_forecast_counts_one_more_value_of_a_weight(optim):
    run = replace(RUN, optim=optim, mesh=rp.Mesh(pp=2))
    counts = counts_of(run, check_run(run)["train"], None)
    for more, less, held in zip(
        states_of(run, counts), states_of(replace(run, ema=None), counts), counts.held, strict=True
    ):
        assert more == less + held


@pytest.mark.parametrize(
    "changes, told",
    [
        (
            {"data_parallel": "parameter_server", "mesh": rp.Mesh(dp=2)},
            "ema is 0.75, but data_parallel is 'parameter_server', whose servers keep no averages: "
            "leave ema out, or set data_parallel to 'all_reduce'",
        ),
        (
            {"precision": rp.Precision(compute="bf16", reduce="bf16", master="bf16")},
            "ema is 0.75, but precision.master is 'bf16', in which an average hardly moves: "
            "leave ema out, or set precision.master to 'fp32'",
        ),
        (
            {"schedule": "pipedream", "mesh": rp.Mesh(pp=2), "clip": None, "model": replace(MODEL, tied=False)},
            "ema is 0.75, but in schedule 'pipedream' every stage updates by itself: leave ema out",
        ),
        ({"ema": 1.0}, "ema is 1.0: it must be below 1"),
    ],
)
def test_what_has_no_average_is_refused(changes, told):
    with pytest.raises(ConfigError) as raised:
        check_run(replace(RUN, **changes))
    assert raised.value.faults == [told]


@pytest.mark.sampled
@pytest.mark.parametrize("was, now", [(DECAY, None), (None, DECAY), (DECAY, 0.5)])
def test_a_run_goes_on_with_another_decay_and_says_so(was, now, tmp_path, caplog):
    found = checkpoint_of(trained(replace(RUN, ema=was), 1), tmp_path)
    prepared(replace(RUN, ema=now), found)
    told = ["none" if one is None else one for one in (now, was)]
    assert "resumed with ema {!r}, which was {!r}".format(*told) in caplog.text
    team = Team.of(replace(RUN, ema=now))
    assert all(one is True for one in team.each(lambda a: a.load(str(found.path), found.manifest.tensors) or True))
    team.step(1)
    kept = {key for _, _, key in states(team)}
    assert (AVERAGE in kept) == (now is not None)
