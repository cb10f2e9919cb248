"""How many parameters low-rank adapters have on an actor, where the weights that they adapt are frozen.

With rank r, an adapter of a layer of E inputs and F outputs has r E and r F. Tensor ranks divide the r F of layers that
are sharded by outputs, and the r E of those that are sharded by inputs; the others are whole on each.

Source: actors/layers/adapter.py, whose modules the tests count.
"""

from __future__ import annotations

from raypar.actors.models.partition import split_layers, transformer_costs
from raypar.actors.specs.lora import Adaptable
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.types import Split
from raypar.planner.sizes.parameters import Group, Units


def adapter_parameters(model: GPT | Llama, ranks: int) -> tuple[int, int]:
    """Count the parameters of the adapters of a block on one actor, and their tensors; none without adapters.

    Args:
        model: The model.
        ranks: Number of tensor ranks.
    """
    if (lora := model.lora) is None:
        return 0, 0
    hidden, queries = model.hidden, model.heads * model.head_size
    keys, is_divided = model.num_kv_heads * model.head_size, model.num_kv_heads % ranks == 0
    own_keys, width = keys // ranks if is_divided else keys, model.mlp_width // ranks
    others: dict[Adaptable, int] = {"q": queries // ranks, "k": own_keys, "v": own_keys, "out": queries // ranks}
    others |= {"gate": width, "up": width, "down": width}  # of inputs and outputs those that are not hidden
    layers = [name for name in lora.layers if name != "gate" or model.mlp_matrices == 3]
    return lora.rank * sum(hidden + others[name] for name in layers), 2 * len(layers)


def adapter_units(model: GPT | Llama, split: Split, num_stages: int, ranks: int, layers: int) -> list[Units]:
    """Count the parameters of the adapters of each stage's units on an actor.

    Args:
        model: The model.
        split: How its layers are split into stages.
        num_stages: Number of stages.
        ranks: Number of tensor ranks.
        layers: Layers of the body in a unit.
    """
    count, tensors = adapter_parameters(model, ranks)
    found = []
    for held in split_layers(split, transformer_costs(model), num_stages):
        groups: list[Group] = [(count * len(held[at : at + layers]), [[]]) for at in range(0, len(held), layers)]
        found.append(Units.of(groups, [], tensors * len(held)))
    return found
