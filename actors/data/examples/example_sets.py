"""Sets of examples: the split of each path into training and validation examples, and the weight of each set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from raypar.actors.data.conversion import Convert, by_size
from raypar.actors.data.examples.example_files import Converted, files_of, has_entry, open_examples
from raypar.actors.data.examples.mixing import LARGEST
from raypar.actors.data.examples.packing import Int64s
from raypar.actors.data.text.text_files import TextError
from raypar.actors.data.text.token_batches import shuffled
from raypar.actors.specs.data import Examples
from raypar.schedules.float_sum import float_sum

_SPLIT_SEED = 0  # which examples are for validation does not depend on the run's seed


class ExampleSet(NamedTuple):
    """A set of examples.

    Attributes:
        setting: The user's name of its path, such as "val_path".
        converted: All examples of the path.
        chosen: Indices of those that belong to the set.
        weight: Its weight.
    """

    setting: str
    converted: Converted
    chosen: Int64s
    weight: float


def example_sets(spec: Examples, convert: Convert = by_size) -> tuple[dict[str, ExampleSet], dict[str, ExampleSet]]:
    """Return the sets of examples for training and those for validation, by path.

    Args:
        spec: The data.
        convert: Converts blocks of files that the cache has not.

    Raises:
        TextError: All faults of the data.
    """
    if not 0 < spec.val_fraction < 1 and spec.val_path is None:
        raise TextError([f"val_fraction is {spec.val_fraction}: it must be between 0 and 1"])
    weights = {spec.path: 1.0} if isinstance(spec.path, str) else spec.path
    names = {path: "path" if isinstance(spec.path, str) else f"path[{path!r}]" for path in weights}
    faults = [*_weight_faults(weights)]
    opened = {
        path: found for path in weights if (found := _opened(names[path], path, spec, convert, faults)) is not None
    }
    val = None if spec.val_path is None else _opened("val_path", spec.val_path, spec, convert, faults)
    if spec.val_path is None:
        for path, one in opened.items():
            if max(1, round(one.facts.examples * spec.val_fraction)) >= one.facts.examples:
                few = f"it has {one.facts.examples} example, and needs two, one for validation"
                faults.append(f"{names[path]}: {few}: give more, or val_path")
    TextError.raise_if(dict.fromkeys(faults))
    if val is not None and spec.val_path is not None:
        train = {path: ExampleSet(names[path], one, _every(one), weights[path]) for path, one in opened.items()}
        return train, {spec.val_path: ExampleSet("val_path", val, _every(val), 1.0)}
    split = {path: _split(one, spec.val_fraction) for path, one in opened.items()}
    train, held = (
        {path: ExampleSet(names[path], one, split[path][which], weights[path]) for path, one in opened.items()}
        for which in (0, 1)
    )
    return train, held


def are_converted(spec: Examples) -> bool:
    """Return whether the cache has all of the data, so that opening it writes nothing; True if it can't be opened.

    Args:
        spec: The data.
    """
    return all(has_entry(setting, path, spec) for setting, path in _settings(spec))


def missing_files(spec: Examples) -> list[str]:
    """Return a fault for each path of the data that names no readable files. The files are not opened.

    Args:
        spec: The data.
    """
    faults = list[str]()
    for setting, path in _settings(spec):
        try:
            files_of(setting, path)
        except (OSError, ValueError) as error:
            faults.append(f"{setting}: {error}")
    return faults


def _settings(spec: Examples) -> list[tuple[str, str]]:
    """Return (the user's name, path) for each path of the data."""
    one = spec.path if isinstance(spec.path, str) else None
    train = [(f"path[{path!r}]", path) for path in spec.path] if one is None else [("path", one)]
    return [*train, *([] if spec.val_path is None else [("val_path", spec.val_path)])]


def _weight_faults(weights: Mapping[str, float]) -> list[str]:
    """Return the faults of the weights of sets of examples."""
    if not weights:
        return ["path: it names nothing: give a file, or files with their weights"]
    whole = float_sum(weights.values())
    return [
        f"path: the weight of {path!r}, {weight:g}, is less than one in {LARGEST:,} of all: leave it out, or give more"
        for path, weight in weights.items()
        if weight * LARGEST < whole
    ]


def _opened(setting: str, path: str, spec: Examples, convert: Convert, faults: list[str]) -> Converted | None:
    """Open the examples of a path. Faults are appended to ``faults``."""
    try:
        return open_examples(setting, path, spec, convert)
    except TextError as error:
        faults += error.faults
        return None


def _every(converted: Converted) -> Int64s:
    return np.arange(converted.facts.examples, dtype=np.int64)


def _split(converted: Converted, fraction: float) -> tuple[Int64s, Int64s]:
    """Return the examples of a path that are for training, and those that are held out for validation."""
    every = _every(converted)
    shuffle = shuffled(every, np.zeros_like(every), len(every), _SPLIT_SEED)
    held = max(1, round(len(every) * fraction))
    return np.sort(shuffle[held:]), np.sort(shuffle[:held])
