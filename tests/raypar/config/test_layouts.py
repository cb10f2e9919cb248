"""Layouts by name: what they stand for, in Python, in files and on the command line."""

from __future__ import annotations

import pytest

import raypar as rp
from raypar.cli.main import run_command
from raypar.config.toml import load_run


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("ep2_dp2", {"mesh": rp.Mesh(dp=4, ep=2)}),
        ("ep2_tp2_dp2", {"mesh": rp.Mesh(dp=2, tp=2, ep=2)}),
        ("ep2_dp2_zero3", {"mesh": rp.Mesh(dp=4, ep=2), "zero": 3}),
        ("ep4", {"mesh": rp.Mesh(dp=4, ep=4)}),
        ("dp2_experts2", {"mesh": rp.Mesh(dp=2, expert_actors=2)}),
        ("tp2_dp2_experts4_pp2", {"mesh": rp.Mesh(pp=2, dp=2, tp=2, expert_actors=4)}),
        ("zero0_dp2_ep4_etp2_tp2_cp2_pp3", {"mesh": rp.Mesh(pp=3, dp=4, cp=2, tp=2, ep=4, etp=2), "zero": 0}),
    ],
)
def test_a_name_stands_for_a_mesh(name, fields):
    assert rp.layout(name) == fields
    run = rp.recipe("moe-tiny", layout=name, steps=3)
    assert (run.mesh, run.zero, run.steps) == (fields["mesh"], fields.get("zero"), 3)
    assert not [fault for fault in rp.faults(run) if "ep" in fault]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "ep2_xx2",
            ["layout 'ep2_xx2' has 'xx2': known are ep2_dp2, ep2_tp2_dp2, ep2_dp2_zero3, ep4, dp2"],
        ),
        ("", ["layout '' has ''"]),
        ("ep2_experts2", ["has ep and experts: experts are on actors of their own or on ranks, use one"]),
        ("ep2_ep4_dp0_zero4", ["has ep 2 times: leave one out", "has dp0: use 1 at least", "has zero4: use 0 to 3"]),
        ("ep2_tp3_dp2", ["has 4 actors a stage (ep 2 x dp 2), which tp x cp = 3 does not divide: use dp6"]),
    ],
)
def test_a_name_without_a_meaning_is_told_with_all_its_faults(name, told):
    with pytest.raises(rp.ConfigError) as error:
        rp.layout(name)
    assert len(error.value.faults) == len(told)
    assert all(text in fault for text, fault in zip(told, error.value.faults, strict=True))


def test_files_and_flags_know_layouts(tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text('recipe = "moe-tiny"\nlayout = "ep2_dp2_zero3"\nsteps = 3\n')
    run = load_run(path)
    assert (run.mesh, run.zero, run.steps) == (rp.Mesh(dp=4, ep=2), 3, 3)
    path.write_text('recipe = "moe-tiny"\nlayout = "ep2-dp2"\nstep = 3\n')
    with pytest.raises(rp.ConfigError, match=r"(?s)layout 'ep2-dp2' has.*step is not a field"):
        load_run(path)
    assert run_command(["plan", "moe-tiny", "--layout", "ep2_dp2", "--mesh.pp", "2"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("actors: 8 = pp 2 x dp 4; experts in 2 parts\n\nactor         experts  exchange tokens")
    assert run_command(["plan", "moe-tiny", "--layout", "ep2_dp", "--steps", "x"]) == 2
    said = capsys.readouterr().err
    assert "2 mistakes" in said
    assert "layout 'ep2_dp' has 'dp'" in said
