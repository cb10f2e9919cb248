"""Who holds which experts, and who sums whose gradients, as a table of text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.sharding import Pieces
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.moe import orders_of
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.config.arguments import checked_arguments
from raypar.schedules.drawing.cells import table_in_width
from raypar.schedules.formatting import consecutive

_MOST, _MOST_ORDERS = 16, 4  # actors that have a row, lists of experts that have a column

Order = tuple[int, ...]


@checked_arguments
def expert_table(run: Run) -> str:
    """Draw how experts are divided over the actors of a run: a row for each actor of the first pipeline rank.

    Args:
        run: The run.

    Returns:
        The table; "" if every replica has all experts.

    Example:
        ``print(rp.expert_table(rp.recipe("moe-tiny", layout="ep2_dp2")))``
    """
    mesh = run.mesh
    if not mesh.divides_experts:
        return ""
    orders, left = _orders(run)
    ranks = (*range(min(mesh.inner, _MOST)), *mesh.experts_of(0)[:_MOST])
    head = ["actor", *orders, "exchange tokens", "sum experts", "sum other weights"]
    rows = [[*_row(mesh, rank, [*orders.values()])] for rank in ranks]
    notes = [f"... and {left} other orders of experts"] if left else []
    return "\n".join([*table_in_width([head, *rows]), *notes, *_notes(run)])


def _row(mesh: Mesh, rank: int, orders: Sequence[Order]) -> Iterator[str]:
    """Yield the cells of an actor."""
    yield f"{rank}: {mesh.label(rank)}"
    among, is_own = mesh.group_of("ep", rank)[1], rank >= mesh.size
    holders = mesh.experts_of(0) if mesh.expert_actors else among
    part = f" ({rank % mesh.expert_ranks + 1}/{mesh.expert_ranks})" if mesh.expert_ranks > 1 else ""
    for order in orders:
        if rank in holders:
            first, last = Pieces.at(holders.index(rank), len(holders)).span(len(order))
            yield f"{_ranges(order[first:last])}{part}"
        else:
            yield "-"
    yield _set(among)
    yield _set(mesh.group_of("edp", rank)[1]) if rank in holders else "-"
    yield "-" if is_own else _set(mesh.replicas(rank)[1])


def _notes(run: Run) -> Iterator[str]:
    """Yield what is true of all actors."""
    mesh, world = run.mesh, world_of(run)
    if mesh.inner > _MOST:
        yield f"... and {mesh.inner - _MOST} more"
    if mesh.expert_actors > _MOST:
        yield f"... and {mesh.expert_actors - _MOST} more for experts"
    if mesh.pp > 1:
        yield f"so on each of {mesh.pp} pipeline ranks, with {mesh.inner + mesh.expert_actors} actors each"
    if world.sharded:
        what = {1: "the update", 2: "gradients and the update", 3: "weights, gradients and the update"}[world.zero]
        yield f"zero {world.zero}: those who sum a gradient share out {what}"


def _orders(run: Run) -> tuple[dict[str, Order], int]:
    """Return the orders in which experts are divided, by the head of their column, and how many more there are.

    Of own layers, whose lists are not known here, only those that the run gives an order.
    """
    blocks: dict[Order, list[str]] = {}
    given = orders_of(run.expert_order)
    if isinstance(run.model, Transformer):
        for block in range(run.model.layers):
            name = f"blocks.{block}.mlp.experts"
            if count := run.model.num_experts(block):
                blocks.setdefault(given.get(name, (*range(count),)), []).append(str(block))
    else:
        blocks = {order: [name] for name, order in given.items()}
    shown = dict(sorted(blocks.items(), key=lambda one: (len(one[0]), one[0]))[:_MOST_ORDERS])
    left = len(blocks) - len(shown)
    if len(blocks) == 1:
        return {"experts": next(iter(shown))}, 0
    if len({len(order) for order in blocks}) == len(blocks):
        return {f"{len(order)} experts": order for order in shown}, left
    return {f"experts of {' '.join(names)}": order for order, names in shown.items()}, left


def _ranges(numbers: Sequence[int]) -> str:
    """Write numbers, those that follow each other as a range."""
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in consecutive(numbers))


def _set(members: Iterable[int]) -> str:
    return f"{{{', '.join(map(str, members))}}}"
