"""Check how few replicas a run may have, and the comparisons of their weights and of what they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypar.actors.specs.run import Run


def replica_check_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the reasons why there can't be so few replicas, or why they can't be compared, as the run says.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    if right("min_dp", "mesh") and run.min_dp > run.mesh.dp:
        there = "is 1 replica" if run.mesh.dp == 1 else f"are {run.mesh.dp} replicas"
        yield f"min_dp is {run.min_dp}, but there {there}: set it to {run.mesh.dp} at most"
    yield from _recheck_faults(run, right)
    if (
        not right("check_every", "mesh", "data_parallel", "zero", "offload", "max_failures", "snapshot_every")
        or not run.check_every
    ):
        return
    replicas = run.mesh.ways("dp") * run.mesh.cp
    if replicas == 1:
        why = "there is one replica (dp x cp), so nothing to compare"
        yield f"check_every is {run.check_every}, but {why}: set it to 0"
    elif run.data_parallel == "parameter_server":
        yield f"check_every is {run.check_every}, but servers send replicas their weights in every step: set it to 0"
    elif (run.zero == 3 and run.mesh.shards == replicas) or run.offload == "parameters":
        why = "zero is 3" if run.zero == 3 else "offload is 'parameters'"
        shard = " (with mesh.shard, copies of shards are compared)" if run.offload != "parameters" else ""
        yield f"check_every is {run.check_every}, but {why}, so no two actors hold the same weights: set it to 0{shard}"
    if run.max_failures and run.snapshot_every % run.check_every:
        yield (
            f"snapshot_every is {run.snapshot_every}, and check_every {run.check_every}: a snapshot would hold what no "
            f"check has seen, so set snapshot_every to {run.check_every} or a multiple"
        )


def _recheck_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the reasons why no other actor can compute a microbatch again, each with its fix."""
    if not right("recheck_every", "mesh", "data_parallel", "zero", "offload") or not run.recheck_every:
        return
    why = ""
    if run.mesh.dp == 1:
        why = "mesh.dp is 1, so no other actor has the same weights"
    elif run.data_parallel == "parameter_server":
        why = "replicas of servers do not talk to each other"
    elif run.mesh.divides_experts:
        why = "experts are divided over actors, which compute the tokens of several replicas together"
    elif run.zero == 3 or run.offload == "parameters":
        named = "zero is 3" if run.zero == 3 else "offload is 'parameters'"
        why = f"{named}, so weights are on an actor only for a while"
    if why:
        yield f"recheck_every is {run.recheck_every}, but {why}: set it to 0"
