"""The manifest: what a checkpoint is of, which logical tensors it has, and which files they are in, as JSON."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from annotated_types import Ge, Lt
from pydantic import FailFast, JsonValue, TypeAdapter, ValidationError
from pydantic_core import from_json

from raypar.actors.checkpoint.logical import Logical
from raypar.actors.checkpoint.shards import ShardFile, is_plain
from raypar.actors.errors import CheckpointError
from raypar.config.fields import brief
from raypar.schedules.drawing.cells import first_of

MANIFEST = "manifest.json"
MAX_BYTES = 64 << 20  # a slice takes about 120
_FORMAT, _VERSION = "raypar checkpoint", 1

Step = Annotated[int, Ge(0), Lt(10**15)]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    step     committed steps: the position in the data and in the learning-rate schedule
    seed     of the run; with the step it is all the state that data and dropout have
    run      the run's resolved config, as plain data
    tensors  by logical name; what the optimizer keeps for a weight beside it, as ``optim.<weight>.exp_avg``
    files    the shards: there is no other file than these and the manifest
    raypar   the version that wrote it
    sha256   of this manifest as it is written, but with "" in this place
    """

    step: Step
    seed: int
    run: dict[str, JsonValue]
    tensors: dict[str, Logical]
    files: Annotated[tuple[ShardFile, ...], FailFast()]
    raypar: str
    format: str = _FORMAT
    version: int = _VERSION
    sha256: str = ""

    def faults(self) -> Iterator[str]:
        """What its parts say against each other; the files are not looked at."""
        names = Counter(file.name for file in self.files)
        for name in names:
            if not is_plain(name) or name == MANIFEST:
                yield f"the file name {brief(name)} is none of a shard's: it might lead out of the folder"
            if names[name] > 1:
                yield f"the file {brief(name)} is listed {names[name]} times"
        takers: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for name, logical in self.tensors.items():
            yield from (f"tensor {brief(name)}: {fault}" for fault in logical.faults())
            for stored in logical.slices:
                takers[stored.file, stored.key].append(name)
        for (file, key), owners in takers.items():
            if file not in names:
                yield f"tensor {brief(owners[0])}: its file {brief(file)} is not in the list of files"
            if len(owners) > 1:
                yield f"{brief(key)} of {brief(file)} is taken for {len(owners)} slices, of {brief(owners[0])} first"


def manifest_of(
    step: int, seed: int, run: Mapping[str, Any], shards: Iterable[tuple[ShardFile, Mapping[str, Logical]]]
) -> Manifest:
    """The manifest of shard files, each with the slices of logical tensors in it, by the tensors' names.

    Raises CheckpointError if slices of one tensor don't agree or don't make it up, or if the run is not plain data.
    """
    shards = sorted(shards, key=lambda shard: shard[0].name)
    found: defaultdict[str, list[Logical]] = defaultdict(list)
    for _, tensors_in in shards:
        for name, part in tensors_in.items():
            found[name].append(part)
    faults, tensors = [], {}
    for name, parts in sorted(found.items()):
        kinds = {(part.dtype, part.shape) for part in parts}
        if len(kinds) > 1:
            faults.append(f"tensor {name!r}: its slices are of different tensors: {sorted(kinds)}")
        slices = tuple(stored for part in parts for stored in part.slices)
        tensors[name] = Logical(parts[0].dtype, parts[0].shape, slices)
    manifest = Manifest(step, seed, dict(run), tensors, tuple(file for file, _ in shards), _own_version())
    faults = faults or list(manifest.faults())
    if faults:
        raise CheckpointError(faults)
    return manifest


def encode(manifest: Manifest) -> bytes:
    """The manifest as it is written, with its digest. Raises CheckpointError if the run is no plain data."""
    try:
        plain = _reader().dump_python(manifest, warnings=False)  # dataclasses.asdict takes five times as long
        blank = _text({**plain, "sha256": ""})
        return _text({**plain, "sha256": hashlib.sha256(blank).hexdigest()})
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError([f"the run can't be written as JSON: {error}"]) from error


def decode(raw: bytes) -> tuple[Manifest | None, list[str]]:
    """The manifest that bytes hold, if it can be told, and what is wrong with it: the first faults of many."""
    try:
        plain = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        return None, [f"{MANIFEST} is not JSON: {error}"]
    if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
        return None, [f"{MANIFEST} is not that of a raypar checkpoint"]
    if plain.get("version") != _VERSION:
        return None, [f"{MANIFEST} has version {brief(plain.get('version'))}, this raypar reads {_VERSION}"]
    try:
        manifest = _reader().validate_json(raw, strict=True)
    except ValidationError as error:
        return None, first_of(
            f"{MANIFEST}: {brief('.'.join(map(str, one['loc'])))[1:-1]} is {brief(one['input'])}: {one['msg']}"
            for one in error.errors(include_url=False, include_context=False)
        )
    faults = first_of(manifest.faults())
    try:
        if encode(manifest) != raw:
            faults.insert(0, f"{MANIFEST} was changed: its text is not the one that its sha256 is of")
    except CheckpointError as error:
        faults += error.faults
    return manifest, faults


def _text(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, allow_nan=False, ensure_ascii=False).encode()


@cache
def _reader() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def _own_version() -> str:
    try:
        return version("raypar")
    except PackageNotFoundError:  # a checkout on the path
        return "unknown"
