"""A GPU that is none: a device of torch's whose tensors are CPU tensors behind a wall.

    python -m tests.gpu.pretend 1    # all layouts; 4: of every four one

Whatever mixes them with tensors of the host raises, as CUDA does, and whatever brings a number to the host is counted:
a GPU's host would wait for it. The numbers are the CPU's own, so that runs can be compared bit by bit. A device is
registered for the life of a process, so this is a program; tests/actors/test_gpu_runs.py looks at what it says.
"""

from __future__ import annotations

import json
import sys
import time
import types
from collections import Counter
from dataclasses import replace

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing

import raypar as rp
from raypar.actors.collective.gpu.staged import StagedGroup
from raypar.actors.machine.device import Cuda
from raypar.actors.optim import block_norm
from tests.support.dispatched_ops import ops_of_a_step
from tests.support.team import Team, linears

CPU = torch.device("cpu")
COPIES = ("aten::_to_copy", "aten::copy_")


class Pretended(torch.Tensor):
    """A tensor on the device; ``raw`` holds its numbers."""

    @staticmethod
    def __new__(cls, raw):
        place = {"strides": raw.stride(), "storage_offset": raw.storage_offset(), "dtype": raw.dtype}
        return torch.Tensor._make_wrapper_subclass(cls, raw.shape, device=DEVICE, **place)

    def __init__(self, raw):
        self.raw = raw

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return call(func, args, kwargs or {})

    @property
    def data(self):
        return super().data

    @data.setter
    def data(self, value):
        torch.Tensor.data.__set__(self, value)  # shape, strides and dtype
        self.raw = value.raw

    def data_ptr(self):
        return self.raw.data_ptr()

    def tolist(self):
        READS.append("tolist")
        return self.raw.tolist()


def call(func, args, kwargs):
    """An op of which something is, or will be, on the device."""
    given = [value for value in leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
    ours = {id(value.raw): value for value in given if isinstance(value, Pretended)}
    if func._schema.name not in COPIES and ours and any(not isinstance(v, Pretended) and v.dim() for v in given):
        raise RuntimeError(f"{func}: tensors on two devices")
    to_host = kwargs.get("device", DEVICE) == CPU or (
        func._schema.name == COPIES[1] and not isinstance(args[0], Pretended)
    )
    if ours and (to_host or func._schema.name == "aten::_local_scalar_dense"):
        READS.append(str(func))
    kwargs = {key: CPU if key == "device" else value for key, value in kwargs.items() if key != "pin_memory"}
    out = func(*mapped(bare, args), **mapped(bare, kwargs))
    if to_host:
        return out

    def wrapped(value):
        return ours[id(value)] if id(value) in ours else Pretended(value)

    out = mapped(lambda value: wrapped(value) if isinstance(value, torch.Tensor) else value, out)
    return return_and_correct_aliasing(func, args, kwargs, out) if ours else out


def bare(value):
    return value.raw if isinstance(value, Pretended) else value


def leaves(value):
    """What is in lists, tuples and dictionaries; torch's own tree functions take four times as long."""
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in leaves(one)]
    return leaves([*value.values()]) if isinstance(value, dict) else [value]


def mapped(function, value):
    """The same lists, tuples and dictionaries of what the function makes of their leaves."""
    if isinstance(value, list | tuple):
        return type(value)([mapped(function, one) for one in value])
    return {key: mapped(function, one) for key, one in value.items()} if isinstance(value, dict) else function(value)


backend_registration._setup_privateuseone_for_python_backend("pretended")
DEVICE, READS = torch.device("pretended", 0), []
LIBRARY = torch.library.Library("_", "IMPL")
LIBRARY.fallback(lambda op, *args, **kwargs: call(op, args, kwargs), "PrivateUse1")


class Event:
    """A moment of a stream; the host waits for it unless it has waited for a later one."""

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self, stream):
        self.at, self.waits = time.perf_counter(), len(READS)

    def synchronize(self):
        if self.waits == len(READS):
            READS.append("synchronize")

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


torch.cuda.Event = Event
torch.cuda.set_device = lambda device: None
torch.cuda.current_stream = lambda device: None
torch.cuda.reset_peak_memory_stats = lambda device: None
torch.cuda.max_memory_allocated = lambda device: 12345


class Place(Cuda):
    """As on a GPU, and it notes what was read in which action."""

    def __init__(self):
        self.device, self.log = DEVICE, []
        self._generator = types.SimpleNamespace(manual_seed=torch.default_generator.manual_seed)

    def _moved(self, value):
        return value.to(self.device, non_blocking=True)

    def _pinned(self, value):
        return bare(value).clone(), self._event()

    def mark(self):
        self.log.append(len(READS))
        return super().mark()


class Messages(StagedGroup):
    """Messages go through the host, which is not counted: over NCCL it reads none of them."""

    def _read(self, tensor):
        return bare(tensor).clone()


class PretendedTeam(Team):
    """A Team on the device; its groups go through the host."""

    def _told(self, plans, actor):
        plan, groups = super()._told(plans, actor)
        staged = {key: Messages(group, DEVICE) for key, group in groups.items()}
        return replace(plan, device="cuda"), staged, Place()


def gpt(kind=rp.GPT, **changes):
    """A small GPT: its attention has another kernel for the device, which adds up in another order."""
    fields = {"layers": 4, "hidden": 16, "heads": 2, "seq": 8, "vocab": 32}

    def fn(step, microbatch, dp):
        generator = torch.Generator().manual_seed(1000 * step + 10 * microbatch + dp)
        ids = torch.randint(0, 32, (2, 9), generator=generator)
        return ids[:, :-1], ids[:, 1:]

    return {"model": kind(**(fields | changes)), "data": fn}


LAYOUTS = {
    "pp=1": {"pp": 1},
    "pp=2": {"pp": 2, "optim": rp.AdamW(lr=0.01)},
    "pp=2 interleaved": {"pp": 2, "schedule": "interleaved"},
    "pp=2 recomputed": {"pp": 2, "schedule": "gpipe", "recompute": "full"},
    "dp=2": {"pp": 1, "dp": 2, "bucket_mb": 1e-4, "zero": 0},
    "pp=2 dp=2": {"pp": 2, "dp": 2, "clip": 0.5, "optim": rp.AdamW(lr=0.01)},
    "pp=2 dp=2 whole": {"pp": 2, "dp": 2, "clip": 0.5, "optim": rp.AdamW(lr=0.01), "zero": 0},
    "servers": {"pp": 2, "dp": 2, "data_parallel": "parameter_server"},
    "gpt": {"pp": 2, **gpt()},
    "gpt tied": {"pp": 2, "dp": 2, **gpt(tied=True)},
    "alibi": {"pp": 2, **gpt(positions="alibi", attention="materialised")},
    "llama": {
        "pp": 2,
        "recompute": ("selective", "full", "selective", "none"),
        **gpt(rp.Llama, kv_heads=1, attention="materialised"),
    },
    "gpt tied, servers": {"pp": 2, "dp": 2, "data_parallel": "parameter_server", **gpt(tied=True)},
}


def outcome(kind, layout):
    """What a team does in two steps and an evaluation, and the team."""
    team = kind(linears(), **layout)
    return [*team.step(0), *team.step(1), *team.step(0, "evaluate")], team


def compare(layout):
    """The largest relative difference between a layout on the device and the same on CPUs; what is in a wrong place."""
    (theirs, there), (ours, here) = outcome(Team, layout), outcome(PretendedTeam, layout)
    worst, wrong = 0.0, []
    for one, other in zip(ours, theirs, strict=True):
        assert (one.counts, one.in_flight) == (other.counts, other.in_flight)
        numbers = [(*result.losses, result.grad_norm or 0.0) for result in (one, other)]
        worst = max(worst, error(*map(torch.tensor, numbers)))
    for mine, other in ((here.weights(), there.weights()), (here.gradients(), there.gradients())):
        assert set(mine) == set(other)
        worst = max(worst, *(error(value, other[name]) for name, value in mine.items()))
        wrong += [f"{name} is not on the host" for name, value in mine.items() if isinstance(value, Pretended)]
    for actor in here.all:
        wrong += [
            f"{name} is not on the host" for name in actor.holds() if isinstance(actor.parameter(name), Pretended)
        ]
        wrong += [
            f"{name} is not on the device" for name, p in actor.member.state.parameters.items() if p.device != DEVICE
        ]
    return worst, wrong


def error(one, other):
    """Norm of the difference over the norm."""
    return 0.0 if torch.equal(one, other) else ((one - other).norm() / other.norm()).item()


def recomputed(ways):
    """Whether a forward that is run again in these ways draws the same dropout."""
    layout = {"pp": 1, **gpt(dropout=0.5, attention="materialised")}
    kept, *again = (outcome(PretendedTeam, layout | {"recompute": how})[1].weights() for how in ("none", *ways))
    return all(torch.equal(value, kept[name]) for weights in again for name, value in weights.items())


def reads(layout):
    """What the host read, by the action in which it did, of a second step of one rank."""
    _, team = outcome(PretendedTeam, layout)
    (worker,) = team.workers
    worker.member.context.device.log.clear()
    READS.clear()
    team.step(2)
    marks = worker.member.context.device.log
    return {str(span.action): marks[2 * i + 1] - marks[2 * i] for i, span in enumerate(worker.events())}


def reads_of_replicas(layout):
    """What the hosts of two replicas read in a second step of both."""
    _, team = outcome(PretendedTeam, layout)
    READS.clear()
    team.step(2)
    return Counter(READS)


def reads_of_forwards(layout):
    """What the hosts of two actors read in a second evaluation; a backward of both would be one thread's."""
    team = PretendedTeam(linears(), **layout)
    team.step(0, "evaluate")
    READS.clear()
    team.step(1, "evaluate")
    return Counter(READS)


def ops(hidden, layers, compute="fp32"):
    """The ops at the end of a second step of one rank; matrices are large from 256 hidden units on."""
    layout = {"pp": 1, "clip": 1e-6, "optim": rp.AdamW(), "precision": rp.Precision(compute)}
    layout |= gpt(layers=layers, hidden=hidden, attention="materialised")
    _, team = outcome(PretendedTeam, layout)
    found = ops_of_a_step(team)
    return [found[name].kernels.total() for name in ("begin", "STEP", "end")]


def norms():
    """The largest relative difference of a block's norm between the device, in several portions, and a CPU."""
    block_norm.NORM_SCRATCH = 1 << 16
    values = {f"w{count}": torch.randn(count) for count in (5, 3 * 65536 + 777, 40_000, 65536)}
    theirs = block_norm.GradientBlocks(values).norms(values)
    moved = {name: value.to(DEVICE) for name, value in values.items()}
    blocks = block_norm.GradientBlocks(moved)
    found = [blocks.norms(moved) for _ in range(2)][1]
    assert all(found.of(name).shape == theirs.of(name).shape for name in values)
    return max(error(found.of(name), theirs.of(name)) for name in values)


def times():
    """Spans and memory as they are reported."""
    _, team = outcome(PretendedTeam, LAYOUTS["dp=2"])
    before = time.perf_counter()
    results = team.step(2)
    spans = [span for worker in team.workers for span in worker.events()]
    return {
        "within": all(before <= span.start <= span.end <= time.perf_counter() for span in spans),
        "buckets": sum(span.bucket is not None for span in spans),
        "busy": all(0 < result.busy <= result.end - result.start for result in results),
        "overlap": all(0 <= result.overlap <= 1 for result in results),
        "peak": results[0].peak_memory,
    }


if __name__ == "__main__":
    some = [*LAYOUTS][:: int(sys.argv[1])]  # of every so many layouts one
    found = {"differences": {name: compare(LAYOUTS[name]) for name in some}}
    is_all = int(sys.argv[1]) == 1
    found |= {"recomputed": recomputed(("full", "selective", ("full",) * 4) if is_all else ("full",)), "times": times()}
    precisions = ("fp32", "bf16", "fp16") if is_all else ("bf16",)
    one = {"pp": 1, **gpt(attention="materialised")}
    found |= {"reads": {kind: reads(one | {"precision": rp.Precision(kind)}) for kind in precisions}}
    experts = {
        "gates": gpt(rp.Llama, attention="materialised", moe=rp.MoE(experts=4, top_k=2, bias_rate=0.01, loss="switch")),
        "capacity": gpt(attention="materialised", moe=rp.MoE(experts=4, gate="switch", top_k=1, capacity=1.0)),
    }
    half = {"pp": 1, "precision": rp.Precision("bf16"), "optim": rp.AdamW(lr=0.01), "clip": 1.0}
    found |= {"reads with experts": {name: reads(half | model) for name, model in experts.items()}}
    divided = {name: half | model | {"dp": 2, "ep": 2, "m": 2} for name, model in experts.items()}
    found |= {"reads with divided experts": {name: reads_of_forwards(layout) for name, layout in divided.items()}}
    buckets = {zero: LAYOUTS["dp=2"] | {"zero": zero} for zero in range(2)}
    found |= {"reads of replicas": {zero: reads_of_replicas(layout) for zero, layout in buckets.items()}}
    widths, depths = ((16, 256), (2, 8, 32)) if is_all else ((256,), (2, 4))
    sizes = [(kind, width) for kind in precisions for width in widths]
    found |= {"ops": {f"{kind} {width}": [ops(width, layers, kind) for layers in depths] for kind, width in sizes}}
    found |= {"norms": norms()}
    json.dump(found, sys.stdout)
