"""Asynchronous schedules against plain simulators of the papers' updates, written from their formulas."""

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.func import functional_call

from raypar.actors.errors import ActionError
from raypar.actors.specs.model import Layers
from raypar.actors.specs.optim import SGD, AdamW, Muon
from raypar.actors.specs.precision import Precision
from raypar.schedules.action import Action, Op
from raypar.schedules.generators.pipedream import pipedream
from raypar.schedules.schedule import Schedule
from raypar.schedules.versions import most_versions
from tests.support.team import Team, batch, linears, mse

PAPERS = {  # by schedule: the version of stage s of p that step t computes with
    "pipedream": lambda p, s, t: max(0, t - (p - 1 - s)),
    "pipedream-vertical": lambda p, s, t: max(0, t - (p - 1)),
    "pipedream-2bw": lambda p, s, t: max(0, t - 1),
}


def team_of(schedule, pp, m, stream, **changes):
    fields = {"steps": 20, "zero": 0, "flush_every": stream}
    return Team(linears(4), pp, m, schedule, **fields | changes)


def streamed(team, *lengths):
    """The losses of all microbatches, after streams of these lengths."""
    first, losses = 0, []
    for length in lengths:
        results = team.each(lambda actor, first=first, length=length: actor.train(first, None, 0, length))
        for result in results:
            if isinstance(result, Exception):
                raise result
        losses += results[-1].losses
        first += length
    return losses


def simulated(team, *lengths, dp=1):
    """What the paper's update gives: a history of all weights, and one plain process."""
    run, version = team.run, PAPERS[team.run.schedule]
    p, m = run.mesh.pp, run.microbatches
    model = nn.Sequential(*run.model.fn())
    start = Team(linears(4), 1, m, optim=run.optim).weights()
    names = {
        f"{index}.{name}": f"layers.{index}.{name}"
        for index, layer in enumerate(model)
        for name, _ in layer.named_parameters()
    }
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(start[names[name]])
    optimizer = team.run.optim, {SGD: torch.optim.SGD, AdamW: torch.optim.AdamW}[type(run.optim)]
    optimizer = optimizer[1](model.parameters(), **_settings(run.optim))
    losses, first = [], 0
    for length in lengths:
        history, before = [], ()
        for t in range(length):
            history.append({name: p_.detach().clone() for name, p_ in model.named_parameters()})
            seen = {
                name: history[version(p, int(name.split(".")[0]) * p // 4, t)][name].requires_grad_()
                for name in history[-1]
            }
            total = 0.0
            for microbatch in range(m):
                for replica in range(dp):
                    x, y = batch(first + t, microbatch, replica)
                    loss = mse(functional_call(model, seen, (x,)), y)
                    losses.append(float(loss.detach()))
                    total = total + loss / (m * dp)
            gradients = torch.autograd.grad(total, list(seen.values()))
            late = [version(p, int(name.split(".")[0]) * p // 4, t) < t for name in seen]
            for number, (parameter, gradient) in enumerate(zip(model.parameters(), gradients, strict=True)):
                feeds_back = run.delay_feedback and late[number] and t > 0
                parameter.grad = 2 * gradient - before[number] if feeds_back else gradient.clone()
            before = gradients
            optimizer.step()
        first += length
    return losses, {names[name]: parameter.detach() for name, parameter in model.named_parameters()}


def _settings(optim):
    if isinstance(optim, SGD):
        return {"lr": optim.lr, "momentum": optim.momentum}
    return {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": optim.weight_decay}


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("optim", [SGD(lr=0.1, momentum=0.9), AdamW(lr=1e-2, weight_decay=0.0)], ids=["sgd", "adamw"])
@pytest.mark.parametrize(
    ("schedule", "pp", "m"),
    [
        ("pipedream", 1, 1),
        ("pipedream", 2, 1),
        ("pipedream", 4, 1),
        ("pipedream-vertical", 4, 1),
        ("pipedream-2bw", 2, 2),
        ("pipedream-2bw", 4, 4),
    ],
)
def test_the_papers_updates(schedule, pp, m, optim):
    team = team_of(schedule, pp, m, 7, optim=optim)
    losses = streamed(team, 7, 3)
    expected, weights = simulated(team, 7, 3)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=1e-7)
    for name, weight in team.weights().items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("schedule", "m"), [("pipedream", 1), ("pipedream-2bw", 2)])
def test_feedback_against_the_delay(schedule, m):
    team = team_of(schedule, 2, m, 6, optim=SGD(lr=0.1), delay_feedback=True)
    losses = streamed(team, 6, 2)
    expected, weights = simulated(team, 6, 2)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-6, atol=1e-7)
    for name, weight in team.weights().items():
        torch.testing.assert_close(weight, weights[name], rtol=1e-6, atol=1e-7)
    assert losses != streamed(team_of(schedule, 2, m, 6, optim=SGD(lr=0.1)), 6, 2)


@pytest.mark.parametrize("changes", [{"dp": 2}, {"dp": 2, "recompute": "full"}], ids=["dp", "dp-recompute"])
def test_replicas_sum_the_gradients_of_each_step(changes):
    team = team_of("pipedream-2bw", 2, 2, 4, optim=SGD(lr=0.1), **changes)
    losses = streamed(team, 4)
    alone = team_of("pipedream-2bw", 2, 4, 4, optim=SGD(lr=0.1), data=_both)
    streamed(alone, 4)
    for name, weight in team.weights().items():
        torch.testing.assert_close(weight, alone.weights()[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(weight, team.weights(1)[name])
    assert len(losses) == 8


def _both(step, microbatch, dp):
    return batch(step, microbatch // 2, microbatch % 2)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_recomputation_runs_with_the_version_of_the_first_time(recompute):
    team = team_of("pipedream", 4, 1, 6, recompute=recompute)
    losses = streamed(team, 6)
    assert losses == streamed(team_of("pipedream", 4, 1, 6), 6)


class Scaled(nn.Module):
    """Its weight has an attribute that the forward reads."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.linear.weight.scale = 0.5

    def forward(self, x):
        return self.linear(x * self.linear.weight.scale).tanh()


def test_versions_have_the_attributes_of_their_parameter():
    model = Layers(lambda: [Scaled() for _ in range(4)], mse)
    team, plain = team_of("pipedream", 2, 2, 4, model=model), Team(None, 2, 2, "1f1b", model=model)
    losses = streamed(team, 1, 1)
    assert losses == [loss for step in range(2) for loss in plain.step(step)[-1].losses]
    assert all(torch.equal(weight, plain.weights()[name]) for name, weight in team.weights().items())


def test_halves_of_a_backward_have_the_version_of_the_forward():
    whole = pipedream(2, 2, 3)
    halved = Schedule.of("halved", [_halved(row) for row in whole.rows])
    teams = [team_of(schedule, 2, 2, None) for schedule in (whole, halved)]
    losses = [streamed(team, 3) for team in teams]
    assert losses[0] == losses[1]
    assert all(torch.equal(weight, teams[1].weights()[name]) for name, weight in teams[0].weights().items())


def _halved(row):
    for action in row:
        yield from (
            [Action(action.stage, op, action.microbatch) for op in (Op.I, Op.W)] if action.op is Op.B else [action]
        )


def test_half_precision_keeps_versions_of_the_weights_that_compute():
    team = team_of("pipedream", 2, 1, 6, precision=Precision("bf16"), optim=AdamW(lr=1e-2))
    losses = streamed(team, 6)
    assert (
        max(
            abs(a - b)
            for a, b in zip(losses, streamed(team_of("pipedream", 2, 1, 6, optim=AdamW(lr=1e-2)), 6), strict=True)
        )
        < 0.02
    )


@pytest.mark.parametrize("schedule", PAPERS)
def test_flushed_after_every_step_it_is_the_synchronous_run(schedule):
    """Bit by bit: the same sums, the same optimizer, no norm to clip by."""
    optim = Muon(lr=1e-2, adamw=("layers.0.*",))
    team, plain = team_of(schedule, 2, 2, 8, optim=optim), Team(linears(4), 2, 2, "1f1b", optim=optim, steps=20)
    losses = streamed(team, 1, 1, 1)
    assert losses == [loss for step in range(3) for loss in plain.step(step)[-1].losses]
    assert all(torch.equal(weight, plain.weights()[name]) for name, weight in team.weights().items())


def test_versions_are_counted_in_memory():
    team = team_of("pipedream", 4, 1, 8, optim=SGD(lr=0.1))
    streamed(team, 8)
    results = streamed_results(team)
    kept = most_versions(team.programs["train"])
    assert kept == (4, 3, 2, 1)
    for result, versions in zip(results, kept, strict=True):
        assert result.memory["versions"] == (versions - 1) * result.memory["weights"]


def streamed_results(team):
    return team.each(lambda actor: actor.train(8, None, 0, 8))


def test_weights_that_a_graph_needs_are_not_written_to():
    """While the optimizer goes on, the bytes of every kept version stay."""
    team = team_of("pipedream", 2, 1, 4)
    (versions,) = team.workers[0].member._stream._versions.values()
    seen = []
    perform = versions._perform

    def noted(action):
        seen.append({number: [weight.clone() for weight in bank] for number, bank in versions._banks.items()})
        perform(action)

    versions._perform = noted
    streamed(team, 4)
    compared = 0
    for before, after in pairwise(seen):
        for number in before.keys() & after.keys():
            compared += 1
            assert all(map(torch.equal, before[number], after[number]))
    assert compared > 10


def test_a_loss_that_is_not_finite_ends_the_stream_and_hangs_nobody():
    def data(step, microbatch, dp):
        x, y = batch(step, microbatch, dp)
        return x, y * (float("inf") if step == 2 else 1.0)

    team = team_of("pipedream", 2, 1, 6, data=data)
    with pytest.raises(ActionError) as error:
        results = team.each(lambda actor: actor.train(0, None, 0, 6))
        raise next(one for one in reversed(results) if isinstance(one, Exception))
    assert "1STEP2" in str(error.value)
    assert "step 3: the loss is not finite" in str(error.value)
    assert "resume from the last checkpoint" in str(error.value)


def test_unequal_numbers_of_targets_are_told():
    def data(step, microbatch, dp):
        x, y = batch(step, microbatch, dp)
        return x, y[:2] if step == 3 else y

    team = team_of("pipedream", 2, 1, 6, data=data, loss=lambda output, target: mse(output[: len(target)], target))
    results = team.each(lambda actor: actor.train(0, None, 0, 6))
    assert "step 4 has 8 targets, not 12" in str(results[-1])


def test_an_evaluation_takes_the_newest_weights():
    team = team_of("pipedream", 2, 1, 4)
    streamed(team, 4)
    found = team.step(0, "evaluate")[-1].losses
    plain = team_of("pipedream", 1, 1, 4)
    with torch.no_grad():
        for name, parameter in plain.workers[0].member.state.parameters.items():
            parameter.copy_(team.weights()[name])
    assert found == plain.step(0, "evaluate")[-1].losses
