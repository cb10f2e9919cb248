"""The largest microbatch that fits: by the forecast of memory, and then by the memory of some steps on actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from raypar.actors.machine.this_machine import computes_here, free_memory
from raypar.actors.specs.data import Text
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.config.arguments import checked_arguments
from raypar.config.run import check_run, unrecorded
from raypar.errors import ConfigError, JobError
from raypar.planner.memory.worker import worker_memory
from raypar.planner.prediction import before_run
from raypar.planner.sizes.sized_run import SizedRun
from raypar.schedules.formatting import size

#: Takes steps of a run and returns the largest memory of its actors in them, in bytes; None if that ran out.
Probe = Callable[[Run], int | None]

_STEPS = 3  # of a probe: the optimizer's state is whole after the first one, and allocators settle


@dataclass(frozen=True)
class Fitted:
    """A run whose microbatch fits.

    Attributes:
        run: The run, with as many samples in a step as before.
        findings: The sizes that were tried, with forecast and measurement, a sentence each.
    """

    run: Run
    findings: Sequence[str]


def measured_peak(run: Run) -> int | None:
    """Take some steps of a run on actors that end then, and return the largest memory of one in them, in bytes.

    Returns:
        The bytes; None if the memory of a device ran out.
    """
    from raypar.job.launch import launch  # imports torch and Ray

    try:
        with launch(replace(unrecorded(run), steps=max(run.steps, _STEPS))) as job:
            return max(max(job.step().peak_memory) for _ in range(_STEPS))
    except JobError as error:
        if "out of memory" in str(error).lower():
            return None
        raise


@checked_arguments
def fit_microbatch(run: Run, room: int | None = None, probe: Probe | None = measured_peak) -> Fitted:
    """Return a run with the largest microbatch that fits its actors, of those that leave a microbatch for each rank.

    A step has the samples that it had: with larger microbatches there are fewer. Losses and gradients differ by
    floating-point sums only, if there is no dropout, whose masks are those of a microbatch.

    Args:
        run: The run, which has no faults.
        room: Bytes of memory for each actor; None: an equal part of what is free here.
        probe: Measures steps of the run, with a smaller microbatch if they take more; None: the forecast decides.

    Raises:
        ConfigError: Not even microbatches of one sample fit, the memory is not known, or the data are not Text.
        JobError: A probe failed.
    """
    if not isinstance(run.data, Text):
        raise ConfigError(
            ["a microbatch is chosen for data=Text, of which a step takes the same samples however divided"]
        )
    room = _room(run) if room is None else room
    findings = list[str]()
    for each in _sizes(run):
        forecast = _forecast(each)
        name = f"{each.microbatches} microbatches x {each.micro_batch_size} samples"
        if forecast > room:
            findings.append(f"{name}: forecast {size(forecast)}, more than {size(room)}")
            continue
        if probe is None:
            return Fitted(each, [*findings, f"{name}: forecast {size(forecast)}, within {size(room)}"])
        measured = probe(each)
        if measured is None:
            findings.append(f"{name}: forecast {size(forecast)}, but the memory ran out")
            continue
        much = "within" if measured <= room else "more than"
        findings.append(f"{name}: forecast {size(forecast)}, measured {size(measured)}, {much} {size(room)}")
        if measured <= room:
            return Fitted(each, findings)
    raise ConfigError(
        [f"no microbatch fits: {'; '.join(findings)}: use more actors, recompute, or a higher level of zero"]
    )


def _sizes(run: Run) -> Iterator[Run]:
    """Yield the run with every division of its samples into microbatches, the largest microbatches first."""
    samples = run.microbatches * run.micro_batch_size
    least = min(run.mesh.pp, run.microbatches)  # fewer than there are pipeline ranks would leave some idle
    for count in range(least, samples + 1):
        if samples % count == 0:
            each = replace(run, microbatches=count, micro_batch_size=samples // count)
            try:
                check_run(each)
            except ConfigError:  # a schedule or a grid that such numbers do not fit
                continue
            yield each


def _forecast(run: Run) -> int:
    """Return the bytes of the largest actor."""
    sized = SizedRun.of(run, check_run(run)["train"])
    predicted = before_run(sized)
    return max(one.total for one in worker_memory(sized, predicted.timeline, predicted.process))


def _room(run: Run) -> int:
    """Return the bytes for each actor that are free here. Raises ConfigError if they are not known."""
    free = free_memory() if computes_here(run.device) else None
    if free is None:
        raise ConfigError(
            ["the memory of the actors is not known here: give room, the bytes that each one may take (--room, in GiB)"]
        )
    return free // world_of(run).size
