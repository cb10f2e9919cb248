"""Memory of the keys and values that attention keeps while a text is generated."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.actors.models.partition import split_layers, transformer_costs
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run
from raypar.planner.memory.activations import ELEMENT_BYTES
from raypar.schedules.schedule import Schedule


def cache_bytes(run: Run, model: Transformer, schedule: Schedule, rows: Sequence[tuple[int, int]]) -> list[int]:
    """Return the bytes of the caches of an actor of each pipeline rank: linear in sequences and in positions.

    An actor keeps 2 x blocks x heads x width of a head x positions x bytes of an element for each sequence. Its heads
    are those of keys and values, divided by the tensor-parallel ranks where these divide them, else one.

    Args:
        run: The run.
        model: Its model.
        schedule: The lowered schedule of a step.
        rows: Of each group of sequences of a replica, their number and the positions of each.
    """
    tp, heads = run.mesh.tensor_ranks, model.num_kv_heads
    own = heads // tp if heads % tp == 0 else 1
    token = 2 * own * model.head_size * ELEMENT_BYTES[run.precision.layers]
    slots = sum(number * positions for number, positions in rows)
    blocks = [len(part) for part in split_layers(run.split, transformer_costs(model), schedule.num_stages)]
    return [token * slots * sum(blocks[stage] for stage in schedule.stages_of(rank)) for rank in range(run.mesh.pp)]
