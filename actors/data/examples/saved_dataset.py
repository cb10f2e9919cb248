"""Folders of Hugging Face's ``datasets.save_to_disk``: the files that hold the examples of a split.

A dataset is a folder with a state.json that names its shards, files in the stream format of Arrow. A dataset with
several splits is a folder with a dataset_dict.json that names them, and a subfolder for each.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raypar.actors.data.tokenizers.example_shapes import ExampleError
from raypar.actors.machine.files import read_named

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_TRAIN = "train"
_MOST_BYTES = 1 << 26  # of a JSON file


def is_saved(folder: Path) -> bool:
    """Return whether a folder is a dataset, or several splits of one."""
    return (folder / _SPLITS).is_file() or (folder / _STATE).is_file()


def shards_of(folder: Path, *, trains: bool) -> list[Path]:
    """Return the files of a dataset in order: those of the split "train", if it has several.

    Args:
        folder: The folder, for which ``is_saved`` is true.
        trains: Whether the examples are for training; else a split must be named.

    Raises:
        ExampleError: A file is missing or invalid, or there is no such split.
    """
    if (folder / _SPLITS).is_file():
        splits = splits_in(folder)
        if not trains or _TRAIN not in splits:
            named = ", ".join(repr(str(folder / split)) for split in splits)
            raise ExampleError(f"{str(folder)!r} has several splits, so name one: {named}")
        if not (folder / _TRAIN / _STATE).is_file():
            raise ExampleError(f"{str(folder)!r} has splits {', '.join(splits)}, but {_TRAIN}/{_STATE} is missing")
        return shards_of(folder / _TRAIN, trains=True)
    state = _read(folder / _STATE)
    if state.get("_indices_data_files"):
        raise ExampleError(f"{str(folder)!r} has an order beside its examples: save dataset.flatten_indices() instead")
    files = state.get("_data_files")
    found = [one.get("filename") for one in files if isinstance(one, Mapping)] if isinstance(files, list) else []
    names = [name for name in found if isinstance(name, str)]
    if not names or len(names) < len(files or ()):
        raise ExampleError(f"{str(folder / _STATE)!r} names no files of examples: save the dataset again")
    if strange := [name for name in names if name != Path(name).name or name in ("", "..")]:
        raise ExampleError(f"{str(folder / _STATE)!r} names {strange[0]!r}, which leaves the folder: save it again")
    if missing := [name for name in names if not (folder / name).is_file()]:
        listed = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ExampleError(f"{str(folder)!r} lacks {listed}, of {len(names)} files: copy the folder again")
    return [folder / name for name in names]


def splits_in(folder: Path) -> list[str]:
    """Return the names of the splits in a folder; [] if it has no dataset_dict.json. Raises ExampleError."""
    if not (folder / _SPLITS).is_file():
        return []
    splits = _read(folder / _SPLITS).get("splits")
    if not isinstance(splits, list) or not all(isinstance(name, str) for name in splits):
        raise ExampleError(f"{str(folder / _SPLITS)!r} names no splits: save the datasets again")
    return splits


def _read(path: Path) -> Mapping[str, Any]:
    """Read a JSON file that holds an object. Raises ExampleError."""
    try:
        found = json.loads(read_named(path, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise ExampleError(f"{str(path)!r} can't be read ({error}): copy it again") from error
    return found if isinstance(found, dict) else {}
