"""Drawings of who holds which experts: those of the four layouts of docs/experts.md, held against the page."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import raypar as rp
from raypar.config.expert_layout_names import LAYOUTS
from tests.support.team import Team

PAGE = (Path(__file__).parents[4] / "docs/experts.md").read_text()


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_page_has_the_layouts_as_they_are_drawn(name):
    drawn = rp.expert_table(rp.recipe("moe-small", layout=name))
    assert f"`{name}` is " in PAGE
    assert f"```text\n{drawn}\n```" in PAGE.split(f"`{name}` is ")[1]


@pytest.mark.parametrize("name", ["ep2_tp2_dp2", "ep4", "ep2_etp2_tp2_dp1_cp2", "dp2_experts2"])
def test_actors_have_what_is_drawn(name):
    run = rp.recipe("moe-tiny", layout=name, microbatches=2)
    run = replace(run, model=replace(run.model, layers=1))
    team = Team.of(run)
    lines = rp.expert_table(run).splitlines()[1:]
    for worker, line in zip(team.workers, lines, strict=False):
        first, _, last = line.split("=")[-1].split()[1].partition("-")
        held = {*range(int(first), int(last or first) + 1)} if first else set()
        names = (one.split(".") for one in worker.holds() if ".experts." in one)
        assert {int(parts[4]) for parts in names} == held
        assert ("(" in line.split("{")[0]) == (run.mesh.expert_ranks > 1)


def test_experts_in_another_order_are_drawn_by_their_numbers():
    run = rp.recipe("moe-tiny", layout="ep2_dp2", expert_order={"blocks.3.mlp.experts": "3 1 2 0"})
    lines = rp.expert_table(run).splitlines()
    assert lines[0].split("  ")[:1] == ["actor"]
    assert "experts of 0 1 2 4 5 6 7  experts of 3  exchange tokens" in lines[0]
    assert [line.split()[2:4] for line in lines[1:3]] == [["dp=0", "0-1"], ["dp=1", "2-3"]]
    assert ["3 1" in lines[1], "2 0" in lines[2]] == [True, True]


def test_layers_of_several_sizes_parts_of_experts_and_more_actors_than_fit():
    run = rp.recipe("moe-small", layout="ep2_etp2_tp2_dp6_pp2")
    mixed = replace(run, model=replace(run.model, moe=rp.MoE(experts=(2, 4, 4, 8) * 2)))
    lines = rp.expert_table(mixed).splitlines()
    assert "  2 experts  4 experts  8 experts  exchange tokens" in lines[0]
    assert "1 (2/2)    2-3 (2/2)  4-7 (2/2)  {1, 3}" in lines[4]
    assert lines[17:19] == ["... and 8 more", "so on each of 2 pipeline ranks, with 24 actors each"]
    assert rp.expert_table(rp.recipe("moe-small")) == ""


def test_the_page_has_expert_actors_as_they_are_drawn():
    drawn = rp.expert_table(rp.recipe("moe-small", mesh=rp.Mesh(dp=2, expert_actors=2)))
    assert f"```text\n{drawn}\n```" in PAGE.split("## Experts on actors of their own")[1]
    many = rp.expert_table(rp.recipe("moe-small", mesh=rp.Mesh(pp=2, tp=2, expert_actors=4))).splitlines()
    assert many[1:5:3] == [
        "0: pp=0 tp=0      -        {0, 1, 4, 5, 6, 7}  -            {0}",
        "5: pp=0 expert=1  2-3      {0, 1, 4, 5, 6, 7}  {5}          -",
    ]
    assert many[-1] == "so on each of 2 pipeline ranks, with 6 actors each"
