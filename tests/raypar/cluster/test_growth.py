"""What a driver does for its actors grows no faster than n log n: calls, bytes and the work of each function.

All paths of a job are driven over stand-ins in this process, at two sizes.
"""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import raypar as rp
from tests.support.counted_stand_ins import CountedCluster

ROOT = str(Path(__file__).parents[3])
FEW, MANY = 32, 128
MESHES = {
    "dp": lambda n: (rp.Mesh(dp=n), rp.Mesh(dp=n // 2, tp=2)),
    "pp x tp x dp": lambda n: (rp.Mesh(pp=4, tp=4, dp=n // 16), rp.Mesh(pp=4, tp=2, dp=n // 8)),
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


def life(actors, mesh, other, folder, **settings):
    """What each part of a job's life has cost its driver."""
    model = rp.GPT(layers=4, hidden=64, heads=8, seq=8, vocab=64)
    fields = {"microbatches": 4, "micro_batch_size": 1, "steps": 20, "eval_steps": 1, "device": "cpu"}
    run = rp.Run(model=model, data=rp.Batches(batch, batch), mesh=mesh, max_failures=1, **fields, **settings)
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
        with paths.of("relayout"):
            job.relayout(mesh=other)
        with paths.of("end"):
            job.close()
    return paths.found


def grows_faster(few, many):
    """What grows faster than n log n from FEW to MANY, with how often it was at both sizes."""
    most = MANY * math.log(MANY) / (FEW * math.log(FEW)) * SLACK
    return {name: (few.get(name, 0), n) for name, n in many.items() if n > most * max(few.get(name, 0), FEW)}


@pytest.fixture(scope="module", params=["dp", pytest.param("pp x tp x dp", marks=pytest.mark.long)])
def lives(request, tmp_path_factory):
    """What each path of a job has cost its driver with FEW actors, and with MANY."""
    return [life(n, *MESHES[request.param](n), tmp_path_factory.mktemp("saved")) for n in (FEW, MANY)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("path", PATHS)
def test_no_path_of_the_driver_grows_faster_than_n_log_n(lives, path):
    few, many = (found[path] for found in lives)
    faults = grows_faster(few, many)
    assert not faults, "\n".join(
        f"{name}: {before} times with {FEW} actors, {after} with {MANY}" for name, (before, after) in faults.items()
    )


def test_what_grows_with_the_square_is_seen():
    counts = [Counter(), Counter()]
    for n, count in zip((FEW, MANY), counts, strict=True):
        with functions_counted(count):
            for _ in range(n):
                sum(abs(other) for other in range(n))
    assert any("genexpr" in name for name in grows_faster(*counts))
    assert not grows_faster({"calls": FEW}, {"calls": MANY})
