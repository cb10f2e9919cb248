"""The command ``raypar recipes``: the named runs to start from, with their sizes."""

from __future__ import annotations

import inspect
import re

from raypar.actors.specs.model import Transformer
from raypar.config.recipes import RECIPES
from raypar.planner.resource_needs import actors_text
from raypar.planner.sizes.parameters import num_parameters
from raypar.schedules.formatting import short_count, text_table


def recipes() -> str:
    """Return a line for each recipe: name, parameters, shape, actors, steps and tokens, then what it is for."""
    rows = [["recipe", "parameters", "layers x hidden", "tokens a step", "steps", "actors", ""]]
    for name, make in RECIPES.items():
        run, model = make(), make().model
        assert isinstance(model, Transformer)
        tokens = run.mesh.dp * run.microbatches * run.micro_batch_size * model.seq
        purpose = re.split(r"[:.,]( |$)| \(", inspect.getdoc(make) or "")[0].removeprefix("Return ")
        count = short_count(num_parameters(model))
        shape = f"{model.layers} x {model.hidden}"
        rows.append([name, count, shape, f"{tokens:,}", f"{run.steps:,}", actors_text(run), purpose])
    return "\n".join(
        [*text_table(rows), "", "raypar train RECIPE --dry-run says what a run needs; flags change any of it"]
    )
