"""The checkpoint of a run that ends because it can't go on: its actors write their snapshots in memory to the disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from raypar.actors.specs.run import Run
from raypar.checkpoint.base import base_weights_fingerprint
from raypar.checkpoint.manifest import manifest_of
from raypar.checkpoint.save import Save
from raypar.cluster.calls.calls import Calls
from raypar.config.toml import plain_of
from raypar.job.recover.snapshots import Snapshots
from raypar.job.recover.transfers import holders_of
from raypar.paths import CHECKPOINTS, absolute, checkpoints

_HEARD = 2.5  # seconds in which an actor that lives answers


def last_checkpoint(run: Run, calls: Calls, snapshots: Snapshots, taken: int) -> Path | None:
    """Save the newest step with all snapshots as a checkpoint.

    The state of dead actors is not lost: snapshots outlive their actors, and other nodes have copies.

    Args:
        run: The run, with all its replicas.
        calls: Calls to its actors, of which some may be dead, or busy.
        snapshots: The run's snapshots.
        taken: Number of steps that the driver has reports of.

    Returns:
        The checkpoint; None if there are no snapshots of a step that is not saved yet, or the run has no folder.

    Raises:
        CheckpointError: It can't be written.
        JobError: An actor failed meanwhile.
    """
    if run.folder is None or not snapshots.are_taken(run):
        return None
    calls.abort()  # none of those that are in a step takes another one, so that no snapshot is written over
    there = calls.answers(range(len(calls.handles)), "snapshot_steps", seconds=_HEARD, group="disk")
    step, folder = snapshots.common([*there.values()], taken), absolute(run.folder) / CHECKPOINTS
    saved = max((step for step, _ in checkpoints(folder)), default=0) if folder.is_dir() else 0
    if step is None or step <= saved:
        return None
    writes: Mapping[int, list[object]] = {rank: [] for rank in there}
    holders = holders_of(step, there)
    for share in snapshots.source:
        writes[min(holders[share], key=lambda rank: len(writes[rank]))].append(share)
    with Save(folder, step) as save:
        writing = {rank: calls.handles[rank].write_snapshots.options(concurrency_group="disk") for rank in writes}
        refs = [writing[rank].remote(step, shares, str(save.path)) for rank, shares in writes.items()]
        written = calls.gather(refs, "saving snapshots", [*writes])
        shards = [shard for of_one in written for shard in of_one]
        return save.commit(
            manifest_of(step, run.seed, plain_of(run), shards, base_weights_fingerprint(run)), run.keep_last
        )
