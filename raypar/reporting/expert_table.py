"""Who holds which experts, and who sums whose gradients, as a table of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.sharding import Pieces
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run
from raypar.config.arguments import checked_arguments
from raypar.config.run import world_of

_MOST = 16  # actors that have a row


@checked_arguments
def expert_table(run: Run) -> str:
    """Draw how experts are divided over the actors of a run: a row for each actor of the first pipeline rank.

    Args:
        run: The run.

    Returns:
        The table; "" if ``mesh.ep`` is 1, so that every replica has all experts.

    Example:
        ``print(rp.expert_table(rp.recipe("moe-tiny", layout="ep2_dp2")))``
    """
    mesh = run.mesh
    if mesh.ep == 1:
        return ""
    counts = _counts(run)
    head = ["actor", *([f"{count} experts" for count in counts] if counts[1:] else ["experts"] * len(counts))]
    head += ["exchange tokens", "sum experts", "sum other weights"]
    rows = [[*_row(mesh, rank, counts)] for rank in range(min(mesh.inner, _MOST))]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in [head, *rows]]
    return "\n".join(line.rstrip() for line in [*lines, *_notes(run)])


def _row(mesh: Mesh, rank: int, counts: Sequence[int]) -> Iterator[str]:
    """Yield the cells of an actor."""
    yield f"{rank}: {mesh.label(rank)}"
    among = mesh.group_of("ep", rank)[1]
    part = f" ({rank % mesh.expert_ranks + 1}/{mesh.expert_ranks})" if mesh.expert_ranks > 1 else ""
    for count in counts:
        first, last = Pieces.at(among.index(rank), mesh.ep).span(count)
        yield f"{first}-{last - 1}{part}" if last - first > 1 else f"{first}{part}"
    for members in (among, mesh.group_of("edp", rank)[1], mesh.replicas(rank)[1]):
        yield _set(members)


def _notes(run: Run) -> Iterator[str]:
    """Yield what is true of all actors."""
    mesh, world = run.mesh, world_of(run)
    if mesh.inner > _MOST:
        yield f"... and {mesh.inner - _MOST} more"
    if mesh.pp > 1:
        yield f"so on each of {mesh.pp} pipeline ranks, with {mesh.inner} actors each"
    if world.sharded:
        what = {1: "the update", 2: "gradients and the update", 3: "weights, gradients and the update"}[world.zero]
        yield f"zero {world.zero}: those who sum a gradient share out {what}"


def _counts(run: Run) -> list[int]:
    """Return the numbers of experts that layers have, in rising order; of own layers, whose list is not known, []."""
    if not isinstance(run.model, Transformer):
        return []
    return sorted({run.model.num_experts(block) for block in range(run.model.layers)} - {0})


def _set(members: Iterable[int]) -> str:
    return f"{{{', '.join(map(str, members))}}}"
