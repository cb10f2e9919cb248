"""What short runs say, from runs that take as long as a calibration says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypar.calibration.probes import Measured, median_of, probe_runs
from raypar.calibration.solved import solved, without_unmeasured
from raypar.config.run import check_run
from raypar.planner.calibrated.calibrated_costs import stage_seconds, step_seconds
from raypar.planner.calibrated.calibration import Beside, MeasuredUpdate
from raypar.planner.sizes.sized_run import SizedRun
from raypar.schedules.action import Op
from tests.support.calibrations import known

BESIDES = {
    "gpt": (1e-3, 2e-3),
    "llama": (1.5e-3, 2.5e-3),
    "tensor": (2e-4, 1e-4),
    "sequence": (3e-4, 2e-4),
    "context": (4e-4, 5e-4),
    "experts": (2e-3, 3e-3),
    "expert parallel": (5e-4, 6e-4),
    "reduced": (0.0, 7e-4),
    "shared": (0.0, 9e-4),
    "lent": (0.0, 8e-4),
    "gathered": (1e-3, 1.1e-3),
    "split": (6e-4, 1e-4),
    "pipeline": (3e-4, 4e-4),
    "head": (4e-4, 3e-4),
}
TRUE = known(
    besides=tuple(Beside(kind, size, *both) for kind, both in BESIDES.items() for size in (1, 1 << 30)),
    action_forward=2e-4,
    action_backward=1e-4,
    update=MeasuredUpdate(1e-3, 1e-5, 1e-9),
    busy=1.25,
    message=1e-4,
    call=2e-3,
)
BLANK = known(besides=(), action_forward=0.0, action_backward=0.0, groups=TRUE.groups)


def measured(run, calibration):
    """What a run takes if each action takes what a calibration says."""
    sized = SizedRun.of(run, check_run(run)["train"])
    _, world, _, schedule = sized
    stages, layers = schedule.num_stages, run.model.layers
    each = [range(layers * one // stages, layers * (one + 1) // stages) for one in range(stages)]
    found = [stage_seconds(sized, stage, one, calibration) for stage, one in enumerate(each)]
    slower = calibration.busy if run.mesh.size > 1 and stages == 1 else 1.0
    forward, whole, later = (sum(one[op] for one in found) / stages for op in (Op.F, Op.B, Op.W))
    split = calibration.beside("split", 1)[0] * len(each[0])
    halves = run.backward == "split"
    ends = calibration.beside("reduced", 1)[1] * layers if world.reduces and not world.frees_buckets else 0.0
    return Measured(
        run,
        forward * slower,
        (whole + (split if halves else 0.0)) * slower,
        ends,
        later if halves else 0.0,
        found[-1][Op.F] - found[0][Op.F],
        found[-1][Op.B] - found[0][Op.B],
        step_seconds(sized, calibration),
        calibration.message if run.mesh.pp > 1 else 0.0,
        calibration.call,
        500 << 20,
    )


def runs_as(calibration):
    found = {name: [measured(run, calibration) for run in runs] for name, runs in probe_runs("cpu", 2).items()}
    return {"first": found["gpt"][2:3], **found}


def test_what_short_runs_say_is_what_they_take(monkeypatch):
    monkeypatch.setattr("raypar.calibration.solved.num_cores", lambda: 1 << 20)  # so that no stage waits for a core
    found = solved(BLANK, runs_as(TRUE), 2)
    for name in ("action_forward", "action_backward", "busy", "message", "call"):
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=1e-6), name
    assert found.update.parameter == pytest.approx(TRUE.update.parameter, rel=1e-3)
    for kind, both in BESIDES.items():
        assert found.beside(kind, 60_000) == pytest.approx(both, rel=1e-3, abs=1e-9), kind


@pytest.mark.long
def test_what_was_left_out_is_nothing():
    few = {name: taken for name, taken in runs_as(TRUE).items() if name in ("first", "gpt")}
    found = solved(BLANK, few, 2)
    assert {one.kind for one in found.besides} == {"gpt"}
    assert found.busy == 1.0 and found.message == 0.0
    assert found.action_forward == pytest.approx(TRUE.action_forward + BESIDES["head"][0])
    assert found.beside("llama", 60_000) == found.beside("gpt", 60_000)


def test_what_is_lost_in_noise_is_left_out_and_not_nothing():
    noisy = (Beside("tensor", 100, 0.0, 0.0), Beside("tensor", 900, 0.0, 0.0), Beside("gpt", 100, 0.0, 0.0))
    known = replace(BLANK, besides=(*noisy, Beside("gpt", 900, 1e-3, 0.0)))
    found, unmeasured = without_unmeasured(known)
    assert unmeasured == ["tensor"] and {one.kind for one in found.besides} == {"gpt"}
    assert len(found.besides) == 2, "of a kind that is measured, a size may add nothing"


def test_rounds_have_their_medians():
    run = probe_runs("cpu", 2)["gpt"][0]
    rounds = [replace(measured(run, TRUE), forward=seconds) for seconds in (3.0, 1.0, 2.0)]
    assert median_of(rounds).forward == 2.0 and median_of(rounds).run is run
