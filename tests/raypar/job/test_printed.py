"""What the user's layers print on actors, and raypar's warnings there, reach the driver with the actor's name."""

from __future__ import annotations

import logging

import torch
from torch import nn

import raypar as rp


class Chatty(nn.Module):
    """Prints in its forwards, and fails in the second step."""

    def __init__(self):
        super().__init__()
        self.lin, self.calls = nn.Linear(4, 4), 0

    def forward(self, x):
        if self.training and x.device.type != "meta":
            self.calls += 1
            print("forward", self.calls)
            if self.calls == 3:
                raise ValueError("three")
        return self.lin(x)


def batch(step, microbatch, dp):
    x = torch.ones(2, 4)
    return x, x


def test_the_driver_prints_what_a_layer_prints(job_on, capsys):
    model = rp.Layers(lambda: [nn.Linear(4, 4), Chatty()], nn.functional.mse_loss)
    run = rp.Run(model=model, mesh=rp.Mesh(pp=2), data=rp.Batches(batch), microbatches=2, steps=3, timeout=20.0)
    job = job_on(2)
    job.reset(run)
    assert "forward" not in capsys.readouterr().out, "a launch calls layers without a word"
    job.step()
    printed = [line for line in capsys.readouterr().out.splitlines() if "forward" in line]
    assert printed == [
        "pp=1: forward 1",
        "pp=1: forward 2",
    ]
    try:
        job.step()
    except rp.JobError as error:
        assert str(error).count("three") == 2, "in the message, and in the line of the trace that raises it"
    assert "pp=1: forward 3" in capsys.readouterr().out.splitlines()


class Warned(nn.Linear):
    """Logs a warning in its first forward in training, as raypar's modules do."""

    is_new = True

    def forward(self, x):
        if self.training and x.device.type != "meta" and self.is_new:
            self.is_new = False
            logging.getLogger("raypar.actors.some").warning("layers are computed as they are (%s)", "no compiler")
            logging.getLogger("raypar.actors.some").info("nobody needs this")
            logging.getLogger("other").warning("nor that of others")
        return super().forward(x)


def test_the_driver_logs_a_warning_of_several_actors_once(job_on, caplog):
    model = rp.Layers(lambda: [Warned(4, 4)], nn.functional.mse_loss)
    job = job_on(2)
    job.reset(rp.Run(model=model, mesh=rp.Mesh(dp=2), data=rp.Batches(batch), steps=3, timeout=20.0))
    caplog.clear()
    job.step()
    job.step()
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert lines == ["pp=0 dp=0 and 1 more: layers are computed as they are (no compiler)"]
