"""Check that layers share no unregistered weights where ZeRO stage 3 frees their memory."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.actors.specs.model import Layers
from raypar.config.rules import Examined


def sharing_faults(examined: Examined) -> Iterator[str]:
    """Yield the weights of the user's layers that sharding would break, if a run shards weights.

    Args:
        examined: A run whose layers fit its schedule.
    """
    run, skeleton = examined.run, examined.skeleton
    if run.zero != 3 or not isinstance(run.model, Layers):
        return
    from raypar.actors.data_parallel.replica_checks import overlapping  # imports torch
    from raypar.actors.models.unregistered import borrowed

    names, modules = skeleton.model.names, skeleton.model.skeleton
    between = set()
    for layer, owner, name in borrowed(modules):
        between |= {(layer, owner), (owner, layer)}
        yield (
            f"model: {names[layer]} uses {names[owner]}.{name} without registering it, and zero is 3, which has "
            f"weights only while their layer runs: make the module or the parameter an attribute of {names[layer]} (it "
            "is one tied weight then), or set zero to 2"
        )
    for one, other in overlapping(names, modules):
        if (one.layer, other.layer) not in between:
            yield (
                f"model: {one.name} and {other.name} overlap in memory, and zero is 3, which gives each memory of its "
                "own: make them one parameter, or compute one from the other in the forward, or set zero to 2"
            )
