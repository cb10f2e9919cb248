"""The bench's own code: who takes part, its figures, its tables, and processes that crash or hang. No timings."""

import io
import itertools
import json
import math
import os
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import raypar as rp
from raypar.actors.layers.linear import linear_of
from raypar.actors.models.build import build_model
from raypar.parity.verify import train_plainly
from tests.bench.__main__ import parse, sizes_of
from tests.bench.calm import ATTEMPTS, Measured, calmly, seconds_stolen
from tests.bench.contestants import CONTESTANTS, entered
from tests.bench.figures import mean_losses, median_ratio, tokens_per_s, worst_difference
from tests.bench.group_speed import MIB, Sample
from tests.bench.machine import Machine
from tests.bench.overhead import EmptySteps, Overhead
from tests.bench.peers.whole import whole_model
from tests.bench.processes import ProcessError, Processes
from tests.bench.report import Findings, Heat, group_table, ratio_table, speed_table, wait_table
from tests.bench.rounds import Track
from tests.bench.tables import Table, write_block
from tests.bench.trainer import LocalTrainer, serve
from tests.bench.workload import SIZES, Size, model_of, run_of

NAMES = ("dp", "dp-wide", "pp", "pp-wide", "tp", "gpu", "gpus")
SMALL, WIDE, PP, PP_WIDE, TP, GPU, GPUS = (SIZES[name] for name in NAMES)
TENSORS = ["torch-tp", "raypar-tp", "torch-tp-sequence", "raypar-tp-sequence"]


# --- who takes part, and what they train -----------------------------------------------------------------------------


def test_everybody_takes_part_where_the_model_has_enough_layers():
    replicas = ["plain", "raypar-one", "pair-halves", "torch-ddp", "ray-train"]
    replicas += ["raypar-dp", "raypar-zero-0", "raypar-ps"]
    assert [contestant.name for contestant in entered(SMALL)] == replicas
    assert [contestant.name for contestant in entered(WIDE)] == replicas
    schedules = [f"{whose}-{name}" for name in ("gpipe", "1f1b", "interleaved") for whose in ("torch", "raypar")]
    assert [contestant.name for contestant in entered(PP)] == ["plain", "pair", *schedules]
    assert [contestant.name for contestant in entered(PP_WIDE)] == ["plain", "pair", *schedules[:4]], "of two layers"
    assert [contestant.name for contestant in entered(TP)] == ["plain", "pair", *TENSORS]
    experts = ["plain", "pair-halves", "torch-ep", "deepspeed-moe", "deepspeed-moe-dropping"]
    experts += [f"raypar-ep{suffix}" for suffix in ("", "-rounds", "-even", "-dropping", "-0")]
    assert [contestant.name for contestant in entered(SIZES["moe"])] == experts
    assert [contestant.name for contestant in entered(GPU)] == ["plain", "raypar-one"]
    assert [contestant.name for contestant in entered(GPUS)] == ["plain", "pair-halves", "torch-ddp", "raypar-dp"]


def test_a_size_says_what_everybody_computes_on():
    assert {run_of(SMALL, "whole").device, run_of(WIDE, "replicas").device} == {"cpu"}, "also where there are GPUs"
    assert run_of(GPU, "whole").device == "cuda"


@pytest.mark.parametrize(
    ("there", "size", "says"),
    [(0, "gpu", "no GPU here"), (0, "gpus", "no GPU here"), (1, "gpus", "one GPU here")],
)
def test_gpus_that_are_not_here(monkeypatch, capsys, there, size, says):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    with pytest.raises(SystemExit):
        parse(["--size", size])
    assert f"--size {size}: {says}" in capsys.readouterr().err
    names = ["dp", "dp-wide", "pp", "pp-wide", "tp", "tp-batch", "tp-wide", "gpu"]
    assert [size.name for size in sizes_of(parse([]))] == names[: 7 + there]


def test_the_machine_says_which_gpus_are_here():
    assert "2 cores, no GPU here, Python" in str(Machine(cores=2, gpus=()))
    assert "2 cores, 2 GPUs (H100), Python" in str(Machine(cores=2, gpus=("H100", "H100")))


def test_those_named_bring_their_limit_and_the_reference():
    names = [contestant.name for contestant in entered(PP, ["raypar-1f1b", "torch-1f1b"])]
    assert names == ["plain", "pair", "torch-1f1b", "raypar-1f1b"]
    assert [contestant.name for contestant in entered(SMALL, ["torch-ddp"])] == ["plain", "pair-halves", "torch-ddp"]


@pytest.mark.parametrize("layout", ["whole", "pipeline", "replicas", "tensors"])
def test_a_step_takes_the_same_samples_in_every_layout(layout):
    run = run_of(SMALL, layout)
    assert run.mesh.dp * run.microbatches * run.micro_batch_size == SMALL.batch
    assert SMALL.tokens(layout) * run.mesh.dp == SMALL.batch * SMALL.model.seq


def test_the_limit_of_a_pipeline_is_less_its_bubble():
    assert CONTESTANTS["torch-1f1b"].ideal(PP) == 8 / 9
    assert CONTESTANTS["raypar-interleaved"].ideal(PP) == 16 / 17
    assert CONTESTANTS["torch-ddp"].ideal(SMALL) == 1.0


def test_the_plain_peer_trains_as_raypar_verifies(tmp_path):
    (tmp_path / "text").write_text("to be or not to be, that is the question; " * 50)
    size = Size("tiny", rp.GPT(layers=2, hidden=16, heads=2, seq=16), batch=4)
    run = replace(run_of(size, "whole"), data=rp.Text(str(tmp_path / "text"), cache=str(tmp_path)), steps=3)
    losses = LocalTrainer(whole_model(run, 0, torch.device("cpu"))).train(0, 3)
    assert losses == pytest.approx(train_plainly(run).losses, rel=1e-6)


def linear_layers(module):
    return {type(part) for part in module.modules() if isinstance(part, nn.Linear)}


def test_peers_compute_with_torchs_own_layers():
    run = run_of(SMALL, "whole")
    model = model_of(run)
    assert linear_layers(nn.Sequential(*model.materialize([1, 9], 0))) == {nn.Linear}
    assert model.spec.attention == "fused"
    ours = build_model(run.model, 0)
    assert linear_layers(nn.Sequential(*ours.materialize([1, 9], 0))) == {linear_of("auto")}
    for name, size in (("dp-torch", SMALL), ("dp-wide-torch", WIDE), ("pp-torch", PP)):
        assert replace(SIZES[name], name=size.name, model=size.model) == size, "and so does raypar's there"
        assert replace(size.model, linear="torch", attention="fused") == SIZES[name].model


def test_the_command_line():
    chosen = parse(["--size", "wide", "--only", "plain,torch-ddp"])
    assert chosen.only == ["plain", "torch-ddp"]
    assert sizes_of(chosen) == [WIDE, PP_WIDE], "one process runs in both"
    assert sizes_of(parse(["--size", "small", "--only", "torch-ddp"])) == [SMALL]
    assert sizes_of(parse(["--only", "raypar-interleaved"])) == [PP]
    assert sizes_of(parse(["--size", "small"])) == [SMALL, PP]
    assert [size.name for size in sizes_of(parse(["--size", "tp"]))] == ["tp", "tp-batch", "tp-wide"]
    assert sizes_of(parse(["--quick"])) == [SIZES["quick"]]
    everybody = {name for name, contestant in CONTESTANTS.items() if contestant.kinds != ("experts",)}
    assert {contestant.name for contestant in entered(SIZES["quick"])} == everybody, "its model has no experts"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "torch-dp"], "no contestant torch-dp"),
        (["--size", "tp", "--only", "torch-ddp"], "--size tp: none of torch-ddp takes part in it"),
        (["--rounds", "0"], "--rounds must be at least 1"),
        (["--quick", "--size", "tp"], "--quick has a size of its own: leave out one of --quick and --size tp"),
    ],
)
def test_a_mistake_is_told(arguments, says, capsys):
    with pytest.raises(SystemExit):
        parse(arguments)
    assert says in capsys.readouterr().err


# --- figures ---------------------------------------------------------------------------------------------------------


def test_trainings_apart_add_up_and_of_one_the_slowest_process_counts():
    whole = 16 * 256
    assert tokens_per_s(CONTESTANTS["pair"], SMALL, [1.0, 2.0]) == whole + whole / 2
    assert tokens_per_s(CONTESTANTS["pair-halves"], SMALL, [1.0, 2.0]) == whole / 2 + whole / 4
    assert tokens_per_s(CONTESTANTS["torch-ddp"], SMALL, [1.0, 2.0]) == whole / 2


def test_losses_are_the_mean_over_the_processes_that_see_them():
    assert mean_losses([[1.0, 2.0], [3.0, 4.0]]) == [2.0, 3.0]
    assert mean_losses([[], [3.0, 4.0]]) == [3.0, 4.0]
    assert mean_losses([[], []]) == []


def test_ratios_are_formed_round_by_round():
    assert median_ratio([2.0, 30.0, 4.0], [1.0, 10.0, 1.0]) == 3.0
    assert median_ratio([], []) is None
    assert median_ratio([1.0], [1.0, 2.0]) is None


def test_the_worst_loss_counts():
    assert worst_difference([2.0, 4.0], [2.0, 5.0]) == pytest.approx(0.2)
    assert worst_difference([2.0, math.nan], [2.0, 3.0]) == math.inf
    assert worst_difference([], [2.0]) is None


# --- a machine that is shared ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shares", "value", "attempts"),
    [([0.0], 0, 1), ([0.5, 0.001, 0.9], 1, 2), ([0.5, 0.3, 0.2, 0.4, 0.9, 0.0], 2, ATTEMPTS)],
)
def test_what_was_disturbed_is_measured_again_and_the_calmest_counts(monkeypatch, shares, value, attempts):
    clock, cores = iter(range(100)), os.cpu_count()
    monkeypatch.setattr("tests.bench.calm.time.perf_counter", lambda: next(clock))  # a second an attempt
    stolen = iter([seconds * cores for share in shares for seconds in (0.0, share)])
    numbers = itertools.count()
    assert calmly(lambda: next(numbers), lambda: next(stolen)) == Measured(
        value, pytest.approx(min(shares[:attempts])), attempts
    )


def test_stolen_time_is_read_where_linux_tells_it(monkeypatch, tmp_path):
    monkeypatch.setattr("tests.bench.calm._STAT", tmp_path / "stat")
    assert seconds_stolen() == 0.0, "no Linux"
    (tmp_path / "stat").write_text("cpu  9 9 9 9 9 9 9 250 9 9\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    assert seconds_stolen() == 250 / os.sysconf("SC_CLK_TCK")


# --- tables ----------------------------------------------------------------------------------------------------------


def heat() -> Heat:
    """Two rounds of one step; raypar's replicas have failed."""
    pair, half = {"losses": [5.0, 4.0, 3.0]}, {"losses": [9.0, 9.0, 9.0]}
    tracks = {
        "plain": Track([2000.0, 2100.0], peaks=[300 * MIB], launches=[5.0, 4.0, 6.0], **pair),
        "pair": Track([4000.0, 4200.0], peaks=[300 * MIB, 310 * MIB], **pair),
        "pair-halves": Track([4000.0, 4200.0], peaks=[300 * MIB, 310 * MIB], **half),
        "torch-1f1b": Track([3200.0, 3360.0], peaks=[200 * MIB, 210 * MIB], losses=[5.0, 4.0, 3.03]),
        "raypar-dp": Track(losses=[5.0], failure="raypar-dp: process 0 ended"),
        "raypar-1f1b": Track([3520.0, 3696.0], peaks=[200 * MIB, 210 * MIB], **pair),
    }
    return Heat(SMALL, 2, 1, tracks)


def test_the_table_of_speeds():
    table = speed_table(heat())
    rows = {row[0]: list(row[1:]) for row in table.rows}
    assert {len(row) for row in table.rows} == {len(table.header)}
    assert rows["one process"] == ["2,050", "2,000 to 2,100", "-", "300", "5.0", "0"]
    assert rows["torch 1F1B"] == ["3,280", "3,200 to 3,360", "0.90", "200, 210", "-", "1e-02"]
    assert rows["raypar pp=2 1f1b"] == ["3,608", "3,520 to 3,696", "0.99", "200, 210", "-", "0"]
    assert rows["raypar dp=2"] == ["failed", "-", "-", "-", "-", "-"]
    assert rows["limit of dp"][-1] == "-"


def test_the_table_of_ratios():
    table = ratio_table(heat())
    assert list(table.header[1:]) == ["one process", "torch 1F1B"]
    assert [list(row) for row in table.rows] == [
        ["raypar dp=2", "-", "-"],
        ["raypar pp=2 1f1b", "1.76", "1.10"],
    ]


def test_the_table_of_waits():
    waits = {"tp all_reduce": [0.1, 0.2, 0.3], "tp send": [0.1, 0.0]}  # one op was first used in the second round
    heat = Heat(TP, 3, 1, {"plain": Track([2.0] * 3), "raypar-tp": Track([1.0] * 3, waits=waits)})
    table = wait_table(heat)
    assert list(table.header) == ["who", "tp all_reduce", "tp send", "all"]
    assert [list(row) for row in table.rows] == [["raypar tp=2", "20.0%", "5.0%", "30.0%"]]
    assert wait_table(Heat(TP, 1, 1, {"plain": Track([2.0])})).rows == []


def test_the_table_of_groups():
    samples = [
        Sample("p2p", 2, nbytes, {"raypar": [1e-4, 2e-4, 3e-4], "gloo": [2e-4, 4e-4, 9e-4]}) for nbytes in (4096, MIB)
    ]
    table = group_table(samples)
    assert list(table.header) == ["operation, members", "4 KiB", "1 MiB"]
    assert [list(row) for row in table.rows] == [["p2p, 2", "200 (2.0)", "200 (2.0)"]]


def test_words_are_to_the_left_and_figures_to_the_right():
    table = Table("Title", ("who", "tokens/s", "why"), [("one", "1", "late"), ("two", "1,000", "-")], words=["why"])
    assert table.text().splitlines()[1:] == ["who  tokens/s  why", "one         1  late", "two     1,000  -"]
    assert "| --- | --: | --- |" in table.markdown()


def test_a_table_as_text_and_as_markdown():
    table = Table("Title", ("who", "tokens/s"), [("one", "1"), ("another", "1,000")], ["A note.", "Another."])
    assert table.text().splitlines() == [
        "Title",
        "who      tokens/s",
        "one             1",
        "another     1,000",
        "A note.",
        "Another.",
    ]
    assert table.markdown().splitlines() == [
        "Title",
        "",
        "| who | tokens/s |",
        "| --- | --: |",
        "| one | 1 |",
        "| another | 1,000 |",
        "",
        "A note. Another.",
    ]


def test_findings_are_json_and_a_busy_machine_is_named():
    steps = EmptySteps([4.0, 5.0, 6.0], [20.0, 25.0, 30.0], [30.0, 35.0, 40.0], 66, 3.0)
    overhead = Overhead(steps, 270 * MIB, 220 * MIB)
    found = Findings(Machine(load=2.0), [heat()], overhead)
    assert json.loads(json.dumps(found.to_dict()))["heats"][0]["tracks"]["plain"]["launches"] == [5.0, 4.0, 6.0]
    assert "not to be published" in found.text()
    assert "| tasks | 25.00 | 20.00 | +303 |" in found.text(markdown=True)
    assert "| compiled | 5.00 | 4.00 | 76 |" in found.text(markdown=True)
    assert "a Ray actor holds 270 MiB, a plain process 220 MiB" in found.text(markdown=True)
    assert "not to be published" not in Findings(Machine(load=0.1)).text()


def test_a_table_says_how_calm_its_machine_was():
    tracks = {"plain": Track([1.0, 1.0], [0.001, 0.012], 3), "pair": Track([1.0, 1.0], [0.004, 0.002], 2)}
    text = Findings(Machine(), [Heat(PP, 2, 1, tracks)]).text()
    assert "Of 5 turns 1 were taken again: in them more than 2% of the cores' time" in text
    assert "it was 0.3% at the median and 1.2% at most." in text
    assert "turns" not in Findings(Machine()).text()


def test_the_block_of_a_page_is_replaced():
    page = "# Title\n<!-- bench -->\nold\n<!-- /bench -->\nend\n"
    written = write_block(page, "new \\1\n")
    assert written == "# Title\n<!-- bench -->\nnew \\1\n<!-- /bench -->\nend\n"
    for wrong in ("# Title\n", page + page):
        with pytest.raises(ValueError, match="<!-- bench -->"):
            write_block(wrong, "new")


# --- processes -------------------------------------------------------------------------------------------------------


def test_requests_are_served_a_line_each():
    answers = io.StringIO()
    serve(LocalTrainer(lambda number: number / 2), ['["train", 3, 2]\n', '["peak"]\n', '["waited"]\n'], answers)
    trained, peak, waited = map(json.loads, answers.getvalue().splitlines())
    assert trained["found"] == [1.5, 2.0]
    assert trained["seconds"] >= 0
    assert len(peak["found"]) == 1
    assert waited["found"] == {}


ECHO = "import sys\nfor line in sys.stdin: print(line.strip(), flush=True)"
CRASH = "import sys; sys.stdin.readline(); raise ValueError('here is why')"
SILENT = "import sys; sys.stdin.read()"


@pytest.fixture
def started(tmp_path):
    """A function that starts processes of so many lines of Python; they are ended after the test."""
    running = []

    def begin(*programs: str) -> Processes:
        running.append(Processes("child", [[sys.executable, "-c", program] for program in programs], tmp_path))
        return running[-1]

    yield begin
    for processes in running:
        processes.close()


def test_processes_are_asked_together(started):
    assert started(ECHO, ECHO).ask("train", 0, 2, seconds=30) == [["train", 0, 2]] * 2


def test_a_crash_is_told_at_once_with_its_log(started):
    with pytest.raises(ProcessError, match=r"child: process 1 ended with exit code 1(.|\n)*here is why"):
        started(SILENT, CRASH).ask("peak", seconds=30)


def test_silence_has_an_end(started):
    processes = started(ECHO, SILENT)
    with pytest.raises(ProcessError, match=r"child: process 1 gave no answer within 2 s"):
        processes.ask("peak", seconds=2)
    processes.kill()


def test_sharded_replicas_accumulate_in_microbatches_of_their_half():
    names = [f"raypar-zero-{level}" for level in (1, 2, 3)]
    peers = ["torch-fsdp", *(f"deepspeed-{level}" for level in (1, 2, 3))]
    everybody = ["plain", "pair-halves", *peers, *names, "raypar-zero-3-step"]
    for size in sizes_of(parse(["--size", "zero"])):
        assert [contestant.name for contestant in entered(size)] == everybody
        run = run_of(size, "replicas")
        assert (run.microbatches, run.micro_batch_size) == (size.accumulated, 8 // size.accumulated)
