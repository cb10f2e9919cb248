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
    faults = [*_weight_faults(weights)]
    opened = dict[str, Converted]()
    for setting, path in _paths(spec).items():
        try:
            opened[setting] = open_examples(setting, path, spec, convert)
        except TextError as error:
            faults += error.faults
    if spec.val_path is None:
        for setting, one in opened.items():
            if max(1, round(one.facts.examples * spec.val_fraction)) >= one.facts.examples:
                few = f"it has {one.facts.examples} example, and needs two, one for validation"
                faults.append(f"{setting}: {few}: give more, or val_path")
    TextError.raise_if(dict.fromkeys(faults))
    sets = [ExampleSet(setting, one, _every(one), 1.0) for setting, one in opened.items()]
    every = {path: one._replace(weight=weights[path]) for path, one in zip(weights, sets, strict=False)}
    if spec.val_path is not None:
        return every, {spec.val_path: sets[-1]}
    split = {path: _split(one.converted, spec.val_fraction) for path, one in every.items()}
    train, held = ({path: one._replace(chosen=split[path][at]) for path, one in every.items()} for at in (0, 1))
    return train, held


def are_converted(spec: Examples) -> bool:
    """Return whether the cache has all of the data, so that opening it writes nothing; True if it can't be opened.

    Args:
        spec: The data.
    """
    return all(has_entry(setting, path, spec) for setting, path in _paths(spec).items())


def missing_files(spec: Examples) -> list[str]:
    """Return a fault for each path of the data that names no readable files. The files are not opened.

    Args:
        spec: The data.
    """
    faults = list[str]()
    for setting, path in _paths(spec).items():
        try:
            files_of(setting, path)
        except (OSError, ValueError) as error:
            faults.append(f"{setting}: {error}")
    return faults


def _paths(spec: Examples) -> dict[str, str]:
    """Return each path of the data, by the user's name of it; that of validation is the last."""
    train = {"path": spec.path} if isinstance(spec.path, str) else {f"path[{path!r}]": path for path in spec.path}
    return train | ({} if spec.val_path is None else {"val_path": spec.val_path})


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


def _every(converted: Converted) -> Int64s:
    return np.arange(converted.facts.examples, dtype=np.int64)


def _split(converted: Converted, fraction: float) -> tuple[Int64s, Int64s]:
    """Return the examples of a path that are for training, and those that are held out for validation."""
    every = _every(converted)
    shuffle = shuffled(every, np.zeros_like(every), len(every), _SPLIT_SEED)
    held = max(1, round(len(every) * fraction))
    return np.sort(shuffle[held:]), np.sort(shuffle[:held])
