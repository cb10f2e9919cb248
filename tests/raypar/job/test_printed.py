"""What the user's layers print on actors reaches the driver, behind the actor's name."""

from __future__ import annotations

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
