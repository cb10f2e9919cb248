"""The largest microbatch that fits: by the forecast, then by a probe, with the samples of a step as they were."""

from dataclasses import replace

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.data import Batches
from raypar.cli.train.train import train
from raypar.config.recipes import recipe
from raypar.errors import ConfigError
from raypar.job.microbatch import fit_microbatch

RUN = replace(recipe("gpt-small"), mesh=Mesh(), microbatches=8, micro_batch_size=2)
MIB = 1 << 20


def samples(run):
    return run.microbatches * run.micro_batch_size


def test_more_memory_makes_larger_microbatches_of_the_same_samples():
    found = [fit_microbatch(RUN, room * MIB, None).run for room in (500, 700, 1000, 100_000)]
    sizes = [run.micro_batch_size for run in found]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1] == 16
    assert {samples(run) for run in found} == {16}


def test_a_pipeline_keeps_a_microbatch_for_each_rank():
    assert fit_microbatch(replace(RUN, mesh=Mesh(pp=4)), 100_000 * MIB, None).run.microbatches == 4


def test_a_probe_that_measures_more_than_there_is_steps_down():
    tried = []

    def probe(run):
        tried.append(run.micro_batch_size)
        return None if run.micro_batch_size == 16 else run.micro_batch_size * 170 * MIB

    found = fit_microbatch(RUN, 1200 * MIB, probe)
    assert tried == [16, 8, 4] and found.run.micro_batch_size == 4
    assert "the memory ran out" in found.findings[0]
    assert "measured 1.3 GiB, more than 1.2 GiB" in found.findings[1]
    assert "measured 680 MiB, within 1.2 GiB" in found.findings[2]


def test_what_never_fits_says_what_each_size_takes():
    with pytest.raises(ConfigError, match="no microbatch fits: 1 microbatches x 16 samples: forecast"):
        fit_microbatch(RUN, 10 * MIB, None)
    with pytest.raises(ConfigError, match="data=Text"):
        fit_microbatch(replace(RUN, data=Batches(lambda *_: None)), 1000 * MIB, None)
    with pytest.raises(ConfigError, match="give room"):
        fit_microbatch(replace(RUN, device="cuda"), probe=None)


def test_a_dry_run_chooses_by_the_forecast(monkeypatch):
    monkeypatch.setattr("raypar.job.microbatch.free_memory", lambda: 100_000 * MIB)
    words = [
        "gpt-small",
        "--mesh.pp",
        "2",
        "--microbatches",
        "8",
        "--micro-batch-size",
        "2",
        "--auto-microbatch",
        "--dry-run",
    ]
    rows = dict(train(words, terminal=False).rows)
    assert "of 2 microbatches x 8 samples" in rows["steps"]
