"""Try whether a loss takes derivatives by what another stage has made, whose graph it has not. Imports torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from raypar.actors.errors import first_line
from raypar.actors.models.base import Model
from raypar.actors.models.skip_connections import Skipped
from raypar.actors.tensors import Values, as_values

OUTSIDE_THE_GRAPH = r"not have been used in the graph|does not require grad and does not have a grad_fn"


def graph_faults(model: Model, parts: Sequence[range], inputs: Values, target: Values) -> list[str]:
    """Return why the loss can't be computed where each stage has a graph of its own; [] if it can.

    Args:
        model: The model, without weights.
        parts: The layers of each stage.
        inputs: The inputs of a microbatch, without memory.
        target: Its targets, without memory.
    """
    try:
        _compute(model, [range(len(model.names))], inputs, target)
    except Exception:  # not for the stages
        return []
    try:
        _compute(model, parts, inputs, target)
    except RuntimeError as error:
        says = "takes a derivative by what a layer of another stage has made, which has no graph there"
        fix = "take it in one layer, which returns the result, or give these layers to one stage with split"
        return [f"model.loss, or a layer, {says} ({first_line(error)}): {fix}"]
    except Exception:
        return []
    return []


def _compute(model: Model, parts: Sequence[range], inputs: Values, target: Values) -> None:
    """Compute the loss, and begin a new graph with every stage but the first."""
    values, skipped = inputs, Skipped(model.skips, model.names)
    with torch.enable_grad():
        for part in parts:
            if part.start:
                values = tuple(value.detach().requires_grad_(value.is_floating_point()) for value in values)
            for index in part:
                values = as_values(model.skeleton[index](*skipped.inputs(index, values)))
                skipped.keep(index, values)
        model.loss(values, target)
