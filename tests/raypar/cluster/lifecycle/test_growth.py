"""What a driver does for its actors grows no faster than n log n: calls, bytes and the work of each function.

All paths of a job are driven over stand-ins in this process, at two sizes.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import raypar as rp
from tests.support.counted_stand_ins import CountedCluster

ROOT = str(Path(__file__).parents[4])


class Layouts(NamedTuple):
    """Layouts of some numbers of actors.

    Attributes:
        meshes: For n actors, the mesh, and another one to which the run goes on.
        few: The smaller number; each stage of its pipeline is on several nodes.
        many: The larger number.
        zero: See ``Run``.
    """

    meshes: Callable[[int], tuple[rp.Mesh, rp.Mesh]]
    few: int = 24
    many: int = 96
    zero: int | None = None


REPLICAS = Layouts(lambda n: (rp.Mesh(dp=n), rp.Mesh(dp=n // 2, tp=2)))
LAYOUTS = {
    "dp": REPLICAS,
    "dp without ZeRO": REPLICAS._replace(zero=0),
    "pp x tp x dp": Layouts(lambda n: (rp.Mesh(pp=2, tp=4, dp=n // 8), rp.Mesh(pp=4, tp=2, dp=n // 8)), 64, 256),
}
PATHS = ["launch", "step", "evaluation", "save", "recovery", "by hand", "looking inside", "relayout", "end"]
SLACK = 1.15  # what does not grow evenly, such as the number of the nodes in a message


def batch(step, microbatch, dp):

    ids = torch.full((1, 8), dp % 64)
    return ids, ids


@contextmanager
def functions_counted(counts):
    """Within it, what is called of the project and by it is counted by name, in this thread and in new ones."""

    def note(frame, event, what):
        if not frame.f_code.co_filename.startswith(ROOT):
            return  # how threads and imports go differs from one run to the next
        if event == "call":
            counts[f"{frame.f_code.co_filename}:{frame.f_code.co_firstlineno} {frame.f_code.co_name}"] += 1
        elif event == "c_call":
            counts[f"{what.__module__} {what.__qualname__}"] += 1

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


class Paths:
    """What the driver has done for each path of a job: by path and what was counted, how often."""

    def __init__(self, cluster):
        self.cluster, self.found = cluster, {}

    @contextmanager
    def of(self, path):
        before, counts = self._counts(), Counter()
        with functions_counted(counts):
            yield
        self.found[path] = dict(self._counts() - before) | {f"work of {name}": n for name, n in counts.items()}

    def _counts(self):
        cluster = self.cluster
        calls = {f"calls of {name}": count for name, count in cluster.calls.items()}
        return Counter(calls | {f"bytes of {name}": count for name, count in cluster.nbytes.items()} | cluster.asked)


def run_of(mesh, **settings):
    """A run on a mesh."""
    model = rp.GPT(layers=4, hidden=64, heads=8, seq=8, vocab=64)
    fields = {"microbatches": 4, "micro_batch_size": 1, "steps": 20, "eval_steps": 1, "device": "cpu"}
    return rp.Run(model=model, data=rp.Batches(batch, batch), mesh=mesh, **fields, **settings)


def life(layouts, actors, folder):
    """What each part of a job's life has cost its driver."""
    mesh, other = layouts.meshes(actors)
    run = run_of(mesh, max_failures=1, zero=layouts.zero)
    cluster = CountedCluster(actors + 8)
    paths = Paths(cluster)
    victim = rp.actors.mesh.world.World(mesh).label(5)
    with cluster.serving():
        with paths.of("launch"):
            job = rp.launch(run, chaos=[rp.chaos.kill(victim, at="end", step=3)])
        job.step()
        with paths.of("step"):
            job.step()
        with paths.of("evaluation"):
            job.evaluate(1)
        with paths.of("save"):
            job.save(folder)
        with paths.of("recovery"):
            job.step()
        assert [failure.source for failure in job.failures] == ["memory"]
        with paths.of("by hand"):
            job.stepper().finish()
        with paths.of("looking inside"):
            job.ledger()
            job.timelines()
            assert set(job.gradients().values()) == {None}, "all who may have one are asked"
        with paths.of("relayout"):
            job.relayout(mesh=other)
        with paths.of("end"):
            job.close()
    return paths.found


def grows_faster(counts):
    """What grows faster than n log n, with how often it was, given what was counted by the number of actors: of two."""
    (small, few), (large, many) = counts.items()
    most = large * math.log(large) / (small * math.log(small)) * SLACK
    return {name: (few.get(name, 0), n) for name, n in many.items() if n > most * max(few.get(name, 0), small)}


@pytest.fixture(
    scope="module", params=["dp", *(pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS if name != "dp")]
)
def lives(request, tmp_path_factory):
    """What each path of a job has cost its driver, by the number of actors."""
    layouts = LAYOUTS[request.param]
    return {n: life(layouts, n, tmp_path_factory.mktemp("saved")) for n in (layouts.few, layouts.many)}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", PATHS)
def test_no_path_of_the_driver_grows_faster_than_n_log_n(lives, path):
    faults = grows_faster({n: found[path] for n, found in lives.items()})
    few, many = lives
    assert not faults, "\n".join(
        f"{name}: {before} times with {few} actors, {after} with {many}" for name, (before, after) in faults.items()
    )


@pytest.mark.timeout(120)
@pytest.mark.parametrize("order", ["row", "dynamic"])
def test_a_step_of_tasks_grows_no_faster_than_n_log_n(order):
    found = {}
    for actors in (32, 128):
        paths = Paths(CountedCluster(actors))
        mesh = rp.Mesh(pp=4, tp=2, dp=actors // 8)
        with paths.cluster.serving(), rp.launch(run_of(mesh, executor="tasks", order=order)) as job:
            job.step()
            with paths.of("step"):
                job.step()
        found[actors] = paths.found["step"]
        assert found[actors]["calls of act"] > 8 * actors, "F and B of four microbatches at least"
    assert not grows_faster(found)


def test_what_grows_with_the_square_is_seen():
    counts = {32: Counter(), 128: Counter()}
    for n, count in counts.items():
        with functions_counted(count):
            for _ in range(n):
                sum(abs(other) for other in range(n))
    assert any("genexpr" in name for name in grows_faster(counts))
    assert not grows_faster({n: {"calls": n} for n in counts})
