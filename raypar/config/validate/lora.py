"""Check that a layout can have low-rank adapters."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run


def lora_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield what can't be together with adapters.

    Args:
        run: The run.
        right: Called with paths of fields, returns whether these have valid values by themselves.
    """
    if not right("model", "mesh", "tile") or isinstance(run.model, Layers) or run.model.lora is None:
        return
    fix = "leave out model.lora"
    if isinstance(run.mesh.tp, str):
        told = f"model.lora: adapters are not divided over a grid (mesh.tp {run.mesh.tp!r})"
        yield f"{told}: use another mesh.tp, or {fix}"
    if run.tile not in (1, {}):
        yield f"model.lora: linear layers in tiles (tile {run.tile!r}) have no adapters: leave out tile, or {fix}"
    if right("model.lora.rank", "model.hidden") and run.model.lora.rank > run.model.hidden:
        told = f"model.lora.rank is {run.model.lora.rank}, and a layer's inputs or outputs are {run.model.hidden}"
        yield f"{told}, so no layer has that rank: use {min(8, run.model.hidden)}, say, or {fix}"
