"""What set the sizes of a run's mesh that no flag sets, and whether this machine has room for its actors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from raypar.actors.machine.this_machine import actor_count_faults
from raypar.actors.mesh.mesh import AXES
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.cli.words.parsing import values_of
from raypar.cli.words.run_args import RunArgs
from raypar.config.recipe_tables import RECIPES
from raypar.config.toml import read_table
from raypar.errors import ConfigError
from raypar.paths import RUN, holds_run
from raypar.planner.resource_needs import actor_factors


def mesh_origins(args: RunArgs, words: Sequence[str]) -> dict[str, str]:
    """Return, by axis of the mesh that no flag of its own set, what made it more than 1: a recipe, file and so on.

    Args:
        args: The flags of a command.
        words: The words that they were parsed from.
    """
    base, table = Path(args.base), dict[str, Any]()
    if args.layout:
        origin = f"layout {args.layout}"
    elif args.base in RECIPES:
        origin = f"recipe {args.base}"
    elif base.suffix == ".toml" or holds_run(base):
        origin = f"file {base.name}" if base.suffix == ".toml" else f"run {base.name}"
        try:
            table = read_table(base if base.suffix == ".toml" else base / RUN)
        except ConfigError:  # another fault says so
            return {}
    else:
        origin = f"checkpoint {base.name}"
    further = [f"{kind} {table[kind]}" for kind in ("layout", "recipe") if kind in table]
    of_file = table.get("mesh", {})
    return {
        axis: origin if not further or axis in of_file or args.layout else further[0]
        for axis in AXES
        if args.mesh.ways(axis) > 1 and not any(values_of(f"--mesh.{axis}", words))
    }


def too_many_actors(run: Run, origins: Mapping[str, str], spares: int = 0) -> Iterator[str]:
    """Yield a fault if a launch would start a Ray of our own that has too few CPUs for the actors of a run.

    Args:
        run: The run.
        origins: By axis of the mesh, what set it if that was not the user.
        spares: Actors beside those of the mesh.
    """
    factors = actor_factors(run, origins)
    extra = f" + {spares} spares" if spares else ""
    yield from actor_count_faults(world_of(run).size + spares, run.resources.cpus, f"{factors or 1}{extra}")
