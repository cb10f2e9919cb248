"""The tables of torch's own schedules train as they are, with the bits of one plain process."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch.distributed.pipelining import schedules as theirs

import raypar as rp
from tests.support.layouts import verdict_of
from tests.support.plain import trained_with_own_dice
from tests.support.torch_schedules import make

RUN = replace(rp.recipe("gpt-tiny"), steps=2, microbatches=4, mesh=rp.Mesh(pp=2))
RUN = replace(RUN, model=replace(RUN.model, layers=4, hidden=16))


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize(
    ("kind", "bitwise"),
    [
        (theirs.ScheduleZBVZeroBubble, True),
        (theirs.ScheduleDualPipeV, True),
        (theirs.ScheduleInterleavedZeroBubble, True),
        (theirs.ScheduleInterleaved1F1B, True),
        (theirs.ScheduleLoopedBFS, False),  # its backwards go from the last microbatch to the first
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_it_trains(kind, bitwise, form, tmp_path, monkeypatch):
    monkeypatch.setattr("raypar.parity.verify.train_plainly", trained_with_own_dice)
    table = tmp_path / "their.csv"
    make(kind, 2, 4)._dump_csv(table, format=form)
    verdict = verdict_of(replace(RUN, schedule=str(table)))
    assert verdict.bitwise == bitwise, str(verdict)
    assert verdict.worst <= 1e-6
    assert len(set(verdict.losses)) == 2
