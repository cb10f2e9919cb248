"""Plans of tensor parallelism that leave an actor shapes that do not fit are reported before any actor starts."""

import pytest
import torch
from torch import nn

import raypar as rp


def batch(step, microbatch, dp):
    return torch.randn(3, 4), torch.randn(3, 2)


def layers():
    return [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)]


def faults(plan):
    model = rp.Layers(layers, nn.functional.mse_loss, plan=plan)
    return rp.faults(rp.Run(model=model, data=rp.Batches(batch), mesh=rp.Mesh(tp=2), microbatches=2))


FIX = "make the linear layer that takes them 'row' in the plan, or this one 'column_gather_output'"


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            {"layers.0": "column"},
            "layers.0 is 'column', so with mesh.tp 2 an actor makes 4 of its 8 outputs, which layers.2",
        ),
        (
            {"layers.2": "column"},
            "layers.2 is 'column', so with mesh.tp 2 an actor makes 1 of its 2 outputs, and the loss",
        ),
        ({"layers.[02]": "column"}, None),
        (
            {"layers.0": "split0 from R to S-1"},
            "layers.0 is 'split0 from R to S-1', so with mesh.tp 2 an actor makes 4 of its 8 outputs, which layers.2",
        ),
    ],
)
def test_a_column_without_a_row_is_told_with_its_fix(plan, says):
    found = faults(plan)
    assert len(found) == 1
    if says is not None:
        assert found[0].startswith(f"model.plan: {says}") and found[0].endswith(FIX)


@pytest.mark.parametrize(
    "plan",
    [
        {"layers.0": "column", "layers.2": "row"},
        {"layers.[02]": "column_gather_output"},
        {"layers.0": "column_gather_output"},
        {"layers.0": "column", "layers.2": "column from S-1 to R"},
        {"layers.0": "column to S0", "layers.2": "split0 to R"},
        {"layers.0": "column", "layers.1": "replicated from S-1", "layers.2": "row from R"},
    ],
)
def test_a_plan_that_fits_is_no_fault(plan):
    assert not faults(plan)


@pytest.mark.parametrize(("classes", "tp", "held"), [(3, 2, "2 of its 3"), (5, 2, "3 of its 5"), (5, 3, "2 of its 5")])
@pytest.mark.parametrize("wide", [8, 7])
def test_uneven_parts_of_the_last_layer_are_told_as_even_ones_are(classes, tp, held, wide):
    def classifier():
        return [nn.Linear(4, wide), nn.Tanh(), nn.Linear(wide, classes)]

    def labels(step, microbatch, dp):
        return torch.randn(3, 4), torch.zeros(3, dtype=torch.long)

    def reported(plan):
        model = rp.Layers(classifier, nn.functional.cross_entropy, plan=plan)
        return rp.faults(rp.Run(model=model, data=rp.Batches(labels), mesh=rp.Mesh(tp=tp), microbatches=2))

    (found,) = reported({"layers.2": "column"})
    assert f"an actor makes {held} outputs, and the loss needs all" in found
    fits = wide % tp == 0
    assert found.endswith("this one 'row_split_input'" if fits else "or leave it out of the plan")
    assert not reported({"layers.2": "row_split_input"}) or not fits
    assert not reported({"layers.0": "column", "layers.2": "row"}), "uneven parts may be what a row takes"
