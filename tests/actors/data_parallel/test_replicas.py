"""Data parallelism: replicas compute what one process computes, and move what the textbook says."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from raypar.actors.data_parallel.buckets import pack
from raypar.actors.data_parallel.reducer import Channel, Reducer
from raypar.actors.data_parallel.replica_checks import UnequalReplicasError
from raypar.actors.data_parallel.sums import GradientSums
from raypar.actors.errors import NonFiniteError
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.machine.offload_storage import DeviceStorage
from raypar.actors.models.transformer import TransformerModel
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import GPT
from raypar.actors.specs.optim import SGD, AdamW
from raypar.actors.specs.results import losses_of, mean_loss
from raypar.schedules.action import COMPUTE, Action, Op
from tests.support.local_groups import local_groups
from tests.support.replicas import CLOSE, LAYOUTS, MODES, SHARED, UNEQUAL, agrees, classes, labels, shared
from tests.support.team import Team, batch, linears, mse

# --- what one process computes ---------------------------------------------------------------------------------------


# Without a pipeline, and for equal counts, one schedule is enough.
CASES = [
    (dp, pp, schedule, equal)
    for dp, pp in LAYOUTS
    for schedule in ("gpipe", "1f1b", "interleaved")
    for equal in (True, False)
    if schedule == "1f1b" or (pp > 1 and not equal)
]


@pytest.mark.sampled
@pytest.mark.each_pair
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dp", "pp", "schedule", "equal"), CASES)
def test_every_layout_computes_what_one_process_does(dp, pp, schedule, equal, mode):
    m = 2 * pp if schedule == "interleaved" else 4
    changes = {} if equal else UNEQUAL
    team = Team(linears(6), pp, m, schedule, dp=dp, **MODES[mode], bucket_mb=1e-4, clip=0.5, steps=2, **changes)
    agrees(team)


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("mode", "dp", "m"),
    [(mode, dp, 6 // dp) for mode in MODES for dp in (1, 2, 3, 6) if dp > 1 or mode not in SHARED],
)
def test_every_token_of_a_step_weighs_the_same(dp, m, mode):
    """Against torch alone: the mean over all rows that count, at once."""
    team = Team(linears(3), 1, m, dp=dp, **MODES[mode], steps=1, **UNEQUAL)
    model = nn.Sequential(*linears(3)())
    model.load_state_dict({name.removeprefix("layers."): weight for name, weight in team.weights().items()})
    pairs = [UNEQUAL["data"](0, microbatch, replica) for microbatch in range(m) for replica in range(dp)]
    x, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    wanted = nn.functional.cross_entropy(model(x), y)
    wanted.backward()
    losses, counts = losses_of(team.step(0))
    assert sum(counts) == int((y != -100).sum()) < len(y)
    assert mean_loss(losses, counts) == pytest.approx(float(wanted.detach()), rel=CLOSE)
    gradients = team.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[f"layers.{name}"], parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pp", [1, 2, 3])
@pytest.mark.parametrize("optim", [SGD(lr=0.1), AdamW(lr=0.01)])
def test_one_microbatch_on_each_of_two_replicas_is_bitwise(pp, optim, mode):
    agrees(Team(linears(3), pp, 1, dp=2, optim=optim, **MODES[mode], clip=0.5), bound=0.0)


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("dp", [1, 2])
def test_any_number_of_servers(servers, dp):
    agrees(Team(linears(4), 2, 2, dp=dp, data_parallel="parameter_server", servers=servers, clip=0.5))


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("bucket_mb", [1e-6, 1e-4, 2e-4, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_the_size_of_buckets_changes_no_bit(bucket_mb, mode):
    weights = []
    for size in (bucket_mb, 4.0):
        team = Team(linears(4), dp=2, **MODES[mode], bucket_mb=size)
        team.step(0)
        weights.append(team.weights())
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
def test_stages_and_ranks_without_parameters(mode):
    agrees(Team(lambda: [nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)], 3, 2, dp=2, **MODES[mode]))


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("pattern", "pp", "schedule"),
    [
        ("abca", 2, "1f1b"),
        ("abba", 4, "gpipe"),
        ("abcacb", 3, "interleaved"),
        ("aba", 1, "1f1b"),
        ("abca", 1, "interleaved"),
    ],
)
def test_tied_weights(pattern, pp, schedule, mode):
    changes = {"chunks": 2} if schedule == "interleaved" else {}
    agrees(Team(shared(pattern), pp, 6, schedule, dp=2, **MODES[mode], servers=1, bucket_mb=1e-4, **changes))


class OnOff(nn.Module):
    """Uses a linear layer only for positive sums, beside one that it always uses."""

    def __init__(self, linear, on):
        super().__init__()
        self.linear, self.own, self.on = linear, nn.Linear(4, 4), on

    def forward(self, x):
        return self.linear(self.own(x)) if self.on() else self.own(x)


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pp", [1, 3])
def test_a_tied_weight_that_no_batch_uses_stays_as_it_is(pp, mode):
    """Decay and momentum would move it, were its gradient 0 and not None."""

    def layers():
        tied = nn.Linear(4, 4)
        return [OnOff(tied, lambda: False) for _ in range(3)]

    team = Team(layers, pp, 2, dp=2, **MODES[mode], optim=AdamW(lr=0.1))
    before = team.weights()
    agrees(team)
    after = team.weights()
    assert torch.equal(before["layers.0.linear.weight"], after["layers.0.linear.weight"])
    assert not torch.equal(before["layers.0.own.weight"], after["layers.0.own.weight"])


def test_a_tied_weight_that_one_stage_uses_has_its_gradient_in_all():
    def layers():
        tied = nn.Linear(4, 4)
        return [OnOff(tied, on) for on in (lambda: False, lambda: False, lambda: True)]

    agrees(Team(layers, 3, 2, optim=AdamW(lr=0.1)))


def test_targets_without_a_sign_all_count():
    """-100 is 156 in a byte, which is a class like others."""

    def data(step, microbatch, dp):
        x, _ = batch(step, microbatch, dp)
        return x, torch.full((len(x),), 156 * dp, dtype=torch.uint8)

    def loss(output, target):
        return ((output[:, 0] - target / 156) ** 2).mean()

    team = Team(linears(2), dp=2, data=data, loss=loss)
    agrees(team)
    assert {result.counts for result in team.step(2)} == {(), (3, 3, 3, 3)}


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("recompute", ["none", "full", ("full", "none", "full", "full")])
@pytest.mark.parametrize("mode", MODES)
def test_recomputing(recompute, mode):
    agrees(Team(linears(4), dp=2, **MODES[mode], recompute=recompute))


class Sometimes(nn.Module):
    """Has a weight that only some batches need, and one that none does."""

    def __init__(self):
        super().__init__()
        self.always, self.rarely, self.never = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.rarely(self.always(x)) if float(x.detach()[0, 0]) > 0.3 else self.always(x)


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("m", [1, 3])
def test_weights_that_some_batches_or_none_use(m, mode):
    """Whether a replica makes a gradient must not decide about the order of messages, nor None become zeros, which
    would decay the weight."""
    decaying = SGD(lr=0.1, momentum=0.0, weight_decay=0.1)
    team = Team(lambda: [Sometimes(), Sometimes()], 2, m, dp=3, **MODES[mode], bucket_mb=1e-6, optim=decaying)
    plain = agrees(team)
    assert plain.gradients["layers.0.never.weight"] is None


def test_an_evaluation_weighs_by_tokens_too():
    team = Team(linears(4), dp=3, **UNEQUAL)
    losses, counts = losses_of(team.step(1, "evaluate"))
    wanted = [team.run.data.validate(1, microbatch, dp)[1] for microbatch in range(4) for dp in range(3)]
    assert counts == [int((target != -100).sum()) for target in wanted]
    assert mean_loss(losses, counts) == pytest.approx(
        sum(a * b for a, b in zip(losses, counts, strict=True)) / sum(counts)
    )
    assert not any(team.ledger("dp")), "nothing to reduce"


def test_a_step_without_any_token_changes_nothing():
    team = Team(linears(2), dp=2, data=labels((0,)), loss=classes)
    before = team.weights()
    losses, counts = losses_of(team.step(0))
    assert (sum(counts), mean_loss(losses, counts)) == (0, None)
    assert all(torch.equal(weight, before[name]) for name, weight in team.weights().items())


def test_the_loss_of_no_tokens_is_zero_and_so_are_its_gradients():
    model = TransformerModel(GPT(layers=1, hidden=8, heads=2, seq=4, vocab=5))
    logits = torch.randn(2, 4, 5, requires_grad=True)
    nothing = torch.full((2, 4), -100)
    loss = model.loss((logits,), (nothing,))
    loss.backward()
    assert (loss.item(), model.count((nothing,))) == (0.0, 0)
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    nothing[1, 2] = 3
    assert model.count((nothing,)) == 1
    assert model.count((torch.zeros(3, 2),)) == 6


# --- what is moved, and when -----------------------------------------------------------------------------------------


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("dp", "pp", "schedule"), [(2, 1, "1f1b"), (4, 1, "gpipe"), (3, 2, "1f1b"), (2, 2, "interleaved")]
)
def test_a_bucket_is_one_all_reduce_and_a_rank_sends_2_of_n_minus_1_nths(dp, pp, schedule):
    team = Team(linears(4), pp, 4, schedule, dp=dp, zero=0, bucket_mb=1e-4)
    team.step(0)
    before, buckets = team.ledger("dp"), [len(worker.member.parts.reducer.spans) for worker in team.workers]
    team.step(1)
    for worker, count, old, new in zip(team.workers, buckets, before, team.ledger("dp"), strict=True):
        calls, sent = (new["all_reduce"][i] - old["all_reduce"][i] for i in range(2))
        elements = sum(p.numel() for p in worker.parameters().values()) + len(worker.holds())  # a place for each
        counts = worker.member.context.pp == pp - 1  # the last stage adds up three numbers about the step
        assert count > 1
        assert calls == count + counts
        ring = 2 * (dp - 1) * 4 * elements / dp + counts * 2 * (dp - 1) * 24 / dp
        assert ring - calls <= sent <= ring, "each message is rounded down to whole bytes"


def test_one_replica_moves_and_copies_nothing():
    team = Team(linears(4))
    team.step(0)
    assert [worker.member.parts.reducer for worker in team.workers] == [None, None]
    assert team.ledger("dp") == [{}, {}]
    assert not any(action.op is Op.REDUCE_GRAD for worker in team.workers for action in worker.member.program.row)
    assert {result.overlap for result in team.step(1)} == {None}


@pytest.mark.sampled
@pytest.mark.parametrize("dp", [1, 2, 4])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_servers_traffic_is_linear_in_the_replicas(dp, servers):
    team = Team(linears(4), dp=dp, data_parallel="parameter_server", servers=servers, bucket_mb=1e-4)
    team.step(0)
    for worker, table in zip(team.workers, team.ledger("ps"), strict=False):
        weights, count = sum(p.numel() for p in worker.parameters().values()), len(worker.holds())
        assert table["reduce"][1] == 4 * (weights + count) + 24 * (worker.member.context.pp == 1), "its gradients, once"
        assert table["broadcast"][1] == 0
    for server, table in zip(team.servers, team.ledger("ps")[len(team.workers) :], strict=True):
        weights = sum(p.numel() for p in server.parameters().values())
        assert (table["reduce"][1], table["broadcast"][1]) == (0, dp * 4 * weights), "its weights, to each"
    assert team.ledger("dp") == [{}] * len(team.all)


def test_only_servers_hold_optimizers_and_each_parameter_is_on_one():
    team = Team(linears(4), dp=2, data_parallel="parameter_server", servers=2, optim=AdamW())
    team.step(0)
    shares = [server.holds() for server in team.servers]
    assert sum(map(len, shares)) == len(team.weights())
    assert {name for share in shares for name in share} == team.weights().keys()
    assert all(share for share in shares)
    assert not any(hasattr(worker.member.parts.update, "_optimizer") for worker in team.workers)


@pytest.mark.sampled
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in SHARED])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_buckets_start_inside_the_last_backward_and_in_no_earlier_one(schedule, mode):
    team = Team(linears(4), 2, 4, schedule, dp=2, **MODES[mode], bucket_mb=1e-6)
    team.step(0)
    for worker in team.workers:
        spans = worker.events()
        last = {a.stage: s for s in spans if (a := s.action).op in (Op.B, Op.W)}
        (step,) = (span for span in spans if span.action.op is Op.STEP)
        buckets = [span for span in spans if span.bucket is not None]
        assert [span.bucket for span in buckets] == list(range(len(buckets)))
        assert len(buckets) == len(worker.holds())
        for stage, backward in last.items():
            own = [span for span in buckets if span.action == Action(stage, Op.REDUCE_GRAD, None)]
            assert all(backward.start < span.start < backward.end for span in own)
            assert all(step.start < span.end <= step.end for span in own)
        assert all(span.bytes > 0 for span in buckets)
        assert sum(span.action.op in COMPUTE for span in spans) == sum(
            a.op in COMPUTE for a in worker.member.program.row
        )


def test_hooks_are_there_for_the_first_and_the_last_backward_only():
    team = Team(linears(2), 1, 3, dp=2)
    seen = []
    (stage,) = team.workers[0].stages.values()
    backward = stage.backward

    def spy(*args):
        hooks = [parameter._post_accumulate_grad_hooks for parameter in stage.parameters().values()]
        seen.append(sum(map(bool, hooks)))
        return backward(*args)

    stage.backward = spy
    team.step(0)
    assert seen == [4, 0, 4]
    assert not any(map(bool, (p._post_accumulate_grad_hooks for p in stage.parameters().values())))


def test_time_spent_on_starting_a_bucket_is_not_hidden():
    """Shared memory copies and adds there."""
    weight = nn.Parameter(torch.ones(4))
    (bucket,) = pack(0, {"w": weight}, {"w": 0}, limit=100)

    def slow(tensor):
        time.sleep(0.3)
        return local_groups("dp", 1)[0].barrier()

    channel = Channel(slow, slow, lambda count, dtype: torch.empty(count, dtype=dtype), gets_sum=True)
    reducer = Reducer(
        [bucket], [channel], ComputeDevice(), GradientSums([bucket], [0], DeviceStorage(ComputeDevice.device), {})
    )
    with reducer.watch(0, last=True):
        weight.sum().backward()
    reducer.flush(0)
    reducer.finish()
    assert reducer.overlap < 0.1


def reductions(worker):
    return sorted(span.bucket for span in worker.events() if span.bucket is not None)


def test_overlap_is_a_share_and_what_a_step_reduced_is_dropped_with_the_next():
    team = Team(linears(4), dp=2)
    assert all(0.0 <= result.overlap <= 1.0 for result in team.step(0))
    first = [reductions(worker) for worker in team.workers]
    assert first[0]
    assert all(0.0 <= result.overlap <= 1.0 for result in team.step(1))
    assert [reductions(worker) for worker in team.workers] == first
    assert all(result.overlap is None for result in team.step(0, "evaluate"))


# --- faults ----------------------------------------------------------------------------------------------------------


def poisoned(step, microbatch, dp):
    x, y = batch(step, microbatch, dp)
    return x, y * float("nan") if (step, microbatch, dp) == (1, 2, 1) else y


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
def test_a_bad_loss_on_one_replica_changes_no_weight_on_any(mode):
    team, healthy = (Team(linears(), dp=3, data=data, **MODES[mode]) for data in (poisoned, batch))
    for one in (team, healthy):
        one.step(0)
    before = team.weights()
    results = team.each(lambda actor: actor.train(1))
    said = results[len(team.workers) :] if team.servers else results
    assert all(isinstance(result, NonFiniteError) for result in said)
    for dp in range(3):
        assert all(torch.equal(weight, before[name]) for name, weight in team.weights(dp).items())
    assert losses_of(team.step(2)) == losses_of(healthy.step(2))
    wanted = healthy.weights(2)
    assert all(torch.equal(weight, wanted[name]) for name, weight in team.weights(1).items())


@pytest.mark.sampled
@pytest.mark.parametrize("mode", MODES)
def test_a_vote_without_a_gradient_reaches_every_replica(mode):
    """The loss is not finite, its gradient is."""

    def loss(output, target):
        return (output * 0).sum() + torch.where(target[0, 0] == 7.0, float("nan"), 0.0)

    def data(step, microbatch, dp):
        x, y = batch(step, microbatch, dp)
        return x, torch.full_like(y, 7.0 if dp == 1 else 0.0)

    team = Team(linears(), dp=2, data=data, loss=loss, **MODES[mode])
    results = team.each(lambda actor: actor.train(0))
    said = results[len(team.workers) :] if team.servers else results
    assert {str(result) for result in said} == {
        "step 1: the loss is not finite; no weight was changed: look at the batch"
    }


@pytest.mark.parametrize("mode", MODES)
def test_replicas_that_begin_with_other_weights_are_named(mode):
    def layers():
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        first.weight = nn.Parameter(torch.full((4, 4), next(made)))  # is not drawn, and another one in every process
        return [first, second]

    made = itertools.count(1.0)
    with pytest.raises(
        UnequalReplicasError, match=r"the weights of .*pp=0 dp=1.* are not those of pp=0 dp=0: the model"
    ):
        Team(layers, pp=1, dp=3, **MODES[mode])


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("kind", ["frozen", "buffer"])
def test_replicas_that_begin_with_other_frozen_weights_or_buffers_are_named(kind, zero):
    def layers():
        layer = nn.Linear(4, 4)
        layer.register_buffer("shift", torch.full((4,), next(made)) if kind == "buffer" else torch.zeros(4))
        if kind == "frozen":
            layer.bias = nn.Parameter(torch.full((4,), next(made)), requires_grad=False)
        return [layer]

    made = itertools.count(1.0)
    with pytest.raises(UnequalReplicasError, match="pp=0 dp=1"):
        Team(layers, pp=1, dp=2, zero=zero)


def test_a_gradient_that_comes_twice_is_refused():
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x):
            y = checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)
            return checkpoint(self.inner, y, use_reentrant=True)

    team = Team(lambda: [Twice()], 1, 1, dp=2, bucket_mb=1e-6)
    results = team.each(lambda worker: worker.train(0))
    assert any("got a gradient twice in one backward" in str(result) for result in results)


def test_a_lost_replica_lets_the_others_go():
    team = Team(linears(), dp=2, timeout=2.0)
    fails = team.workers[3]

    def broken(*args):
        raise KeyError("out of luck")

    fails.member.parts.flow.source = replace(fails.member.parts.flow.source, targets=broken)
    results = team.each(lambda worker: worker.train(0))
    assert str(results[3]).startswith("actor pp=1 dp=1: action 1F0 failed: KeyError")
    assert results[2].secondary, "its sibling waited for its gradients"


def test_one_place_for_the_data_of_all_replicas():
    asked = []

    def data(step, microbatch, dp):
        asked.append((step, microbatch, dp))
        return batch(step, microbatch, dp)

    team = Team(linears(2), 1, 2, dp=2, data=data, loss=mse, data_parallel="all_reduce")
    team.step(5)
    assert set(asked) == {(0, 0, 0)} | {(5, microbatch, dp) for microbatch in range(2) for dp in range(2)}
    assert isinstance(team.run.data, Batches)
