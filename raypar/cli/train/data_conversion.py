"""Conversion of a run's data on a cluster, before a command checks the run."""

from __future__ import annotations

from raypar.actors.machine.this_machine import starts_own_ray
from raypar.actors.specs.run import Run


def convert_data(run: Run) -> None:
    """Convert the data of a run on a cluster, if RAY_ADDRESS names one; see ``convert_on_cluster``.

    Args:
        run: The run, which may have faults.
    """
    if not starts_own_ray():
        from raypar.job.start.conversion import convert_on_cluster  # imports torch and Ray

        convert_on_cluster(run)
