"""What is tried with several actors of one GPU: checks of a group, and runs.

tests/gpu/test_shared_gpu.py tries all of it on a GPU, and tests/actors/worker/test_shared_gpu.py the same without one,
over NCCL played by threads (tests/gpu/fakes.py).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

import raypar as rp
from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.group import Group
from tests.gpu.ops import check_every_op, check_nothing, check_order

SIZES = (2, 4)
STEPS = 3
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
_LATE = 0.5  # seconds after which a receive that nothing answers is given up
_SOON = 20.0  # seconds within which a fault is noticed: NCCL's abort takes a while


# --- checks of a group: all members call them ------------------------------------------------------------------------


def check_group(group: Group) -> list[str]:
    """Take every operation of a group to its end and compare what it gives, in several dtypes; return their names.

    Raises AssertionError if a result is wrong.
    """
    for dtype in _DTYPES:
        check_every_op(group, dtype, group.device)
    check_nothing(group, group.device)
    check_order(group, group.device)
    group.synchronize()
    return sorted({op for _, op in group.ledger.entries()})


def check_posted_receives(group: Group) -> None:
    """Receives that are posted before anything is sent hold up neither sends nor a sum, and keep their order."""
    check_order(group, group.device)  # loads the kernels, for which CUDA waits for what runs
    size, rank, count = group.size, group.rank, 4
    before, after = (rank - 1) % size, (rank + 1) % size
    targets = [torch.zeros(1000, device=group.device) for _ in range(count)]
    received = [group.recv(target, before, tag=number) for number, target in enumerate(targets)]
    group.all_reduce(total := torch.ones(1000, device=group.device)).wait()
    sources = [torch.full_like(target, 10.0 * rank + number) for number, target in enumerate(targets)]
    sent = [group.send(source, after, tag=number) for number, source in enumerate(sources)]
    for handle in (*received, *sent):
        handle.wait()
    group.synchronize()
    assert total.eq(size).all()
    assert [target.unique().tolist() for target in targets] == [[10.0 * before + number] for number in range(count)]


def check_bf16_sums(group: Group) -> None:
    """Sums in bf16 are as near to those in fp32 as bf16 is, and every member has the same bits."""
    parts = torch.stack([torch.randn(1000, generator=torch.Generator().manual_seed(r)) for r in range(group.size)])
    halves = parts.bfloat16()
    total = halves[group.rank].clone().to(group.device)
    group.all_reduce(total).wait()
    bound = group.size * 2.0**-8 * halves.float().abs().sum(0)
    assert ((total.cpu().float() - halves.float().sum(0)).abs() <= bound).all()
    everyone = torch.empty(group.size * len(total), dtype=total.dtype, device=group.device)
    group.all_gather(everyone, total).wait()
    assert (everyone.view(group.size, -1) == total).all()


def check_watcher(group: Group) -> None:
    """A receive that nothing answers ends at its deadline, and the group of its member with it."""
    group.on_fault = group.abort
    if group.rank == 0:
        start = time.monotonic()
        group.recv(torch.zeros(4, device=group.device), 1).wait(_LATE)
        with pytest.raises(GroupError, match=f"nothing came within {_LATE} s"):
            group.synchronize(_SOON)
        assert _LATE <= time.monotonic() - start < _SOON


def check_abort(group: Group) -> None:
    """An abort while an operation waits for a member that never comes ends the wait."""
    if group.rank == 0:
        timer, start = threading.Timer(0.2, group.abort), time.monotonic()
        timer.start()
        with pytest.raises(GroupError, match="abort"):
            group.barrier().wait()
        assert time.monotonic() - start < _SOON
        timer.join()


CHECKS: Mapping[str, Callable[[Group], object]] = {
    "every operation": check_group,
    "receives posted first": check_posted_receives,
    "sums in bf16": check_bf16_sums,
    "watcher": check_watcher,
    "abort": check_abort,
}

# --- runs ------------------------------------------------------------------------------------------------------------

_TINY = {"layers": 4, "hidden": 32, "heads": 4, "seq": 16}
_EXPERTS = {"model": rp.GPT(**_TINY, moe=rp.MoE(experts=4))}
_BF16 = {"precision": rp.Precision(compute="bf16")}
_FP16 = {"precision": rp.Precision(compute="fp16"), "loss_scale": rp.LossScale(init=1024.0)}
RUNS: Mapping[str, Mapping[str, Any]] = {
    "dp": {"mesh": rp.Mesh(dp=2), "zero": 0},
    "dp of 4": {"mesh": rp.Mesh(dp=4), "zero": 0},
    "zero 1": {"mesh": rp.Mesh(dp=2), "zero": 1},
    "zero 1 of 4": {"mesh": rp.Mesh(dp=4), "zero": 1},
    "zero 2": {"mesh": rp.Mesh(dp=2), "zero": 2},
    "zero 2 of 4": {"mesh": rp.Mesh(dp=2, pp=2), "zero": 2},
    "zero 3": {"mesh": rp.Mesh(dp=2), "zero": 3},
    "zero 3 of 4": {"mesh": rp.Mesh(dp=4), "zero": 3},
    "pp": {"mesh": rp.Mesh(pp=2)},
    "pp of 4": {"mesh": rp.Mesh(pp=4)},
    "pp and dp": {"mesh": rp.Mesh(pp=2, dp=2), "zero": 0},
    "tp": {"mesh": rp.Mesh(tp=2)},
    "tp of 4": {"mesh": rp.Mesh(tp=4), "sequence_parallel": True},
    "tp and pp": {"mesh": rp.Mesh(tp=2, pp=2)},
    "cp": {"mesh": rp.Mesh(cp=2), "context": "ring"},
    "cp by heads": {"mesh": rp.Mesh(cp=2), "context": "ulysses"},
    "cp of 4": {"mesh": rp.Mesh(cp=4), "context": "ring"},
    "ep": {"mesh": rp.Mesh(dp=2, ep=2), **_EXPERTS},
    "ep of 4": {"mesh": rp.Mesh(dp=4, ep=4), **_EXPERTS},
    "split backward": {"mesh": rp.Mesh(pp=2), "schedule": "zb-h1"},
    "split backward of 4": {"mesh": rp.Mesh(pp=4), "schedule": "zb-h1"},
    "bf16": {"mesh": rp.Mesh(pp=2), **_BF16},
    "bf16 of 4": {"mesh": rp.Mesh(dp=2, tp=2), **_BF16},
    "bf16, zero 3": {"mesh": rp.Mesh(dp=2), "zero": 3, **_BF16},
    "fp16": {"mesh": rp.Mesh(pp=2), **_FP16},
    "fp16 of 4": {"mesh": rp.Mesh(dp=2, pp=2), "zero": 2, **_FP16},
}
every_failing = pytest.mark.parametrize("name", ["pp", "dp of 4", "zero 3 of 4"])
every_run = pytest.mark.parametrize("name", RUNS)
every_check = pytest.mark.parametrize(("check", "size"), [(check, size) for size in SIZES for check in CHECKS])


def run_of(name: str, **changes: Any) -> rp.Run:
    """Return the run of this name, of a few steps of a tiny model, with other values of some fields."""
    return rp.recipe("gpt-tiny", **{"model": rp.GPT(**_TINY), "steps": STEPS, **RUNS[name], **changes})
