"""Layouts, modes and data of data parallelism, and the comparison of a team with one plain process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from raypar.actors.specs.results import losses_of, mean_loss
from tests.support.plain import trained
from tests.support.team import batch

MODES = {
    "all_reduce": {"zero": 0},
    "zero": {"zero": 1},
    "zero 2": {"zero": 2},
    "zero 3": {"zero": 3},
    "parameter_server": {"data_parallel": "parameter_server"},
}
SHARED = {"zero 2", "zero 3"}  # modes that need replicas, and send their gradients in other ways
LAYOUTS = [(2, 1), (3, 1), (4, 1), (2, 2), (2, 3), (3, 2)]
CLOSE = 1e-6


def labels(counts):
    """Inputs and classes; of microbatch g of a step ``counts[g % len(counts)]`` of 6 rows count."""

    def data(step, microbatch, dp):
        x, _ = batch(step, microbatch, dp)
        x = x.repeat(2, 1)
        y = x.argmax(1)
        y[counts[(step + 3 * microbatch + dp) % len(counts)] :] = -100
        return x, y

    return data


def classes(output, target):
    """Mean cross-entropy over the rows that count, 0 if none does."""
    counted = int((target != -100).sum())
    return nn.functional.cross_entropy(output, target, reduction="mean" if counted else "sum")


UNEQUAL = {"data": labels((6, 2, 5, 0, 1)), "loss": classes}


def agrees(team, bound=CLOSE):
    """Train the team and one plain process, and compare every loss, norm, first gradient and weight."""
    plain = trained(team.run)
    first = {}
    for number in range(team.run.steps):
        results = team.step(number)
        losses, counts = losses_of(results)
        assert mean_loss(losses, counts) == pytest.approx(plain.losses[number], rel=bound, abs=0)
        (norm,) = {result.grad_norm for result in results} - {None}
        assert norm == pytest.approx(plain.grad_norms[number], rel=bound, abs=0)
        first = first or team.gradients()
    noise = 1e-9 * plain.grad_norms[0]  # what rounding leaves of a gradient that is zero, on some CPUs
    for kind, ours, theirs in (("gradient", first, plain.gradients), ("weight", team.weights(), plain.weights)):
        assert theirs.keys() <= ours.keys()
        for name, wanted in theirs.items():
            if wanted is None:
                assert ours[name] is None, f"{kind} {name}"
            else:
                error, norm = (float(torch.linalg.vector_norm(one)) for one in (ours[name] - wanted, wanted))
                assert error <= bound * norm + noise, f"{kind} {name}"
    for dp in range(1, team.run.mesh.dp):
        ours, theirs = team.weights(0), team.weights(dp)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours | theirs), "replicas drifted apart"
    return plain


def shared(pattern):
    """Layers by letter; the same letter is the same module."""

    def layers():
        modules = {letter: nn.Linear(4, 4) for letter in sorted(set(pattern))}
        return [modules[letter] for letter in pattern]

    return layers
