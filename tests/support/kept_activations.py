"""Elements that a block keeps for its backward, counted."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from raypar.actors.machine.device import ComputeDevice
from raypar.actors.models.base import unsharded
from raypar.actors.models.build import build_model
from raypar.actors.models.skip_connections import NO_SKIPS
from raypar.actors.pipeline.stage import Stage
from raypar.actors.pipeline.stage_ends import StageEnds
from raypar.actors.specs.model import GPT
from raypar.actors.tensor_parallel.sequence import GatheredView
from raypar.actors.worker.build.parallelize import Parallelizer
from tests.support.counted import threads

S, B, H, A = 64, 3, 48, 4
SBH, ASSB = S * B * H, A * S * S * B


def block(kind=GPT, recompute=("none",), styles=None, **changes):
    """A stage of one block, its input, and a gradient for its output; with ``styles`` the part that these leave."""
    sizes = {"layers": 1, "hidden": H, "heads": A, "seq": S, "vocab": 7, "attention": "materialised"}
    return block_of(kind(**(sizes | changes)), B, recompute, styles)


def block_of(spec, samples, recompute=("none",), styles=None):
    """The same of a model of one block, for so many samples."""
    model = build_model(spec, 0)
    parallelize = Parallelizer(model, [styles]).parallelize if styles else unsharded
    modules, ends = model.materialize([1], 0, parallelize), StageEnds(NO_SKIPS, takes_data=False)
    stage = Stage(model, [1], modules, ComputeDevice(), ends, is_last=False, recompute=recompute, seed=0)
    stage.begin(train=True)
    shape = samples, spec.seq, spec.hidden
    x, gradient = (torch.randn(shape, generator=torch.Generator().manual_seed(n)) for n in range(2))
    return stage, x, gradient


COUNTED = threading.local()  # what this thread's forward keeps, by address


def count(tensor):
    here = tensor.part if isinstance(tensor, GatheredView) else tensor
    COUNTED.held[here.untyped_storage().data_ptr()] = here
    return tensor


def kept(stage, x, target=()):
    """Elements that a forward keeps, of the last stage with a target; weights left out, shared memory counted once."""
    own = {parameter.untyped_storage().data_ptr() for module in stage.modules for parameter in module.parameters()}
    COUNTED.held = {}
    with saved_tensors_hooks(count, lambda tensor: tensor):
        stage.forward(0, 0, (x,), target)
    return sum(tensor.untyped_storage().nbytes() / 4 for at, tensor in COUNTED.held.items() if at not in own)


@pytest.fixture(autouse=True)
def one_thread():
    """Two of them wait for each other on a machine that is busy."""
    with threads(1):
        yield


@pytest.fixture(autouse=True)
def hooks_inside_count_too(monkeypatch):
    """Of nested hooks only the inner ones are called."""

    def counted(pack, unpack):
        return saved_tensors_hooks(lambda tensor: count(pack(tensor)), unpack)

    monkeypatch.setattr("raypar.actors.tensor_parallel.sequence.saved_tensors_hooks", counted)
