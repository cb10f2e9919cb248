"""Teams whose layers are divided over tp, and their comparison with one plain process."""

from __future__ import annotations

import pytest
import torch

from raypar.actors.specs.model import GPT
from raypar.actors.specs.results import losses_of, mean_loss
from tests.support.plain import trained

TINY = GPT(layers=3, hidden=16, heads=4, seq=6, vocab=11)
GRADIENT, LOSS = 2e-5, 1e-5  # the bounds of raypar verify


def tokens(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp)
    ids = torch.randint(11, (2, 7), generator=generator)
    labels = ids[:, 1:].clone()
    labels[0, : microbatch % 3] = -100
    return ids[:, :-1], labels


def longer(step, microbatch, dp):
    """Sequences that four members can divide."""
    ids, labels = tokens(step, microbatch, dp)
    return torch.cat([ids, ids[:, :2]], 1), torch.cat([labels, labels[:, :2]], 1)


def error(found, wanted):
    return float((found - wanted).norm()) / (float(wanted.norm()) or 1.0)


def agrees(team):
    """Train the team and one plain process, and compare every loss, norm and first gradient."""
    plain, first = trained(team.run), {}
    for number in range(team.run.steps):
        results = team.step(number)
        assert mean_loss(*losses_of(results)) == pytest.approx(plain.losses[number], rel=LOSS, abs=0)
        (norm,) = {result.grad_norm for result in results[: team.world.mesh.size] if result.grad_norm is not None} or {
            result.grad_norm for result in results[team.world.mesh.size :]
        }
        assert norm == pytest.approx(plain.grad_norms[number], rel=LOSS, abs=0)
        first = first or team.gradients()
    for name, wanted in plain.gradients.items():
        assert first[name].shape == wanted.shape
        assert error(first[name], wanted) <= GRADIENT, name
    weights = team.weights()
    for name, weight in plain.weights.items():
        assert error(weights[name], weight) <= 1e-3, name
    replicated_alike(team)


def replicated_alike(team):
    """What every member of a tensor group has, weights and gradients, has the same bits on all of them."""
    for rank in range(0, team.world.mesh.size, team.run.mesh.tensor_ranks):
        first, *others = [team.all[one] for one in team.world.tensor_group(rank)]
        for name, cut in first.holds().items():
            if cut.is_whole:
                for other in others:
                    assert torch.equal(first.parameter(name), other.parameter(name)), name
                    mine, theirs = first.gradient(name), other.gradient(name)
                    assert (mine is None and theirs is None) or torch.equal(mine, theirs), name
