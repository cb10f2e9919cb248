"""The memory of actors by kind, formula beside measurement, and the same at every level of ZeRO on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

import raypar as rp
from raypar.actors.models.skeleton import Skeleton
from raypar.cli.main import run_command
from raypar.config.run import check_run
from raypar.planner import resource_needs as needs
from raypar.planner.prediction import from_flops
from raypar.planner.resource_needs import memory_faults
from raypar.planner.sizes.sized_run import SizedRun
from raypar.planner.traffic import step_traffic
from raypar.reporting.tables.memory_table import memory_table
from tests.support.team import Team


def tiny(**changes):
    model = rp.GPT(layers=4, hidden=16, heads=2, seq=8, vocab=64)
    return rp.Run(model=model, data=rp.Batches(batch), microbatches=2, steps=2, **changes)


def batch(step, microbatch, dp):
    import torch

    tokens = (torch.arange(18).view(2, 9) * (step + microbatch + dp + 1)) % 64
    return tokens[:, :-1], tokens[:, 1:]


def table_of(team):
    held = [actor.held() for actor in team.all]
    skeleton = Skeleton(team.run.model, team.run.seed)
    return memory_table(team.run, team.programs["train"], skeleton, held)


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"pp": 2, "dp": 2}, {"tp": 2, "dp": 2}, {"dp": 4, "shard": 2}, {"cp": 2}])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_formulas_and_measurements_agree_for_a_gpt(mesh, zero):
    mesh = {name: count for name, count in mesh.items() if zero or name != "shard"}
    team = Team.of(tiny(mesh=rp.Mesh(**mesh), zero=zero))
    before = table_of(team)
    assert (
        before["pp=0 " + " ".join(f"{axis}=0" for axis in ("dp", "cp", "tp") if axis in mesh)]["peak"].measured is None
    )
    team.step(0)
    for figures in table_of(team).values():
        for kind in ("weights", "gradients", "optimizer", "gathered"):
            if kind in figures:
                assert figures[kind].measured == pytest.approx(figures[kind].formula, rel=0.1), kind
        if "buckets" in figures:
            assert figures["buckets"].measured <= figures["buckets"].formula
        assert ("gathered" in figures, "buckets" in figures) == (zero == 3, zero > 1)


def test_the_sums_of_all_parts_are_exact():
    team = Team.of(tiny(mesh=rp.Mesh(dp=2), zero=3))
    team.step(0)
    whole = 4 * sum(weight.numel() for weight in Skeleton(team.run.model, 0).weights.values())
    table = table_of(team)
    assert sum(figures["weights"].measured for figures in table.values()) == whole
    assert sum(figures["gradients"].measured for figures in table.values()) == whole


def test_it_is_shown_as_a_table():
    team = Team.of(tiny(mesh=rp.Mesh(dp=2), zero=3))
    team.step(0)
    head, first, second = repr(table_of(team)).splitlines()
    kinds = "weights gradients optimizer gathered buckets activations, working process peak"
    assert head.split() == ["formula", "/", "measured", *kinds.split()]
    assert first.startswith("pp=0 dp=0")
    assert second.startswith("pp=0 dp=1")
    page = table_of(team)._repr_html_()
    assert "<th" in page
    assert page.count("<tr>") == 3
    assert " / " in page


@pytest.mark.parametrize("zero", [0, 3])
def test_an_evaluation_takes_nothing_away(zero):
    team = Team.of(replace(tiny(mesh=rp.Mesh(dp=2), zero=zero), data=rp.Batches(batch, batch)))
    team.step(0, "evaluate")
    assert table_of(team)["pp=0 dp=0"]["peak"].measured is None
    team.step(0)
    before = table_of(team)
    team.step(0, "evaluate")
    for actor, figures in table_of(team).items():
        for kind, figure in figures.items():
            assert (figure.measured or 0) == pytest.approx(before[actor][kind].measured or 0, rel=0.01), kind


VOTE = 2 * 24  # bytes of the vote that opens a STEP, which is no gradient; a ring sends it nearly twice


def sent_by(team):
    """What an actor of each pipeline rank sends of weights and gradients in a step, on average: bytes by (axis, op)."""

    def total():
        found = [{} for _ in range(team.world.mesh.pp)]
        for axis in ("dp", "shard", "replicate"):
            for rank, table in enumerate(team.ledger(axis)):
                for op, (_, count) in table.items():
                    key = axis, op
                    found[team.world.pp(rank)][key] = found[team.world.pp(rank)].get(key, 0) + count
        return found

    before = total()
    team.step(0)
    actors = team.world.size // team.world.mesh.pp
    return [
        {key: (count - first.get(key, 0)) / actors for key, count in then.items() if count - first.get(key, 0) > 1000}
        for first, then in zip(before, total(), strict=True)
    ]


LEVELS = [{"zero": 0}, {"zero": 1}, {"zero": 2}, {"zero": 3}, {"zero": 3, "zero_gather": "step", "zero_reduce": "step"}]


def demand_as_planned(run):
    schedule = check_run(run)["train"]
    expected = step_traffic(SizedRun.of(run, schedule))
    measured = max(sent_by(Team.of(run)), key=lambda sent: sum(sent.values()))
    assert measured.keys() == expected.keys(), "votes and norms are small"
    for key, count in expected.items():
        assert -schedule.num_stages <= measured[key] - count <= VOTE, (key, count, measured[key])


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("changes", LEVELS)
@pytest.mark.parametrize("mesh", [{"dp": 2}, {"dp": 3}, {"dp": 4, "shard": 2}, {"pp": 2, "dp": 2}, {"cp": 2}])
def test_what_is_sent_is_what_the_ledger_counts(mesh, changes):
    if "shard" in mesh and not changes["zero"]:
        mesh = {"dp": 4}
    demand_as_planned(tiny(mesh=rp.Mesh(**mesh), **changes))


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [
        {"mesh": rp.Mesh(dp=2, tp=2), "zero": 3},
        {"mesh": rp.Mesh(dp=2), "bucket_mb": 0.002},
        {"mesh": rp.Mesh(dp=2), "zero": 3, "tile": 2},
        {"mesh": rp.Mesh(pp=2, dp=2), "schedule": "interleaved", "zero": 2},
    ],
)
def test_neither_tensor_ranks_nor_buckets_tiles_or_chunks_make_a_plan_wrong(changes):
    demand_as_planned(tiny(**changes))


def test_without_replicas_no_gradient_is_sent():
    run = tiny(mesh=rp.Mesh(tp=2))
    schedule = check_run(run)["train"]
    assert step_traffic(SizedRun.of(run, schedule)) == {}
    assert sent_by(Team.of(run)) == [{}]


def test_plan_compares_the_levels(capsys):
    words = ["--mesh.pp", "1", "--mesh.dp", "2", "--zero", "3", "--zero-gather", "step"]
    assert run_command(["plan", "gpt-small", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    width = len("sent a step, dp all_reduce")
    rows = {line[:width].strip(): line[width:].split() for line in lines[2:]}
    assert lines[0] == "actors: 2 = dp 2"
    assert lines[2].split() == ["this", "run", *(word for level in range(4) for word in ("zero", str(level)))]
    assert rows["weights"] == ["12", "MiB", *["25", "MiB"] * 3, "12", "MiB"]
    assert rows["sent a step, dp all_reduce"][:3] == ["-", "25", "MiB"]
    assert "gathered" in rows


def test_plan_says_mistakes_and_needs_no_replicas(capsys):
    assert run_command(["plan", "gpt-tiny"]) == 0
    assert "zero 1" not in capsys.readouterr().out
    assert run_command(["plan", "gpt-tiny", "--zero", "2"]) == 2
    assert "zero is 2" in capsys.readouterr().err
    assert run_command(["plan", "gpt-tiny", "--mesh.dp", "2", "--data-parallel", "parameter_server"]) == 0
    assert "server of pp=0 optimizer" in capsys.readouterr().out


def test_a_model_that_is_more_than_the_machine_has_is_refused(monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("raypar.planner.resource_needs.total_memory", lambda: 150 << 20)
    run = rp.recipe("gpt-small", mesh=rp.Mesh(dp=2), zero=0)
    faults = list(memory_faults(run, check_run(run)["train"]))
    assert len(faults) == 1
    assert "take 199 MiB, and this machine has 150 MiB: set zero to 3" in faults[0]
    whole = replace(run, zero=3)
    assert not list(memory_faults(whole, check_run(whole)["train"]))
    with pytest.raises(rp.ConfigError, match="set zero to 3"):
        rp.launch(run)
    assert run_command(["train", "gpt-small", "--mesh.dp", "4", "--mesh.pp", "1", "--zero", "0", "--dry-run"]) == 2
    assert "this machine has 150 MiB" in capsys.readouterr().err
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert not list(memory_faults(run, check_run(run)["train"]))


def test_what_is_offloaded_counts_where_it_is(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("raypar.planner.resource_needs.total_memory", lambda: 110 << 20)
    for offload, room, says in (
        ({"offload": "optimizer"}, None, "take 124 MiB, and this machine has 110 MiB: set offload_folder to a folder"),
        ({"offload": "optimizer", "offload_folder": str(tmp_path)}, 100 << 20, None),
        (
            {"offload": "parameters", "offload_folder": str(tmp_path)},
            90 << 20,
            f"offload_folder {str(tmp_path)!r}: what all 2 actors offload takes 99 MiB, and its disk has 90 MiB "
            "free: free some space, or give a folder of another disk",
        ),
    ):
        monkeypatch.setattr("raypar.planner.resource_needs.free_disk", lambda folder, room=room: room)
        run = rp.recipe("gpt-small", mesh=rp.Mesh(pp=2, dp=1), **offload)
        faults = list(memory_faults(run, check_run(run)["train"]))
        assert [says in fault for fault in faults] == [True] * (says is not None), faults
    assert not list(memory_faults(run, check_run(run)["train"], replaces=True)), "the disk may have room again"
    with pytest.raises(rp.ConfigError, match="what all 2 actors offload takes"):
        rp.launch(run)
    words = ["--mesh.pp", "2", "--mesh.dp", "1", "--offload", "parameters", "--offload-folder", str(tmp_path)]
    assert run_command(["train", "gpt-small", *words, "--dry-run"]) == 2
    assert "its disk has 90 MiB free" in capsys.readouterr().err
    assert needs_of(run)["memory in all"] != needs_of(replace(run, offload_folder=None))["memory in all"]


def test_checkpoints_are_counted_from_the_step_that_a_run_goes_on_after(tmp_path):
    run = rp.Run(steps=10, save_every=4, folder=str(tmp_path))
    reported = [needs_of(run, step)["checkpoints"].split(" of about")[0].split(": ")[1] for step in (0, 3, 4)]
    assert reported == ["3", "3", "2"], "after 4, 8 and 10; those of the run before may be in another folder"
    assert ": 1; " in needs_of(run, 9)["checkpoints"]


def needs_of(run, step=0):
    sized = SizedRun.of(run, check_run(run)["train"])
    return dict(needs.memory_needs(sized, None, from_flops(sized), step))
