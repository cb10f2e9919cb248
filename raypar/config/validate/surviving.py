"""Check what a run survives: its failures, snapshots and spares, and comparisons of its replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypar.actors.specs.run import Run


def surviving_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the settings of a run that would do nothing, or could not do what they say, each with its fix.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    if right("spares", "max_failures") and run.spares and not run.max_failures:
        fix = "set max_failures, or spares to 0"
        yield f"spares is {run.spares}, but max_failures is 0, so no actor is replaced: {fix}"
    if (
        not right("check_every", "mesh", "data_parallel", "zero", "offload", "max_failures", "snapshot_every")
        or not run.check_every
    ):
        return
    replicas = run.mesh.dp * run.mesh.cp
    if replicas == 1:
        yield f"check_every is {run.check_every}, but there is one replica, so nothing to compare: set it to 0"
    elif run.data_parallel == "parameter_server":
        yield f"check_every is {run.check_every}, but servers send replicas their weights in every step: set it to 0"
    elif run.zero == 3 or run.offload == "parameters":
        why = "zero is 3" if run.zero == 3 else "offload is 'parameters'"
        yield f"check_every is {run.check_every}, but {why}, so no two actors hold the same weights: set it to 0"
    if run.max_failures and run.snapshot_every % run.check_every:
        yield (
            f"snapshot_every is {run.snapshot_every}, and check_every {run.check_every}: a snapshot would hold what no "
            f"check has seen, so set snapshot_every to {run.check_every} or a multiple"
        )
