"""Gathers of a pipeline's stages as actors make them: as often as the schedule's placement says, and as it is drawn."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from raypar.schedules.action import Op
from raypar.schedules.drawing.svg import svg
from raypar.schedules.drawing.text import text
from raypar.schedules.rules import most_whole
from raypar.schedules.simulation.memory import traffic
from tests.support.team import Team

MICROBATCHES, CHUNKS, ELEMENT = 8, 3, 4
WIDTHS = (3, 5, 11, 23, 47, 95)  # of the layers, so that no two stages have gathers of as many bytes
ONCE = {"zero_gather": "step"}
PLACEMENTS = {
    "once a step": ONCE,
    "once a microbatch": {},
    "kept for the backward": {"reshard_after_forward": False},
    "kept in the last stage": {"reshard_after_forward": "except_last"},
    **{f"{count} resident": ONCE | {"zero_resident": count} for count in range(1, CHUNKS + 1)},
}
SCHEDULES = {"1f1b": {"schedule": "1f1b"}, "interleaved": {"schedule": "interleaved", "chunks": CHUNKS}}


def layers():
    return [nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 4)) for width in WIDTHS]


@cache
def trained(schedule, placement):
    """The program of a team, the bytes that the replicas of each pipeline rank gathered, and the weights."""
    fields = {"zero": 3, "zero_reduce": "step", **SCHEDULES[schedule], **PLACEMENTS[placement]}
    team = Team(layers, 2, MICROBATCHES, dp=2, **fields)
    before = gathered(team)
    team.step(0)
    now = [after - earlier for after, earlier in zip(gathered(team), before, strict=True)]
    moved = [sum(one for rank, one in enumerate(now) if team.world.pp(rank) == pp) for pp in range(2)]
    return team.programs["train"], moved, team.weights()


def gathered(team):
    """Bytes of weights that each actor has sent."""
    return [table.get("all_gather", (0, 0))[1] for table in team.ledger("dp")]


def stage_bytes(program):
    """Bytes of the weights of each stage."""
    each = [ELEMENT * (2 * 4 * width + width + 4) for width in WIDTHS]
    size = len(WIDTHS) // program.num_stages
    return [sum(each[start : start + size]) for start in range(0, len(WIDTHS), size)]


def cases():
    for schedule in SCHEDULES:
        stages = 1 if schedule == "1f1b" else CHUNKS
        yield from ((schedule, name) for name in PLACEMENTS if "resident" not in name or int(name[0]) <= stages)


@pytest.mark.sampled
@pytest.mark.parametrize(("schedule", "placement"), list(cases()))
def test_a_stage_is_gathered_as_often_as_its_placement_says(schedule, placement):
    program, moved, weights = trained(schedule, placement)
    sizes = stage_bytes(program)
    times = [one.gathers for one in traffic(program, sizes, sizes, shards=2)]
    assert moved == [sum(times[stage] * sizes[stage] for stage in program.stages_of(rank)) for rank in range(2)]
    per_rank = len(program.stages_of(0))
    if placement in ("once a step", f"{per_rank} resident"):
        assert set(times) == {1}
    elif placement == "once a microbatch":
        assert set(times) == {2 * MICROBATCHES}
    elif placement == "kept for the backward":
        assert all(1 <= count <= MICROBATCHES for count in times)
    elif placement == "kept in the last stage":
        assert times[-1] < 2 * MICROBATCHES and set(times[:-1]) == {2 * MICROBATCHES}
    else:
        (bound,) = {PLACEMENTS[placement]["zero_resident"]}
        assert max(most_whole(program)) == bound
        more, *_ = trained(schedule, f"{bound + 1} resident")
        fewer = traffic(more, sizes, sizes, shards=2)
        assert sum(times) > sum(one.gathers for one in fewer), "more room, fewer gathers"
    _, _, wanted = trained(schedule, "once a step")
    assert all(torch.equal(weights[name], weight) for name, weight in wanted.items())


@pytest.mark.sampled
@pytest.mark.parametrize(("schedule", "placement"), list(cases()))
def test_its_picture_shows_every_gather(schedule, placement):
    program, *_ = trained(schedule, placement)
    sizes = stage_bytes(program)
    times = sum(one.gathers for one in traffic(program, sizes, sizes, shards=2))
    assert svg(program).count('class="raypar-whole"') == times
    grid = text(program, width=None).split("\n( before")[0]
    assert grid.count("(") == grid.count(")") == times
    assert sum(action.op is Op.UNSHARD for row in program.rows for action in row) == times
