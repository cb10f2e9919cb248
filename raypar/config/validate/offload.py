"""Check what a run keeps away from the devices of its actors, and the folder for it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator

from raypar.actors.files import expanded
from raypar.actors.specs.run import Run
from raypar.planner.hardware.this_machine import starts_own_ray


def offload_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield the reasons why a run can't offload as it says, each with its fix.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    if right("offload", "data_parallel") and run.offload != "none" and run.data_parallel == "parameter_server":
        fix = "set data_parallel to 'all_reduce', or leave offload out"
        yield f"offload is {run.offload!r}, but parameter servers hold the optimizer: {fix}"
    if not right("offload", "offload_folder") or run.offload_folder is None:
        return
    if run.offload == "none":
        fix = "leave the folder out, or set offload to 'optimizer' or 'parameters'"
        yield f"offload_folder is {run.offload_folder!r}, but offload is 'none': {fix}"
    if run.offload != "none" and starts_own_ray():  # else the actors look, on their nodes
        yield from (f"offload_folder {run.offload_folder!r} {fault}" for fault in _folder_faults(run.offload_folder))


def _folder_faults(folder: str) -> Iterator[str]:
    fix = "give the path of a folder of a fast disk"
    if not folder.strip():
        yield f"has no name: {fix}"
        return
    try:
        path = expanded(folder)
        if not os.path.lexists(path):
            yield f"is not there: make it, or {fix}"
        elif not path.is_dir():
            yield f"is no folder: {fix}"
        else:
            tempfile.TemporaryFile(dir=path).close()  # as the actors will; it has no name
    except (OSError, ValueError) as error:
        yield f"can't be used ({getattr(error, 'strerror', None) or error}): {fix}"
