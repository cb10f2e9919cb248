"""Workers as threads of one process: what they hold, what they free, and what they say when something fails."""

from __future__ import annotations

import gc
import re
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.group import Handle
from raypar.actors.collective.ledger import LedgerEntry
from raypar.actors.errors import ActionError, NonFiniteError
from raypar.actors.pipeline.p2p import Courier
from raypar.actors.specs.results import mean_loss
from raypar.actors.specs.types import SEND_WINDOW
from raypar.parity.verify import train_plainly
from raypar.schedules.action import Action
from tests.support.local_groups import FailingGroup, LocalGroup, LocalHub, local_groups
from tests.support.team import Team, batch, linears

# --- memory ----------------------------------------------------------------------------------------------------------


class Token:
    """Lives as long as the graph of one forward."""


class Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, live):
        ctx.token = Token()
        live.add(ctx.token)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Marked(nn.Module):
    """Counts how many forwards of it are kept for a backward."""

    def __init__(self):
        super().__init__()
        self.inner, self.live, self.most = nn.Linear(4, 4), weakref.WeakSet(), 0

    def forward(self, x):
        y = Mark.apply(self.inner(x), self.live)
        self.most = max(self.most, len(self.live))
        return y


@pytest.mark.parametrize(
    ("schedule", "pp", "m"),
    [("1f1b", 2, 1), ("1f1b", 2, 4), ("1f1b", 3, 2), ("1f1b", 4, 8), ("gpipe", 2, 4), ("gpipe", 3, 5), ("naive", 2, 3)],
)
def test_activations_are_kept_as_long_as_the_schedule_says_and_not_longer(schedule, pp, m):
    team = Team(lambda: [Marked() for _ in range(pp)], pp, m, schedule)
    gc.disable()
    try:
        for number in range(2):
            found = [result.in_flight for result in team.step(number)]
            written = {
                "1f1b": [min(pp - stage, m) for stage in range(pp)],
                "gpipe": [m] * pp,
                "naive": [1] * pp,
            }[schedule]  # fmt: skip
            assert all(graphs <= in_flight <= max(written) for graphs, in_flight in zip(written, found, strict=True))
            for worker, graphs in zip(team.workers, written, strict=True):
                (stage,) = worker.stages.values()
                assert stage.modules[0].most == graphs, "graphs alive at once"
                assert len(stage.modules[0].live) == 0, "a graph outlived its backward"
                assert (stage.in_flight, worker.member.probe.step.values) == ((), {})
    finally:
        gc.enable()


def test_recomputing_keeps_no_graph_and_changes_no_bit():
    kept, again = (
        Team(lambda: [Marked() for _ in range(2)], m=4, schedule="gpipe", recompute=how) for how in ("none", "full")
    )
    for number in range(2):
        assert [result.losses for result in kept.step(number)] == [result.losses for result in again.step(number)]
    assert [w.stages[i].modules[0].most for i, w in enumerate(kept.workers)] == [4, 4]
    assert [w.stages[i].modules[0].most for i, w in enumerate(again.workers)] == [1, 1]
    ours, theirs = again.gradients(), kept.gradients()
    assert len(ours) == 4
    assert all(torch.equal(gradient, theirs[name]) for name, gradient in ours.items())


@pytest.mark.parametrize("recompute", ["full", ("full", "full")])
def test_a_layer_that_is_run_again_counts_its_statistics_once(recompute):
    def layers():
        return [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]

    kept, again = (Team(layers, 1, 3, recompute=how) for how in ("none", recompute))
    for number in range(2):
        kept.step(number)
        again.step(number)
    theirs, ours = (team.workers[0].stages[0].buffers() for team in (kept, again))
    assert theirs["layers.1.1.num_batches_tracked"] == 6
    assert all(torch.equal(buffer, theirs[name]) for name, buffer in ours.items())


class Counted(nn.Module):
    """Multiplies by a buffer that each forward changes before or behind its use, in place or by a new one."""

    def __init__(self, in_place):
        super().__init__()
        self.inner, self.in_place = nn.Linear(4, 4), in_place
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("table", torch.ones(4))

    def forward(self, x):
        if self.in_place:
            y = self.inner(x) * (self.scale.clone() * self.table)
            self.scale.mul_(1.5)
            return y
        self.scale = self.scale * 1.5
        return self.inner(x) * (self.scale * self.table)


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("recompute", ["full", ("full", "none")])
def test_a_layer_that_reads_a_buffer_which_it_changes_is_run_again_with_what_it_read(recompute, in_place):
    kept, again = (
        Team(lambda: [Counted(in_place) for _ in range(2)], 1, 3, "gpipe", recompute=how) for how in ("none", recompute)
    )
    for number in range(2):
        assert [result.losses for result in kept.step(number)] == [result.losses for result in again.step(number)]
    theirs, ours = kept.gradients(), again.gradients()
    assert all(torch.equal(gradient, theirs[name]) for name, gradient in ours.items())
    buffers = [team.workers[0].stages[0].buffers() for team in (kept, again)]
    assert all(torch.equal(buffer, buffers[0][name]) for name, buffer in buffers[1].items())
    assert float(buffers[0]["layers.0.scale"]) == 1.5**6
    stage = again.workers[0].stages[0]
    found = stage._changing if recompute == "full" else stage._again[0]._state
    assert {name for _, name in found._changing} == {"scale"}, "only what changes is kept"


def test_statistics_that_the_first_batch_leaves_as_they_are_count_the_next_ones_once():
    """Zeros keep a mean of 0: only the second microbatch shows that it changes."""

    def steps(step, microbatch, dp):
        x, y = batch(step, microbatch, dp)
        return x * bool(step or microbatch), y

    kept, again = (
        Team(lambda: [nn.BatchNorm1d(4), nn.Linear(4, 4)], 1, 3, data=steps, recompute=how) for how in ("none", "full")
    )
    for number in range(2):
        kept.step(number)
        again.step(number)
    theirs, ours = (team.workers[0].stages[0].buffers() for team in (kept, again))
    assert all(torch.equal(buffer, theirs[name]) for name, buffer in ours.items())


@pytest.mark.parametrize("pp", [1, 2])
def test_a_loss_without_gradient_is_told(pp):
    team = Team(linears(), pp, 2, loss=lambda out, target: (out - target).pow(2).mean().detach())
    errors = team.each(lambda actor: actor.train(0))
    says = "the loss has no gradient: compute it from the last layer's output, without detach or no_grad"
    assert any(says in str(error) for error in errors)


def test_a_layer_that_is_run_again_keeps_no_graph():
    kept, again = (
        Team(lambda: [Marked() for _ in range(4)], m=4, schedule="gpipe", recompute=how)
        for how in ("none", ("none", "full", "full", "none"))
    )
    for number in range(2):
        assert [result.losses for result in kept.step(number)] == [result.losses for result in again.step(number)]
    graphs = [module.most for worker in again.workers for module in next(iter(worker.stages.values())).modules]
    assert graphs == [4, 1, 1, 4]
    theirs = kept.gradients()
    assert all(torch.equal(gradient, theirs[name]) for name, gradient in again.gradients().items())


def test_an_evaluation_keeps_nothing_and_changes_nothing():
    team = Team(lambda: [Marked() for _ in range(2)])
    before = team.weights()
    results = team.step(0, "evaluate")
    assert len(results[-1].losses) == 4
    assert [result.in_flight for result in results] == [0, 0]
    assert [w.stages[i].modules[0].most for i, w in enumerate(team.workers)] == [0, 0]
    assert all(torch.equal(weight, before[name]) for name, weight in team.weights().items())
    team.step(0)
    assert any(not torch.equal(weight, before[name]) for name, weight in team.weights().items())


# --- what users' layers may do ---------------------------------------------------------------------------------------


class First(nn.Module):
    """(B, 4) -> a float, a mask of ints, a float that needs no gradient, a float that nobody uses."""

    def __init__(self):
        super().__init__()
        self.inner, self.side = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        y = self.inner(x)
        return y, (y > 0).long(), torch.full((3, 4), 0.5), self.side(x)


class Second(nn.Module):
    """Leaves an input and a parameter of its own unused, and keeps one frozen."""

    def __init__(self):
        super().__init__()
        self.inner, self.unused = nn.Linear(4, 4), nn.Linear(2, 2)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, y, mask, half, side):
        return self.frozen(self.inner(y)) * half, mask, mask.bool()


class Third(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, y, mask, sign):
        return self.inner(y * mask) + sign


@pytest.mark.each_value
@pytest.mark.parametrize("recompute", ["none", "full", ("full", "full", "full"), ("none", "full", "none")])
@pytest.mark.parametrize(("pp", "schedule"), [(3, "1f1b"), (3, "gpipe"), (1, "interleaved")])
def test_tuples_ints_unused_and_frozen_tensors(recompute, pp, schedule):
    team = Team(
        lambda: [First(), Second(), Third()], pp, 4, schedule, recompute=recompute, chunks=3 if pp == 1 else None
    )
    for number in range(3):
        team.step(number)
    plain, weights = train_plainly(team.run), team.weights()
    assert set(weights) == set(plain.weights)
    assert "layers.1.frozen.weight" not in weights
    assert all(torch.equal(weight, weights[name]) for name, weight in plain.weights.items())
    gradients = {name: worker.gradient(name) for worker in team.workers for name in worker.holds()}
    assert gradients["layers.1.unused.weight"] is None
    assert gradients["layers.0.side.weight"] is None or not gradients["layers.0.side.weight"].any()
    assert gradients["layers.0.inner.weight"].any()


class Constant(nn.Module):
    """Its output does not depend on anything that trains."""

    def forward(self, x):
        return torch.ones(3, 4)


def test_a_stage_whose_output_needs_no_gradient():
    team = Team(lambda: [nn.Linear(4, 4), Constant(), nn.Linear(4, 4)], pp=3)
    team.step()
    assert not team.workers[0].gradient("layers.0.weight").any()
    assert team.workers[2].gradient("layers.2.weight").any()


def shared_and_frozen():
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
    layers[2].weight = layers[0].weight
    layers[2].bias = layers[0].bias
    layers[0].bias.requires_grad_(False)
    return layers


def test_a_frozen_parameter_may_be_shared_between_ranks():
    team = Team(shared_and_frozen, pp=3)
    team.step()
    plain = train_plainly(team.run)
    assert "layers.0.bias" not in plain.weights
    assert torch.equal(team.workers[0].parameter("layers.0.weight"), team.workers[2].parameter("layers.2.weight"))


# --- faults ----------------------------------------------------------------------------------------------------------


class Fails(nn.Module):
    def __init__(self, at):
        super().__init__()
        self.inner, self.calls, self.at = nn.Linear(4, 4), 0, at

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            raise KeyError("out of luck")
        return self.inner(x)


def test_an_exception_in_a_layer_names_actor_and_action_and_lets_the_others_go():
    team = Team(lambda: [nn.Linear(4, 4), Fails(3)])
    first, second = team.each(lambda worker: worker.train(0))
    assert isinstance(second, ActionError)
    assert str(second) == "actor pp=1: action 1F2 failed: KeyError: 'out of luck' (in layers.1)"
    assert not second.secondary
    assert "raise KeyError" in second.trace
    assert isinstance(first, ActionError)
    assert first.secondary
    assert first.actor == "pp=0"
    assert first.peer in ("pp=1", None)


@pytest.mark.parametrize(("nth", "action"), [(2, "1RECV_F2"), (6, "1RECV_F1"), (7, "1RECV_F2")])
def test_a_lost_connection_names_the_action_and_the_peer(nth, action):
    """Receives are posted before their turn once their shapes are known; one that fails there is named all the same."""
    hub = LocalHub()
    groups = [LocalGroup(hub, "pp", 0, 2, 10.0), FailingGroup(hub, "pp", 1, 2, op="recv", nth=nth, timeout=10.0)]
    team = Team(linears(), groups=groups)
    for number in range((nth - 1) // 4):
        team.step(number)
    first, second = team.each(lambda worker: worker.train(9))
    assert str(second) == f"actor pp=1: action {action} with pp=0 failed: injected fault"
    assert second.secondary
    assert isinstance(first, ActionError)
    assert first.secondary
    assert "aborted" in first.reason


def growing(step, microbatch, dp):
    x = torch.ones(2 + (microbatch == 2), 4)
    return x, x


def test_changing_shapes_name_the_stage_and_both_shapes():
    first, second = Team(linears(), data=growing).each(lambda worker: worker.train(0))
    assert first.action == "0SEND_F2"
    assert "stage 0 returned float32[3, 4], for an earlier microbatch float32[2, 4]: give" in str(first)
    assert "say Batches(..., varying=True)" in str(first)
    assert second.secondary


@pytest.mark.parametrize(
    ("layer", "says"),
    [
        (lambda: nn.LSTM(4, 4), "TypeError: a layer returned tuple"),
        (lambda: Returns(None), "TypeError: a layer returned NoneType"),
        (lambda: Returns({"y": 1}), "TypeError: a layer returned dict"),
        (lambda: Returns(torch.zeros(2, dtype=torch.complex64)), "a stage returned torch.complex64"),
        (lambda: Returns(tuple(torch.zeros(1) for _ in range(16))), "a stage returned 16 tensors"),
    ],
)
def test_what_cannot_cross_a_boundary_is_said(layer, says):
    first, _ = Team(lambda: [layer(), nn.Linear(4, 4)]).each(lambda worker: worker.train(0))
    assert isinstance(first, ActionError)
    assert says in str(first)


class Returns(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what = what

    def forward(self, x):
        return self.what


def test_a_loss_that_is_no_scalar_is_said():
    _, second = Team(linears(), loss=lambda output, target: (output - target) ** 2).each(lambda w: w.train(0))
    assert "ValueError: the loss must be one floating number, it is (3, 4)" in str(second)


def poisoned(step, microbatch, dp):
    x, y = batch(step, microbatch, dp)
    return x, y * float("nan") if step == 1 and microbatch == 2 else y


def test_a_loss_that_is_not_finite_changes_no_weight_anywhere_and_the_next_step_is_as_if_it_had_not_been():
    team, healthy = Team(linears(), data=poisoned), Team(linears())
    for one in (team, healthy):
        one.step(0)
    before = team.weights()
    for error in team.each(lambda worker: worker.train(1)):
        assert isinstance(error, NonFiniteError)
        assert re.search(
            r"step 2: the loss is not finite, nor are the gradients of 8 of 8 parameters \(layers.0.0.weight\); "
            "no weight was changed: look at the batch, or lower the learning rate",
            str(error),
        )
    assert all(torch.equal(weight, before[name]) for name, weight in team.weights().items())
    assert [r.losses for r in team.step(2)] == [r.losses for r in healthy.step(2)]
    wanted = healthy.weights()
    assert all(torch.equal(weight, wanted[name]) for name, weight in team.weights().items())


@pytest.mark.sampled
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("nonfinite", ["stop", "skip"])
def test_statistics_do_not_keep_what_a_step_that_is_not_taken_computed(nonfinite, recompute):
    def first_bad(step, microbatch, dp):
        x, y = batch(step, microbatch, dp)
        return x * float("inf") if step in (0, 2) and microbatch == 1 else x, y

    def layers():
        return [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), Counted(in_place=False)]

    team = Team(layers, 2, 3, data=first_bad, nonfinite=nonfinite, recompute=recompute, steps=4)
    healthy = Team(layers, 2, 3, recompute=recompute, steps=4)
    for number in range(4):
        results = team.each(lambda worker, step=number: worker.train(step))
        if number in (0, 2):
            assert all(isinstance(one, NonFiniteError) or one.is_skipped for one in results)
        else:
            assert [one.losses for one in results] == [one.losses for one in healthy.step(number)]
    for ours, theirs in zip(team.workers, healthy.workers, strict=True):
        (wanted,) = (stage.buffers() for stage in theirs.stages.values())
        (found,) = (stage.buffers() for stage in ours.stages.values())
        assert all(torch.equal(buffer, wanted[name]) for name, buffer in found.items())


# --- the courier -----------------------------------------------------------------------------------------------------


class Diary(LocalGroup):
    """Writes down what is started and what is waited for."""

    def __init__(self, *args):
        super().__init__(*args)
        self.events = []

    def _run(self, op, peer, sent, start, *args, **named):
        handle, number = (
            super()._run(op, peer, sent, start, *args, **named),
            sum(event[0] == op for event in self.events),
        )
        self.events.append((op, number))
        return Noted(self, handle, op, number)


class Noted(Handle):
    def __init__(self, group, handle, op, number):
        super().__init__(group, op, None, lambda timeout: None)
        self._diary, self._inner, self._name = group.events, handle, (f"wait {op}", number)

    def wait(self, timeout=None):
        self._diary.append(self._name)
        self._inner.wait(timeout)


def test_no_more_sends_than_the_window_are_under_way():
    diary = Diary(LocalHub(), "pp", 0, 2)
    courier = Courier(diary, lambda action: (1,), 20)
    for microbatch in range(12):
        courier.send(Action.parse(f"0SEND_F{microbatch}"), (torch.zeros(2),))
    assert ("wait send", 12 - SEND_WINDOW - 1) in diary.events
    assert ("wait send", 12 - SEND_WINDOW) not in diary.events
    courier.drain()
    assert ("wait send", 11) in diary.events
    assert [event for event in diary.events if event[0] == "send shapes"] == [("send shapes", 0)]


def test_receives_are_posted_before_their_turn_and_the_header_goes_once():
    hub = LocalHub()
    diaries = [Diary(hub, "pp", rank, 2) for rank in range(2)]
    team = Team(linears(2), m=4, groups=diaries)
    team.step(0)
    team.step(1)
    for diary, headers in zip(diaries, ("send shapes", "recv shapes"), strict=True):
        assert diary.ledger.entries()["pp", headers] == LedgerEntry(1, 1024)
    team.step(0, "evaluate")
    assert diaries[0].ledger.entries()["pp", "send shapes"].calls == 2, "a program has its own shapes"
    events = diaries[1].events
    second_step = events.index(("recv", 4))
    assert events[second_step + 1] == ("recv", 5), "two receives are posted at the start of a step"
    for number in range(5, 8):
        assert events.index(("recv", number)) < events.index(("wait recv", number - 1)), "posted one ahead"


def test_a_courier_without_a_peer_raises_what_its_group_raises():
    groups = local_groups("pp", 2, timeout=0.1)
    with pytest.raises(GroupError, match=r"recv shapes with rank 0 failed: nothing came within 0.1 s"):
        Courier(groups[1], lambda action: (0,), 4).receive(Action.parse("1RECV_F0"))


@pytest.mark.sampled
@pytest.mark.parametrize("recompute", ["none", "full", ("full", "full", "full"), ("none", "full", "none")])
@pytest.mark.parametrize("pp", [1, 3])
def test_a_stage_may_begin_with_a_layer_that_works_in_place(recompute, pp):
    def layers():
        return [nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)]

    # "even" gives the first of two stages two layers, so that the ReLU stands first only with three stages
    team = Team(layers, pp=pp, recompute=recompute)
    for number in range(3):
        team.step(number)
    plain = train_plainly(team.run)
    weights = team.weights()
    assert weights.keys() == plain.weights.keys()
    assert all(torch.equal(weights[name], plain.weights[name]) for name in weights)


class Turned(nn.Module):
    """Gives its output with its dims the other way round in memory."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x):
        return self.inner(x).t()


class Back(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 4)

    def forward(self, x):
        return self.inner(x.t() * x.mean())


class Pictures(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.inner = nn.Conv2d(channels, 8, 3, padding=1)

    def forward(self, x):
        x = x.view(-1, 1, 8, 8) if x.dim() == 2 else x
        return torch.relu(self.inner(x.to(memory_format=torch.channels_last)))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x):
        return self.inner((x * x.mean()).sum((2, 3)))


@pytest.mark.sampled
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("made", "bitwise"),
    [
        ((Turned, Back), True),
        # what comes back to the pictures stands in their order, in one process in that of the mean's gradient
        ((lambda: Pictures(1), lambda: Pictures(8), Pooled), False),
    ],
)
def test_outputs_arrive_in_their_order_in_memory(recompute, made, bitwise):
    team = Team(lambda: [nn.Linear(4, 64), *(make() for make in made)], pp=1 + len(made), recompute=recompute)
    results = [team.step(number)[-1] for number in range(team.run.steps)]
    plain, weights = train_plainly(team.run), team.weights()
    assert mean_loss(results[0].losses, results[0].counts) == plain.losses[0]
    same = torch.equal if bitwise else partial(torch.allclose, rtol=1e-4, atol=1e-6)
    assert all(same(weights[name], plain.weights[name]) for name in weights)


class Grows(nn.Module):
    """Writes into its input what it has counted."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x.mul_(self.calls.item())


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layers", [[nn.Linear, Grows, nn.Linear], [Grows, nn.Linear, nn.Linear]])
def test_a_layer_that_works_in_place_is_called_once(recompute, layers):
    team = Team(lambda: [make(4, 4) if make is nn.Linear else make() for make in layers], pp=3, recompute=recompute)
    for number in range(team.run.steps):
        team.step(number)
    plain, weights = train_plainly(team.run), team.weights()
    assert all(torch.equal(weights[name], plain.weights[name]) for name in weights)
    where = layers.index(Grows)
    assert int(team.workers[where].stages[where].modules[0].calls) == team.run.steps * team.run.microbatches


class Doubles(nn.Module):
    """Writes into its input."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x.mul_(1.5))


def shared(pattern):
    """Layers by letter; the same letter is the same module."""

    def layers():
        modules = {letter: nn.Linear(4, 4) for letter in sorted(set(pattern))}
        return [modules[letter] for letter in pattern]

    return layers


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("layers", "bound", "changes"),
    [
        (lambda: [nn.Linear(4, 4), Doubles()], 0.0, {"recompute": "full"}),
        (lambda: [Doubles(), Doubles()], 0.0, {"recompute": "full"}),
        (lambda: [nn.Linear(4, 4), Doubles()], 0.0, {"recompute": ("none", "full")}),
        (lambda: [Doubles(), nn.Linear(4, 4)], 0.0, {"recompute": ("full", "full"), "pp": 1}),
        (shared("aba"), 0.0, {"recompute": ("full", "full", "full"), "pp": 1}),
        (shared("aaab"), 0.0, {"recompute": ("full", "none", "full", "none"), "pp": 1}),
        (shared("abaa"), 1e-6, {}),
        (shared("aaba"), 1e-6, {"schedule": "interleaved"}),
        (shared("abcacb"), 1e-6, {"pp": 3, "m": 3, "schedule": "interleaved"}),
    ],
)
def test_layers_that_write_into_inputs_or_are_used_again_train_as_in_one_process(layers, bound, changes):
    team = Team(layers, **changes)
    for number in range(3):
        team.step(number)
    plain = train_plainly(team.run)
    homes = {name: weight for worker in team.workers for name, weight in worker.parameters().items()}
    assert plain.weights.keys() <= homes.keys()
    for name, weight in plain.weights.items():
        error = torch.linalg.vector_norm(homes[name] - weight) / torch.linalg.vector_norm(weight)
        assert error <= bound, name


def test_a_loss_that_is_not_finite_changes_no_weight_even_without_a_gradient():
    team = Team(linears(), loss=lambda output, target: (output * 0).sum() + torch.tensor(float("nan")))
    before = team.weights()
    results = team.each(lambda worker: worker.train(0))
    assert all(isinstance(result, NonFiniteError) for result in results)
    assert all(torch.equal(weight, before[name]) for name, weight in team.weights().items())


class UnspeakableError(Exception):
    def __str__(self):
        raise TypeError("no text")


def test_an_exception_without_a_text_is_named_all_the_same():
    class Raises(nn.Module):
        def forward(self, x):
            raise UnspeakableError

    _, second = Team(lambda: [nn.Linear(4, 4), Raises()]).each(lambda worker: worker.train(0))
    assert str(second).startswith("actor pp=1: action 1F0 failed: UnspeakableError")
