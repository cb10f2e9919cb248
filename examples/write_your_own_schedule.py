"""Write a schedule of your own: draw it, see why it fails, mend it, time it on paper, train with it.

python examples/write_your_own_schedule.py        # or cell by cell, in an editor that knows # %%
"""

# %% A schedule is a function of two numbers. It returns a row of actions for each pipeline rank: 0F3 is stage 0's
# forward of microbatch 3, 0B3 its backward. This one is 1F1B with twice the warm-up, so that no rank waits for a value
# on a slow link ("eager 1F1B", Zhuang et al. 2023). With a name it is used like raypar's own.
from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import raypar as rp
from raypar.schedules import Costs, Schedule, ScheduleError, build, demand_sound, from_csv, lower, simulate, to_csv


@rp.register_schedule("eager", summary="1f1b with twice the warm-up, for slow links")
def eager(num_ranks: int, num_microbatches: int) -> list[list[str]]:
    return [row(rank, 2 * rank, num_microbatches) for rank in range(num_ranks)]


def row(rank: int, warmup: int, num_microbatches: int) -> list[str]:
    forwards = [f"{rank}F{mb}" for mb in range(num_microbatches)]
    backwards = [f"{rank}B{mb}" for mb in range(num_microbatches)]
    warmup = min(warmup, num_microbatches)
    pairs = zip(forwards[warmup:], backwards, strict=False)
    return [*forwards[:warmup], *(action for pair in pairs for action in pair), *backwards[num_microbatches - warmup :]]


# %% Will it run? A fault is reported with its smallest case: two ranks are enough to see that the warm-up grows at the
# wrong end. Rank 0 waits for a backward of rank 1, and rank 1 for more forwards of rank 0.
try:
    demand_sound(build("eager", 4, 8), partial(build, "eager"))
except ScheduleError as error:
    print(error)


# %% The first rank needs the longest warm-up. Define it again, as in a notebook: the new one replaces the old.
@rp.register_schedule("eager", summary="1f1b with twice the warm-up, for slow links")
def eager(num_ranks: int, num_microbatches: int) -> list[list[str]]:  # noqa: F811
    return [row(rank, 2 * (num_ranks - 1 - rank), num_microbatches) for rank in range(num_ranks)]


demand_sound(build("eager", 4, 8), partial(build, "eager"))
print(build("eager", 4, 8))

# %% Is it any good? If messages take no time it only holds more than 1F1B; if they take half as long as a forward it is
# as fast as GPipe, and holds less.
for link in (0.0, 0.5):
    print(f"\nfrom rank to rank in {link} of a forward")
    for name in ("gpipe", "1f1b", "eager"):
        timeline = simulate(build(name, 4, 8), Costs(f=1, b=2, link=link))
        print(f"{name:6} lasts {timeline.makespan:4}, bubble {timeline.bubble:5.1%}, in flight {timeline.in_flight}")

# %% A schedule is also data. Save it as CSV, as torch.distributed.pipelining writes it; edit that, or the rows.
path = Path(tempfile.mkdtemp(), "eager.csv")
path.write_text(to_csv(build("eager", 2, 4)))
rows = [list(actions) for actions in from_csv(path.read_text(), "edited")]
rows[0][2], rows[0][3] = rows[0][3], rows[0][2]  # rank 0 takes 0B0 before 0F2
edited = Schedule.of("edited", rows)
demand_sound(lower(edited))
print(path.read_text(), edited, sep="\n")


# %% Train with it, under its name or as edited. The order in which ranks work changes no bit of what they compute. The
# command line takes the function from a file of yours: raypar train --schedule my.py:eager
def losses(schedule: str | Schedule) -> list[float]:
    """The losses of two steps on two actors."""
    with rp.launch(replace(rp.recipe("gpt-tiny"), schedule=schedule, steps=2)) as job:
        return [report.loss for report in job.train()]


if __name__ == "__main__":
    for schedule in ("1f1b", "eager", edited):
        print(losses(schedule))
