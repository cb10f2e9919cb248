"""``raypar plan``: what a run takes at each level of ZeRO: memory by kind and actor, and bytes sent."""

from __future__ import annotations

import os
from dataclasses import replace

from raypar.actors.mesh.world import Zero
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.config.run import check_run
from raypar.errors import ConfigError
from raypar.planner.assumed_rates import rates_of
from raypar.planner.memory.all_actors import actors_memory
from raypar.planner.prediction import IN_SLOTS, before_run
from raypar.planner.resource_needs import Rows, actors_text, kinds_of
from raypar.planner.sizes.sized_run import SizedRun
from raypar.planner.traffic import initial_seconds, step_traffic
from raypar.reporting.tables.expert_table import expert_table
from raypar.schedules.action import Op
from raypar.schedules.drawing.cells import lines_in_width
from raypar.schedules.formatting import aligned, milliseconds, size

_LEVELS: tuple[Zero, ...] = (0, 1, 2, 3)
_OF_LEVEL_3 = ("zero_units", "zero_gather", "zero_resident", "reshard_after_forward")


def zero_levels_table(run: Run) -> str:
    """Compare a run with the same run at the other levels of ZeRO.

    Args:
        run: The run.

    Returns:
        A table: a column for the run, and one for each level if there are replicas to share with.

    Raises:
        ConfigError: The run has faults.
    """
    columns = {"this run": dict(_column(run))}
    world = world_of(run)
    if world.mesh.shards > 1 and not world.servers:
        columns |= {f"zero {level}": dict(_column(_at_level(run, level))) for level in _LEVELS}
    names = dict.fromkeys(name for column in reversed(columns.values()) for name in column)  # level 3 has most kinds
    rows = [list(columns), *([column.get(name, "-") for column in columns.values()] for name in names)]
    table = expert_table(run)
    drawn = [table, ""] if table else []
    return "\n".join([f"actors: {actors_text(run)}", "", *drawn, *lines_in_width(["", *names], aligned(rows, ">"))])


def placed(run: Run) -> str:
    """Say which actor would go on which node of the cluster at RAY_ADDRESS, and why it can't."""
    from raypar.cluster.lifecycle.ray_cluster import (  # imports torch and Ray, which a plan on paper does not
        connected,
        foreseen,
    )

    where = f"on the cluster at {os.environ.get('RAY_ADDRESS', '')}"
    try:
        with connected() as nodes:
            found = foreseen(world_of(run), nodes, run.device, run.resources, run.shared_gpu)
    except ConfigError as error:
        found = error.faults
    return "\n".join([f"{where}:", *(f"  {line}" for line in found)])


def _at_level(run: Run, level: Zero) -> Run:
    """Return the run at a level of ZeRO; what only level 3 has is left out of the others."""
    usual = {} if level == 3 or run.zero != 3 else {name: getattr(Run(), name) for name in _OF_LEVEL_3}
    return replace(run, zero=level, mesh=replace(run.mesh, shard=run.mesh.shard if level else None), **usual)


def _column(run: Run) -> Rows:
    """Return the memory of each pipeline rank by kind, and the bytes that an actor sends, by names."""
    sized = SizedRun.of(run, check_run(run)["train"])
    prediction = before_run(sized)
    found = actors_memory(sized, prediction.timeline, prediction.process)
    each = [(f"pp={rank}" if len(found.workers) > 1 else "", memory) for rank, memory in enumerate(found.workers)]
    other = "server" if sized.world.servers else "experts"
    each += [(f"{other} of pp={rank}", memory) for rank, memory in enumerate(found.others)]
    rows = []
    for actor, memory in each:
        figures = kinds_of(memory) | {"peak": size(memory.peak)}
        rows += [(f"{actor} {kind}".strip(), figure) for kind, figure in figures.items()]
    seconds = {"gathers": prediction.most(Op.UNSHARD), "reductions": prediction.most(Op.REDUCE_GRAD)}
    seconds["initial values"] = initial_seconds(sized, rates_of(run).bytes)
    seconds["step"] = prediction.step if prediction.source != IN_SLOTS else 0.0
    rows += [(f"{name}, predicted", milliseconds(one)) for name, one in seconds.items() if one]
    for (axis, op), sent in step_traffic(sized).items():
        rows.append((f"sent a step, {axis} {op}", size(sent)))
    return rows
