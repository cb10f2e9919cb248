"""The command ``raypar recipes``: the named runs to start from, with their sizes."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.actors.specs.model import Transformer
from raypar.cli.words.flags import HELP
from raypar.config.recipe_tables import RECIPES
from raypar.config.recipes import recipe
from raypar.errors import ConfigError
from raypar.planner.resource_needs import actors_text
from raypar.planner.sizes.parameters import num_parameters
from raypar.schedules.drawing.cells import lines_with_texts
from raypar.schedules.formatting import short_count, text_table


def recipes(words: Sequence[str]) -> str:
    """Run ``raypar recipes``: a line for each, with name, parameters, shape, actors, steps, tokens and purpose.

    Args:
        words: The words after ``recipes``: none, or a flag for help.

    Raises:
        ConfigError: There are words.
    """
    if words and not HELP & set(words):
        raise ConfigError([f"recipes takes no {words[0]!r}: raypar train RECIPE --dry-run says more of one"])
    rows = [["recipe", "parameters", "layers x hidden", "tokens a step", "steps", "actors"]]
    for name in RECIPES:
        run = recipe(name)
        model = run.model
        assert isinstance(model, Transformer)
        tokens = run.mesh.dp * run.microbatches * run.micro_batch_size * model.seq
        count = short_count(num_parameters(model))
        shape = f"{model.layers} x {model.hidden}"
        rows.append([name, count, shape, f"{tokens:,}", f"{run.steps:,}", actors_text(run)])
    table = lines_with_texts(text_table(rows), ["", *RECIPES.values()])
    return "\n".join([*table, "", "raypar train RECIPE --dry-run says what a run needs; flags change any of it"])
