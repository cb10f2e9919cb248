"""What actors report of the shards that they have written: small, and alike for replicas. Imports no torch."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from raypar.actors.checkpoint.logical import Logical, StoredSpans, plain_slice
from raypar.actors.checkpoint.shards import ShardFile
from raypar.actors.sharding import ElementCut

Written = tuple[ShardFile, dict[str, Logical]]


class ShardReport(NamedTuple):
    """A shard that an actor has written, as it reports it to the driver.

    Thousands of replicas have spans of the same tensors. What a replica has follows from its rank, so all replicas
    describe these tensors with the same bytes, and the driver reads them once.

    Attributes:
        file: The shard.
        divided: The description of the tensors that replicas have divided so that each has a span, with the rank of
            this one. Experts may be divided among other replicas: then there are two.
        others: All other tensors of which the shard has slices, by logical name.
    """

    file: ShardFile
    divided: tuple[tuple[int, bytes], ...]
    others: Mapping[str, Logical]


def shard_report(written: Written) -> ShardReport:
    """Return the report of a shard file and its logical tensors."""
    file, tensors = written
    divided, others = dict[tuple[int, int], dict[str, object]](), dict[str, Logical]()
    for name, logical in sorted(tensors.items()):
        if (division := _division_of(logical)) is None:
            others[name] = logical
        else:
            slices = [plain_slice(stored)[:-1] for stored in logical.slices]
            divided.setdefault(division, {})[name] = [logical.dtype, logical.shape, slices]
    described = ((rank, zlib.compress(json.dumps(found).encode(), 1)) for (rank, _), found in divided.items())
    return ShardReport(file, tuple(described), others)


def written_of(reports: Iterable[ShardReport]) -> list[Written]:
    """Return the shard files of reports with their logical tensors.

    Of a tensor that replicas have described alike, the first of them has the slices with the files of all.
    """
    found, files_of = list[Written](), dict[bytes, dict[int, str]]()
    for file, divided, others in reports:
        tensors = dict(others)
        for rank, described in divided:
            if described not in files_of:
                files_of[described] = {}
                tensors |= _described(described, files_of[described])
            files_of[described][rank] = file.name
        found.append((file, tensors))
    return found


def _division_of(logical: Logical) -> tuple[int, int] | None:
    """Return the rank of the replica that has a span of each slice, and the number of replicas, if all have one."""
    found = set[tuple[int, int]]()
    for stored in logical.slices:
        if not isinstance(stored, StoredSpans) or not stored.cut.reaches_all(stored.elements):
            return None
        found.update((rank, stored.cut.num_ranks) for rank in stored.files)
    return found.pop() if len(found) == 1 else None


def _described(described: bytes, files: Mapping[int, str]) -> dict[str, Logical]:
    """Return the tensors of a description; ``files`` are those of the replicas, and may be filled later."""
    found = dict[str, Logical]()
    for name, (dtype, shape, slices) in json.loads(zlib.decompress(described)).items():
        spans = (
            StoredSpans(key, tuple(offset), tuple(sizes), tuple(order), ElementCut(*cut), files)
            for key, offset, sizes, order, cut in slices
        )
        found[name] = Logical(dtype, tuple(shape), tuple(spans))
    return found
