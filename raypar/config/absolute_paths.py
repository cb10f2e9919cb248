"""The paths of a run as absolute ones."""

from __future__ import annotations

from collections.abc import Mapping

from raypar.actors.machine.files import expanded
from raypar.actors.specs.data import Text
from raypar.actors.specs.run import Run
from raypar.config.mended import changed, value_at

_INPUTS = ("model.hf", "model.lora.hf", "data.val_path", "data.tokenizer", "data.cache", "data.path", "data.template")


def rooted(run: Run) -> Run:
    """Return the run with absolute paths, as the actors' working directory may be another one."""
    for path in ("offload_folder", *_INPUTS):
        value = value_at(run, path)
        is_word = value == "stdlib" and (path == "data.val_path" or isinstance(run.data, Text))
        if isinstance(value, Mapping):
            run = changed(run, path, {str(expanded(file).absolute()): weight for file, weight in value.items()})
        elif value is not None and not is_word:
            run = changed(run, path, str(expanded(value).absolute()))
    return run
