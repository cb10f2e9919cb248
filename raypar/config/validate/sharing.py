"""Checks of weights that layers share past ``nn.Module``, where ZeRO stage 3 takes their memory away."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run


def sharing_faults(run: Run, skeleton: Skeleton) -> Iterator[str]:
    """Yield the weights of own layers that would not follow their shards, if a run shards weights.

    Args:
        run: A run whose zero and model are valid, and whose model can be built.
        skeleton: The skeleton of its model.
    """
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
