"""Schedules of ``torch.distributed.pipelining``, made without processes and models."""

from __future__ import annotations

from unittest import mock

from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining import stage as stages


def stage(index, ranks, num_stages):
    fake = mock.create_autospec(stages.PipelineStage, instance=True)
    fake.group_size, fake.group_rank, fake.num_stages = ranks, index % ranks, num_stages
    fake.stage_index, fake.is_last, fake.submod = index, index == num_stages - 1, None
    return fake


def make(kind, ranks, microbatches, chunks=2):
    """Make a schedule of a class of torch's; stages in a V for those that want it."""
    held = range(0, ranks * chunks, ranks)
    if kind in (theirs.ScheduleZBVZeroBubble, theirs.ScheduleDualPipeV):
        held = (0, ranks * chunks - 1)
    return kind([stage(index, ranks, ranks * chunks) for index in held], microbatches, loss_fn=lambda *_: None)
