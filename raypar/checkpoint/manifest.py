"""The manifest of a checkpoint: its run and step, its logical tensors, and the shards that hold them, as JSON."""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from pydantic import FailFast, JsonValue, TypeAdapter, ValidationError
from pydantic_core import from_json

from raypar.actors.bounds import Step
from raypar.actors.checkpoint.logical import Logical, Stored, StoredSpans, merged
from raypar.actors.checkpoint.shards import ShardFile, is_plain
from raypar.actors.errors import CheckpointError
from raypar.actors.sharding import ElementCut
from raypar.config.fields import short_repr
from raypar.schedules.schedule import first_faults

MANIFEST = "manifest.json"
MAX_BYTES = 64 << 20  # each slice takes about 120 bytes
_FORMAT = "raypar checkpoint"
_WHOLE_SLICES, _SPANS = 1, 2  # versions: each slice is one tensor of one file; replicas may have spans of a slice

Files = Mapping[int, str]  # of the spans of a slice, by rank


@dataclass(frozen=True)
class Manifest:
    """The content of a checkpoint.

    Attributes:
        step: Number of committed steps, which is the position in the data and in the learning-rate schedule.
        seed: Seed of the run. Data order and dropout depend on nothing but seed and step.
        run: The resolved run, as plain data.
        tensors: Logical tensors by name. Optimizer state has names such as ``optim.<weight>.exp_avg``.
        files: The shards. A checkpoint has no files but these and the manifest.
        raypar: Version of raypar that wrote it.
        format: Name of the file format.
        version: Version of the file format: 2 if replicas have written spans of slices, else 1.
        base: Fingerprint of the weights that the adapters belong to, if there are adapters alone; else "".
        sha256: Digest of the manifest's text with an empty string in place of this digest.
    """

    step: Step
    seed: int
    run: dict[str, JsonValue]
    tensors: dict[str, Logical]
    files: Annotated[tuple[ShardFile, ...], FailFast()]
    raypar: str
    format: str = _FORMAT
    version: int = _WHOLE_SLICES
    base: str = ""
    sha256: str = ""

    def faults(self) -> Iterator[str]:
        """Yield contradictions within the manifest, without looking at the files."""
        names = Counter(file.name for file in self.files)
        for name in names:
            if not is_plain(name) or name == MANIFEST:
                yield f"{short_repr(name)} is no name for a shard: it might lead out of the folder"
            if names[name] > 1:
                yield f"the file {short_repr(name)} is listed {names[name]} times"
        takers: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for name, logical in self.tensors.items():
            yield from (f"tensor {short_repr(name)}: {fault}" for fault in logical.faults())
            for stored in logical.slices:
                if isinstance(stored, Stored):
                    takers[stored.file, stored.key].append(name)
                elif len(stored.files) != stored.cut.num_ranks:
                    count = f"{len(stored.files)} files, not {stored.cut.num_ranks}"
                    yield f"tensor {short_repr(name)}: the spans of {short_repr(stored.key)} are in {count}"
        for (file, key), owners in takers.items():
            if file not in names:
                yield f"tensor {short_repr(owners[0])}: its file {short_repr(file)} is not in the list of files"
            if len(owners) > 1:
                many = f"{len(owners)} slices, of {short_repr(owners[0])} first"
                yield f"{short_repr(key)} of {short_repr(file)} is taken for {many}"
        for files in _tables(self.tensors):
            if unlisted := [file for file in files.values() if file not in names]:
                yield f"the file {short_repr(unlisted[0])} of spans is not in the list of files"
            if len({*files.values()}) < len(files):
                yield f"a file is listed for several replicas, beside {short_repr(files[0])}"


def manifest_of(
    step: int,
    seed: int,
    run: Mapping[str, Any],
    shards: Iterable[tuple[ShardFile, Mapping[str, Logical]]],
    base: str = "",
) -> Manifest:
    """Create the manifest of a checkpoint.

    Args:
        step: Number of committed steps.
        seed: Seed of the run.
        run: The resolved run, as plain data.
        shards: Each shard file, with the logical tensors of which it has a slice, by name.
        base: Fingerprint of the weights that the adapters belong to; "" if it has all weights.

    Raises:
        CheckpointError: The slices of a tensor disagree or do not cover it.
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
        tensors[name] = merged(parts)
    tensors, files = _with_tables(tensors), tuple(file for file, _ in shards)
    version = _SPANS if any(_tables(tensors)) else _WHOLE_SLICES
    manifest = Manifest(step, seed, dict(run), tensors, files, _own_version(), version=version, base=base)
    faults = faults or list(manifest.faults())
    CheckpointError.raise_if(faults)
    return manifest


def encode(manifest: Manifest) -> bytes:
    """Return the manifest's text, with its digest. Raises CheckpointError if the run is not plain data."""
    try:
        plain = _plain(manifest)
        blank = _text({**plain, "sha256": ""})
        return _text({**plain, "sha256": hashlib.sha256(blank).hexdigest()})
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError([f"the run can't be written as JSON: {error}"]) from error


def decode(raw: bytes) -> tuple[Manifest | None, list[str]]:
    """Read a manifest's text.

    Args:
        raw: Content of the file.

    Returns:
        The manifest, or None if it can't be read, and its faults, of many only the first ones.
    """
    try:
        plain = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        return None, [f"{MANIFEST} is not JSON: {error}"]
    if not isinstance(plain, dict) or plain.get("format") != _FORMAT:
        return None, [f"{MANIFEST} is not that of a raypar checkpoint"]
    if plain.get("version") not in (_WHOLE_SLICES, _SPANS):
        known = f"this raypar reads {_WHOLE_SLICES} and {_SPANS}"
        return None, [f"{MANIFEST} has version {short_repr(plain.get('version'))}, {known}"]
    try:
        manifest = _reader().validate_json(raw, strict=True, context={"table": _TablesRead(plain)})
    except ValidationError as error:
        return None, first_faults(
            f"{MANIFEST}: {short_repr('.'.join(map(str, one['loc'])))[1:-1]} "
            f"is {short_repr(one['input'])}: {one['msg']}"
            for one in error.errors(include_url=False, include_context=False)
        )
    faults = first_faults(manifest.faults())
    try:
        if encode(manifest) != raw:
            faults.insert(0, f"{MANIFEST} was changed: its text does not match its sha256")
    except CheckpointError as error:
        faults += error.faults
    return manifest, faults


def _tables(tensors: Mapping[str, Logical]) -> list[Files]:
    """Return the files of all slices of which replicas have spans, each table once, in the order of the tensors."""
    found = {id(one.files): one.files for of in tensors.values() for one in of.slices if isinstance(one, StoredSpans)}
    return list(found.values())


def _with_tables(tensors: Mapping[str, Logical]) -> dict[str, Logical]:
    """Return tensors whose equal files are one table.

    A slice with fewer blocks than replicas has spans of some of them only, and a table of these in the order of spans.
    """
    tables = dict[tuple[str, ...], Files]()

    def in_table(stored: StoredSpans) -> StoredSpans:
        ranks, cut = list(range(stored.cut.num_ranks)), stored.cut
        if len(stored.files) < len(ranks):
            spans = {rank: span for rank in stored.files if (span := stored.span(rank)) is not None}
            ranks = sorted(spans, key=lambda rank: spans[rank])
            cut = ElementCut(cut.block, 0, len(ranks))
            if [cut.span(stored.elements, rank) for rank in range(len(ranks))] != [spans[rank] for rank in ranks]:
                return stored  # a file is missing
        names = tuple(stored.files[rank] for rank in ranks)
        return replace(stored, cut=cut, files=tables.setdefault(names, dict(enumerate(names))))

    return {
        name: replace(of, slices=tuple(in_table(one) if isinstance(one, StoredSpans) else one for one in of.slices))
        for name, of in tensors.items()
    }


def _plain(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest as plain data: the files of spans are numbers in "tables", which have numbers of files."""
    tables, number_of = _tables(manifest.tensors), {file.name: number for number, file in enumerate(manifest.files)}
    table_of = {id(files): number for number, files in enumerate(tables)}
    plain: dict[str, Any] = _reader().dump_python(  # five times as fast as dataclasses.asdict
        manifest, warnings=False, context={"number": lambda files: table_of[id(files)]}
    )
    for cut in (one["cut"] for of in plain["tensors"].values() for one in of["slices"] if "cut" in one):
        if cut["copies"] == 1:
            del cut["copies"]  # as before there were copies
    if tables:
        plain["tables"] = [[number_of.get(files[rank], files[rank]) for rank in sorted(files)] for files in tables]
    return plain


class _TablesRead:
    """The tables of files in the plain data of a manifest, by number. Each is read once, and only if it is used.

    Args:
        plain: The plain data.
    """

    def __init__(self, plain: Mapping[str, Any]) -> None:
        self._plain, self._read = plain, dict[int, Files]()

    def __call__(self, number: object) -> Files:
        """Return the files of a table. Raises ValueError if there is no such table."""
        if type(number) is not int or self._plain.get("version") != _SPANS:
            raise ValueError("it is no table of files")
        if number not in self._read:
            try:
                files, table = self._plain["files"], self._plain["tables"]
                chosen = [files[one]["name"] for one in table[number] if 0 <= one < len(files)]
                if not 0 <= number < len(table) or len(chosen) != len(table[number]):
                    raise IndexError
                if not chosen or not all(isinstance(name, str) for name in chosen):
                    raise TypeError
            except (KeyError, IndexError, TypeError):
                raise ValueError("there is no such table of files") from None
            self._read[number] = dict(enumerate(chosen))
        return self._read[number]


def _text(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, allow_nan=False, ensure_ascii=False).encode()


@cache
def _reader() -> TypeAdapter[Manifest]:
    return TypeAdapter(Manifest)


def _own_version() -> str:
    try:
        return version("raypar")
    except PackageNotFoundError:  # raypar is not installed but imported from a checkout
        return "unknown"
