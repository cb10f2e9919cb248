"""Jobs whose layers and loss exchange values with other replicas: tasks, steps by hand, streams, recordings, verify."""

import pytest
import torch
from torch import nn
from torch.func import functional_call

import raypar as rp
from raypar.actors.inspect.activations import Spot
from raypar.actors.optim.lr import lr_at
from raypar.parity.reference import train_plainly, watch_plainly
from tests.support.team import batch
from tests.support.thread_jobs import TeamJob

close = {"rtol": 1e-6, "atol": 1e-6}
OPTIM = rp.SGD(lr=0.1, momentum=0.0)


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x).tanh()
        return y - rp.replicas.all_reduce(y.mean(0), "mean")


def layers():
    return [Centered(), Centered()]


def spread(output, target):
    every = rp.replicas.all_gather(output)
    return (output - target).square().mean() - 0.1 * torch.cdist(output, every).square().mean()


def run_of(**changes):
    fields = {"model": rp.Layers(layers, spread), "data": rp.Batches(batch, validate=batch), "microbatches": 2}
    fields |= {"mesh": rp.Mesh(pp=2, dp=2), "optim": OPTIM, "clip": None, "steps": 2, "timeout": 20.0}
    return rp.Run(**fields | changes)


@pytest.mark.parametrize("executor", ["compiled", "tasks"])
@pytest.mark.parametrize("by_hand", [False, True])
def test_every_executor_has_the_numbers_of_one_process(executor, by_hand):
    run = run_of(executor=executor)
    plain, job = train_plainly(run), TeamJob(run)
    for step in range(run.steps):
        if by_hand and step:
            stepper = job.stepper()
            stepper.run(5)
            stepper.rewind()
        report = job.stepper().finish() if by_hand else job.step()
        assert report.loss == pytest.approx(plain.losses[step], rel=1e-6)
        assert report.grad_norm == pytest.approx(plain.grad_norms[step], rel=1e-6)
    torch.testing.assert_close(dict(job.weights().ends()), plain.weights, **close)
    job.close()


def test_a_recording_of_a_replica_is_not_replayed_alone(tmp_path):
    job = TeamJob(run_of(mesh=rp.Mesh(dp=2)))
    stepper = job.stepper()
    stepper.record(tmp_path / "stage.rec", 0)
    stepper.finish()
    with pytest.raises(ValueError, match="a recording has nothing of other replicas"):
        rp.replay(tmp_path / "stage.rec", job.run.model)
    assert rp.replicas.count == 1
    job.close()


def streamed_plainly(run, weights, length):
    """The weights after a stream of PipeDream-2BW, each microbatch of which is those of both replicas in one."""
    model, history = nn.Sequential(*layers()), []
    for step in range(length):
        history.append({name: one.clone() for name, one in weights.items()})
        seen = {name: history[max(0, step - 1)][name].clone().requires_grad_() for name in weights}
        for number in range(run.microbatches):
            x, target = map(torch.cat, zip(*(batch(step, number, dp) for dp in range(2)), strict=True))
            (spread(functional_call(model, seen, x), target) / run.microbatches).backward()
        weights = {name: one - lr_at(OPTIM, step, run.steps) * seen[name].grad for name, one in weights.items()}
    return weights


def test_an_asynchronous_schedule_exchanges_the_values_of_one_microbatch():
    run = run_of(schedule="pipedream-2bw", flush_every=4, steps=8, zero=0)
    job = TeamJob(run)
    begin = {name.removeprefix("layers."): one.clone() for name, one in job.weights().ends()}
    job.stream(0, 4)
    found = {name.removeprefix("layers."): one for name, one in job.weights().ends()}
    torch.testing.assert_close(found, streamed_plainly(run, begin, 4), **close)
    job.close()


class Dropped(nn.Module):
    """Draws before and after it exchanges values."""

    def forward(self, x):
        y = nn.functional.dropout(x, 0.2, self.training)
        return nn.functional.dropout(rp.replicas.all_reduce(y) + y, 0.3, self.training)


def test_a_watched_step_has_the_tensors_of_every_replica():
    watched = watch_plainly(run_of(), 0)
    model = nn.Sequential(*layers())
    model.load_state_dict({name.removeprefix("layers."): one for name, one in watched.weights.items()})
    for microbatch in range(2):
        x = torch.cat([batch(0, microbatch, dp)[0] for dp in range(2)])
        for number, layer in enumerate(model):
            x = layer(x)
            for dp, rows in enumerate(x.detach().chunk(2)):
                torch.testing.assert_close(
                    watched.tensors[Spot(f"layers.{number}", 2 * microbatch + dp)], rows, **close
                )
                assert Spot(f"layers.{number}", 2 * microbatch + dp, backward=True) in watched.tensors


@pytest.mark.timeout(120)
def test_verify_compares_replicas_that_exchange_values(cluster):
    run = run_of(model=rp.Layers(lambda: [*layers(), nn.SyncBatchNorm(4), Dropped()], spread), mesh=rp.Mesh(dp=2))
    verdict = rp.verify(run)
    assert verdict.ok, verdict
