"""The paths of a run as absolute ones."""

from __future__ import annotations

from dataclasses import replace

from raypar.actors.files import expanded
from raypar.actors.specs.data import Batches, Examples
from raypar.actors.specs.model import Layers, Transformer
from raypar.actors.specs.run import Run


def rooted(run: Run) -> Run:
    """Return the run with absolute paths of what actors read and write, as theirs may be another working directory."""

    def root(path: str | None) -> str | None:
        return path if path is None else str(expanded(path).absolute())

    run, data = replace(run, offload_folder=root(run.offload_folder)), run.data
    if isinstance(run.model, Transformer | Layers) and run.model.hf is not None:
        run = replace(run, model=replace(run.model, hf=root(run.model.hf)))
    if isinstance(data, Batches):
        return run
    if isinstance(data, Examples):
        data = replace(data, template=root(data.template))
    text = replace(
        data,
        path=data.path if data.path == "stdlib" else str(root(data.path)),
        val_path=data.val_path if data.val_path == "stdlib" else root(data.val_path),
        tokenizer=root(data.tokenizer),
        cache=root(data.cache),
    )
    return replace(run, data=text)
