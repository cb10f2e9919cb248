"""The paths of a run as absolute ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from raypar.actors.machine.files import expanded
from raypar.actors.specs.data import Batches, Text
from raypar.actors.specs.model import Layers, Transformer
from raypar.actors.specs.run import Run


def rooted(run: Run) -> Run:
    """Return the run with absolute paths, as the actors' working directory may be another one."""

    def root(path: str | None) -> str | None:
        return path if path is None else str(expanded(path).absolute())

    run, data = replace(run, offload_folder=root(run.offload_folder)), run.data
    if isinstance(run.model, Transformer | Layers) and run.model.hf is not None:
        run = replace(run, model=replace(run.model, hf=root(run.model.hf)))
    if isinstance(run.model, Transformer) and run.model.lora is not None and run.model.lora.hf is not None:
        run = replace(run, model=replace(run.model, lora=replace(run.model.lora, hf=root(run.model.lora.hf))))
    if isinstance(data, Batches):
        return run
    val_path = data.val_path if data.val_path == "stdlib" else root(data.val_path)
    data = replace(data, val_path=val_path, tokenizer=root(data.tokenizer), cache=root(data.cache))
    if isinstance(data, Text):
        return replace(run, data=data if data.path == "stdlib" else replace(data, path=str(root(data.path))))
    paths = data.path if isinstance(data.path, Mapping) else {data.path: 1.0}
    weights = {str(root(path)): weight for path, weight in paths.items()}
    path = weights if isinstance(data.path, Mapping) else next(iter(weights))
    return replace(run, data=replace(data, path=path, template=root(data.template)))
