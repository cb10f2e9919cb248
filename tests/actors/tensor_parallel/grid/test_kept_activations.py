"""What a block on a grid keeps for its backward, counted as in tests/actors/layers/test_kept_activations.py."""

from __future__ import annotations

import pytest
import torch

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.worker.build.parallelize import tensor_styles
from tests.support.kept_activations import (  # noqa: F401  (fixtures that hold for every test)
    ASSB,
    SBH,
    H,
    S,
    block,
    hooks_inside_count_too,
    kept,
    one_thread,
)
from tests.support.on_grid import groups_on
from tests.support.threads import in_threads


@pytest.mark.sampled
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(("grid", "parts"), [("2d:2x2", 4), ("2d:3x3", 9), ("3d:2x2x2", 8)])
def test_of_a_divided_block_each_member_keeps_its_part(grid, parts, dropout):
    """Of a square nothing more; of a cube the inputs of linear layers as they were gathered, which are 7 of the 16.

    Whole is which tokens are later, a byte each; and norms keep a number a token.
    """
    mesh, scores, masks = Mesh(tp=grid), 3 if dropout else 1, 2 if dropout else 0
    samples, heads = (3, 3) if grid == "2d:3x3" else (4, 4)

    def one(groups):
        styles = tensor_styles(mesh, groups, sequence=False)
        stage, *_ = block(styles=styles, dropout=dropout, heads=heads)
        x = torch.randn(samples // mesh.grid.batch_parts, S, H // mesh.grid.side)
        return kept(stage, x)

    sbh, assb = SBH * samples // 3, ASSB * samples * heads // 12
    wanted = (16 + masks) * sbh / parts + scores * assb / parts
    if grid == "3d:2x2x2":
        wanted += 7 * sbh / 4 - 7 * sbh / parts
    wanted += S * S / 4 + 2 * S * samples // mesh.grid.batch_parts
    for found in in_threads(groups_on(grid), one):
        assert found == pytest.approx(wanted, rel=0.01)


def test_selective_each_member_of_a_cube_keeps_its_part_of_everything():
    """Inputs of linear layers are gathered anew, and scores computed again."""

    def one(groups):
        styles = tensor_styles(Mesh(tp="3d:2x2x2"), groups, sequence=False)
        stage, *_ = block(styles=styles, recompute=("selective",))
        return kept(stage, torch.randn(1, S, H // 2))

    for found in in_threads(groups_on("3d:2x2x2"), one):
        assert found == pytest.approx(16 * SBH * 4 // 3 / 8 + 2 * S, rel=0.01)
