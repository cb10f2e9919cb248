"""Check what does not combine with activations that wait in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypar.actors.specs.run import Run


def host_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield what a run with ``activations_on_device`` can't have, each with its fix.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    if not right("activations_on_device") or run.activations_on_device is None:
        return
    named = f"activations_on_device is {run.activations_on_device}"
    if right("recompute") and run.recompute == "full":
        yield f"{named}, but with recompute=full only inputs are kept, which are small: leave one of the two out"
    if right("zero") and run.zero == 3:
        fix = "leave activations_on_device out, or set zero to 2"
        yield f"{named}, but with zero=3 graphs keep weights that come and go: {fix}"
    if right("offload") and run.offload != "none":
        yield f"{named}, but offload is {run.offload!r}, which uses the same way: leave one of the two out"
    if right("mesh") and run.mesh.expert_actors:
        yield f"{named}, but expert actors keep rows of experts by themselves: set mesh.expert_actors to 0"
