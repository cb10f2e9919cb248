"""Try whether own layers call their lists of experts as expert actors do, before these start. Imports torch."""

from __future__ import annotations

import torch

from raypar.actors.models.build import build_model
from raypar.actors.models.expert_calls import note_calls
from raypar.actors.models.skip_connections import Skipped
from raypar.actors.specs.run import Run
from raypar.actors.tensors import Values, as_values


def call_faults(run: Run, values: Values) -> list[str]:
    """Return which layers do not call each of their lists of experts once, in the order of registration.

    Expert actors have no code of the layer: they take part in one call of each list. The layers compute a batch, with
    weights and in this process. A layer that raises an error ends the trial: the actors tell it.

    Args:
        run: The run, with own layers.
        values: What the first layer takes.
    """
    model, found = build_model(run.model, run.seed), list[str]()
    every = model.materialize([*range(len(model.names))], run.seed)
    skipped = Skipped(model.skips, model.names)
    for index, (layer, module) in enumerate(zip(model.names, every, strict=True)):
        names, calls = [name for name in model.expert_lists if name.startswith(f"{layer}.")], list[str]()
        note_calls(module, {name: name.removeprefix(f"{layer}.") for name in names}, calls)
        try:
            with torch.no_grad():
                values = as_values(module(*skipped.inputs(index, values)))
                skipped.keep(index, values)
        except Exception:
            break
        if calls != names:
            wanted = " then ".join(names)
            found.append(
                f"model: {layer} calls experts in a forward in the order {' then '.join(calls) or 'none at all'}, and "
                f"expert actors wait for {wanted}: call run_experts once for each list, in the order of "
                "registration, or set mesh.expert_actors to 0 and mesh.ep to its number"
            )
    return found
