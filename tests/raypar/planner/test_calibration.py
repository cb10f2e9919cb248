"""A calibration: its file, what it says of other sizes, and the predictions that rest on it."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace

import pytest

from raypar.actors.machine.host_cores import num_cores
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import GPT
from raypar.actors.specs.run import Run
from raypar.config.run import check_run
from raypar.errors import ConfigError
from raypar.planner.calibrated.calibrated_costs import stage_seconds
from raypar.planner.calibrated.calibration import (
    AttentionTime,
    Beside,
    MeasuredProduct,
)
from raypar.planner.calibrated.calibration_file import VARIABLE, default_path, read_calibration, write_calibration
from raypar.planner.prediction import FROM_CALIBRATION, FROM_FLOPS, before_run, from_calibration
from raypar.planner.sizes.sized_run import SizedRun, counts_of
from raypar.reporting.summary import plan_rows
from raypar.schedules.action import Op
from tests.support.calibrations import RATE, known

MODEL = GPT(layers=4, hidden=64, heads=2, seq=64)


def predicted(run, calibration, monkeypatch, cores=64):
    monkeypatch.setattr("raypar.planner.prediction.num_cores", lambda: cores)
    schedule = check_run(run)["train"]
    return from_calibration(SizedRun.of(run, schedule), calibration)


def test_a_calibration_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "new" / "calibration.json"
    write_calibration(known(), path)
    assert read_calibration(path) == known()
    assert [one.name for one in path.parent.iterdir()] == ["calibration.json"]


def test_all_faults_of_a_file_are_told(tmp_path):
    written = json.loads(json.dumps(asdict(known())))
    written["products"][3]["forward"] = -1.0
    written["device"] = "tpu"
    del written["update"]["tensor"]
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(written))
    with pytest.raises(ConfigError) as error:
        read_calibration(path)
    told = "\n".join(error.value.faults)
    assert len(error.value.faults) == 3 and "raypar calibrate" in told
    assert "products[3].forward is -1.0, and must be greater than or equal to 0.000000000001" in told
    assert "device is 'tpu', and must be" in told and "update.tensor is missing" in told


def test_of_many_faults_the_first_ones_are_told(tmp_path):
    written = json.loads(json.dumps(asdict(known())))
    written["groups"] = [{"op": "x", "members": 2, "bytes": 1, "seconds": 5e-324}] * 1000
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(written))
    with pytest.raises(ConfigError) as error:
        read_calibration(path)
    assert len(error.value.faults) == 21 and "2,980 more values are wrong" in error.value.faults[-1]


def test_a_link_stays_one(tmp_path):
    kept, link = tmp_path / "kept.json", tmp_path / "calibration.json"
    link.symlink_to(kept)
    write_calibration(known(), link)
    assert link.is_symlink() and read_calibration(kept) == read_calibration(link) == known()


@pytest.mark.parametrize("figure", [float("inf"), 1e300, 10**30])
def test_figures_that_no_machine_has_are_told_all_at_once(tmp_path, figure):
    written = json.loads(json.dumps(asdict(known())))
    written["busy"] = written["memory"] = written["besides"][0]["forward"] = written["update"]["step"] = figure
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(written))
    with pytest.raises(ConfigError) as error:
        read_calibration(path)
    told = [fault.split(": ")[1].split(",")[0] for fault in error.value.faults]
    assert told == [f"{place} is {figure!r}" for place in ("memory", "besides[0].forward", "update.step", "busy")]


@pytest.mark.parametrize("text", ["", "[", "[]", "null", '{"format": 7}', "{}", "\x00", "[" * 100_000])
def test_what_is_no_calibration_is_told_in_one_fault(tmp_path, text):
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="raypar calibrate"):
        read_calibration(path)


def test_the_file_is_named_by_the_variable_and_else_in_the_home(monkeypatch):
    monkeypatch.delenv(VARIABLE)
    assert default_path().parts[-2:] == (".raypar", "calibration.json")
    monkeypatch.setenv(VARIABLE, "/a/b.json")
    assert str(default_path()) == "/a/b.json"
    monkeypatch.setenv(VARIABLE, "")
    assert default_path() is None


def test_a_product_of_another_shape_has_the_costs_of_the_measured_ones():
    def seconds(m, k, n):
        return 1e-5 + m * k * n / RATE + 1e-10 * (m * k + 2 * k * n + 3 * m * n)

    shapes = [(m, k, n) for m in (32, 128, 512) for k, n in ((64, 64), (64, 256), (256, 64), (256, 1024), (1024, 256))]
    found = known(products=tuple(MeasuredProduct(*one, seconds(*one), 2 * seconds(*one)) for one in shapes))
    wanted = seconds(200, 192, 576)
    assert found.product(200, 192, 576) == pytest.approx((wanted, 2 * wanted), rel=1e-3)


def test_a_product_is_never_faster_than_the_fastest_measured_one():
    slow = known(products=(MeasuredProduct(32, 64, 64, 1e-3, 2e-3), MeasuredProduct(32, 64, 256, 1e-3, 2e-3)))
    assert slow.product(32, 64, 4096)[0] >= 16e-3
    assert known(products=(MeasuredProduct(32, 64, 64, 1e-3, 2e-3),)).product(32, 64, 64) == pytest.approx((1e-3, 2e-3))


def test_an_attention_core_is_as_fast_as_between_the_measured_lengths():
    def seconds(tokens):
        return 1e-6 * tokens + 1e-8 * tokens**2

    measured = known(attention=tuple(AttentionTime(one, 8, 32, seconds(one), 2 * seconds(one)) for one in (512, 64)))
    for tokens in (64, 128, 300, 512):
        assert measured.core(tokens, 8, 32) == pytest.approx((seconds(tokens), 2 * seconds(tokens))), tokens
        assert measured.core(tokens, 16, 32) == pytest.approx((2 * seconds(tokens), 4 * seconds(tokens)))
    assert measured.core(32, 8, 32)[0] == pytest.approx(seconds(64) / 4)  # as fast as the nearest one
    assert measured.core(1024, 8, 32)[0] == pytest.approx(seconds(512) * 4)


def test_the_head_and_the_loss_are_in_the_last_stage_once():
    run = Run(model=MODEL, mesh=Mesh(pp=2), device="cpu", backward="whole", micro_batch_size=2)
    heads = known(besides=(*known().besides, Beside("head", 2 * 64 * 256, 1e-3, 2e-3)))
    sized = SizedRun.of(run, check_run(run)["train"])
    first, last = (
        [stage_seconds(sized, stage, blocks, one) for one in (known(), heads)]
        for stage, blocks in enumerate((range(2), range(2, 4)))
    )
    assert first[0] == first[1]
    assert last[1][Op.F] - last[0][Op.F] == pytest.approx(1e-3)
    assert last[1][Op.B] - last[0][Op.B] == pytest.approx(2e-3)


def test_a_message_lies_between_those_that_were_measured():
    assert known().group("all_reduce", 2, 3 << 20) == pytest.approx(1e-4 + (3 << 20) * 1e-9)
    assert known().group("all_reduce", 1, 1 << 20) == 0.0
    twice = known().group("all_reduce", 2, 16 << 20)
    assert twice == pytest.approx(2 * (1e-4 + (8 << 20) * 1e-9))


def test_a_step_on_one_actor_is_the_sum_of_what_was_measured(monkeypatch):
    run = Run(model=MODEL, microbatches=4, micro_batch_size=2, device="cpu", backward="whole")
    tokens, hidden = 128, 64
    products = 4 * tokens * (4 * hidden**2 + 8 * hidden**2) + tokens * hidden * 256
    core = 4 * 1e-3 * (4 * 64**2 * 4 * 32) / (4 * 64**2 * 8 * 32)
    forward = 1e-4 + 4 * 2e-3 + products / RATE + core  # a microbatch has 1 << 13 elements
    counts = counts_of(run, check_run(run)["train"], None)
    update = 1e-3 + len(counts.units[0].sizes) * 1e-5 + counts.held[0] * 1e-9
    found = predicted(run, known(), monkeypatch)
    assert found.step == pytest.approx(4 * (forward + 2 * forward) + update + 5e-4)


def test_actors_share_the_cores_there_are(monkeypatch):
    run = Run(model=MODEL, mesh=Mesh(pp=4), microbatches=16, device="cpu", backward="whole")
    apart, together = (predicted(run, known(), monkeypatch, cores).step for cores in (4, 1))
    one = predicted(replace(run, mesh=Mesh()), known(), monkeypatch).step
    assert apart < 0.5 * one
    assert together == pytest.approx(one, rel=0.1)  # the same work on one core
    crowded = predicted(run, known(busy=1.5), monkeypatch, 4).step
    assert 1.2 * apart < crowded < 1.5 * apart
    update = replace(known().update, step=1.0)
    longer = [predicted(run, known(update=update), monkeypatch, cores).step for cores in (4, 1)]
    assert longer[0] - apart == pytest.approx(1 - 1e-3) and longer[1] - together == pytest.approx(4 * (1 - 1e-3))


def test_what_is_run_again_and_what_is_divided_counts(monkeypatch):
    run = Run(model=MODEL, device="cpu", backward="whole")
    plain = predicted(run, known(), monkeypatch).step
    assert predicted(replace(run, recompute="full"), known(), monkeypatch).step > 1.2 * plain
    layers = known(besides=(), action_forward=0.0, action_backward=0.0, groups=())
    halves = predicted(replace(run, mesh=Mesh(tp=2)), layers, monkeypatch).step
    assert 0.4 < halves / predicted(run, layers, monkeypatch).step < 0.7


def test_a_run_is_predicted_from_the_calibration_if_it_fits(monkeypatch, tmp_path):
    path = tmp_path / "calibration.json"
    write_calibration(known(), path)
    monkeypatch.setenv(VARIABLE, str(path))
    run = Run(model=MODEL, device="cpu")

    def source(run):
        schedule = check_run(run)["train"]
        return before_run(SizedRun.of(run, schedule)).source

    assert source(run) == FROM_CALIBRATION
    assert FROM_CALIBRATION in dict(plan_rows(run, check_run(run)["train"]))["time"]
    assert source(replace(run, threads=2)) == FROM_FLOPS
    write_calibration(known(origin=replace(known().origin, cores=num_cores() + 1)), path)
    assert source(run) == FROM_FLOPS


def test_a_calibration_that_cant_be_read_is_told_and_not_used(monkeypatch, tmp_path, caplog):
    path = tmp_path / "calibration.json"
    path.write_text("{}")
    monkeypatch.setenv(VARIABLE, str(path))
    run = Run(model=MODEL, device="cpu")
    schedule = check_run(run)["train"]
    with caplog.at_level(logging.WARNING):
        found = before_run(SizedRun.of(run, schedule))
    assert found.source == FROM_FLOPS and "raypar calibrate" in caplog.text


def test_what_an_axis_adds_to_a_block_is_between_the_measured_sizes(monkeypatch):
    besides = (*known().besides, Beside("tensor", 1 << 12, 1e-3, 1e-3), Beside("tensor", 1 << 14, 5e-3, 5e-3))
    assert known(besides=besides).beside("tensor", 10 << 10) == pytest.approx((3e-3, 3e-3))
    assert known(besides=besides).beside("llama", 1 << 10) == known().beside("gpt", 1 << 10)
    assert known().beside("context", 1 << 10) == (0.0, 0.0)
    run = Run(model=MODEL, mesh=Mesh(tp=2), device="cpu", backward="whole", microbatches=4, micro_batch_size=2)
    without, with_it = (predicted(run, known(besides=one), monkeypatch).step for one in (known().besides, besides))
    assert with_it - without == pytest.approx(4 * MODEL.layers * 2 * (1e-3 + 4e-3 / 3))
    sequence = replace(run, sequence_parallel=True)
    assert predicted(sequence, known(besides=besides), monkeypatch).step == pytest.approx(without)


def test_halves_of_a_backward_take_what_was_measured_of_them():
    run = Run(model=MODEL, device="cpu", micro_batch_size=2)
    split = known(besides=(*known().besides, Beside("split", 1 << 13, 1e-3, 5e-3)))
    sized = SizedRun.of(run, check_run(run)["train"])
    plain, longer = (stage_seconds(sized, 0, range(MODEL.layers), one) for one in (known(), split))
    more = {op: longer[op] - plain[op] for op in plain}
    each = MODEL.layers * 1e-3
    assert more == pytest.approx({Op.F: 0.0, Op.B: 0.0, Op.I: each - 5 * each, Op.W: 5 * each})


def test_gathers_of_weights_take_longer(monkeypatch):
    run = Run(model=MODEL, mesh=Mesh(dp=2), zero=3, device="cpu", backward="whole")
    parameters = counts_of(run, check_run(run)["train"], None).units[0].gathered // MODEL.layers
    gathers = known(besides=(*known().besides, Beside("gathered", parameters, 1e-3, 2e-3)))
    more = predicted(run, gathers, monkeypatch).step - predicted(run, known(), monkeypatch).step
    assert more == pytest.approx(run.microbatches * MODEL.layers * 3e-3, rel=0.01)


def test_the_process_of_a_plan_is_the_measured_one(monkeypatch, tmp_path):
    path = tmp_path / "calibration.json"
    run = Run(model=MODEL, device="cpu")
    rows = []
    for process in (300 << 20, 200 << 20):
        write_calibration(known(process=process), path)
        monkeypatch.setenv(VARIABLE, str(path))
        rows.append(dict(plan_rows(run, check_run(run)["train"]))["memory, pp=0"])
    assert "process 300 MiB" in rows[0] and "process 200 MiB" in rows[1]
