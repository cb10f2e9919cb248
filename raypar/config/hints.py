"""Hints for common values of a wrong type for a model, data or a mesh: what to write instead."""

from __future__ import annotations

from raypar.actors.specs.run import Run
from raypar.config.recipes import RECIPES

_WRITTEN = {
    "data": "; rp.Batches(batch) are yours, where def batch(step, microbatch, dp): returns (inputs, targets)",
    "mesh": "; such as rp.Mesh(pp=2)",
    "optim": "; such as rp.AdamW(lr=1e-3)",
    "save_every": "; 0 saves only at the end",
    "schedule": "; such as '1f1b', or raypar.schedules.Schedule.of('mine', rows)",
}


def hint(run: Run, path: str) -> str:
    """Return what to write instead of a common wrong value; "" for other values.

    Args:
        run: The run.
        path: Path of a field that has a value of a wrong type.
    """
    if path == "model" and isinstance(run.model, str):
        if run.model in RECIPES:
            return f"; rp.recipe({run.model!r}) is a run with such a model"
        return f"; rp.HF({run.model!r}) is the model in a folder of Hugging Face"
    if path == "data" and isinstance(run.data, str):
        return f"; for text files give rp.Text({run.data!r})"
    if path == "model" and callable(run.model):
        return "; modules of yours are rp.Layers(lambda: [...], loss=...)"
    if path == "data" and callable(run.data):
        return "; a function of yours is rp.Batches(function)"
    return _WRITTEN.get(path, "")
