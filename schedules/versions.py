"""Versions of weights in an asynchronous schedule: the one that a microbatch computes with, and those a stage keeps.

A stage begins with version 0 of its weights, and ``STEPk`` makes version k + 1.
A forward computes with the version of the ``USE`` before it (version 0 if there is none), and its backward with the
same one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raypar.schedules.action import Action, Op
from raypar.schedules.rules import MAKES_GRADIENTS
from raypar.schedules.schedule import Schedule


def versions_used(row: Sequence[Action], stage: int) -> dict[int, int]:
    """Return, by microbatch, the version of a stage's weights that its forward and its backward compute with."""
    found: dict[int, int] = {}
    version = 0
    for where, op, number, _ in row:
        if where == stage and number is not None:
            if op is Op.USE:
                version = number
            elif op is Op.F:
                found[number] = version
    return found


def versions_in(schedule: Schedule, stage: int) -> dict[int, int]:
    """Return the result of ``versions_used`` for all replicas of a stage together."""
    rows = schedule.rows_of(schedule.placement[stage])
    return {key: version for row in rows for key, version in versions_used(schedule.rows[row], stage).items()}


class Versions:
    """The versions of one stage's weights that are kept while its row is performed.

    A version is kept while it is the newest one, and as long as a microbatch that uses it has its backward to come.

    Args:
        row: The row of the stage's rank.
        stage: The stage.

    Attributes:
        used: By microbatch, the version that it computes with.
        newest: The newest version.
    """

    def __init__(self, row: Sequence[Action], stage: int) -> None:
        self._stage, self.used = stage, versions_used(row, stage)
        self._left = Counter(self.used.values())  # by version, the microbatches that need it
        self._kept = {0}
        self.newest = 0

    @property
    def kept(self) -> tuple[int, ...]:
        """The versions that are kept, the oldest first."""
        return tuple(sorted(self._kept))

    def is_needed(self, version: int) -> bool:
        """Return whether a microbatch that uses a version has its backward to come."""
        return self._left[version] > 0

    def perform(self, action: Action) -> None:
        """Count an action of the row; actions of other stages change nothing."""
        stage, op, number, _ = action
        if stage != self._stage or number is None:
            return
        if op is Op.STEP:
            before, self.newest = self.newest, number + 1
            self._kept.add(self.newest)
            self._drop(before)
        elif op in MAKES_GRADIENTS and number in self.used:
            self._left[self.used[number]] -= 1
            self._drop(self.used[number])

    def _drop(self, version: int) -> None:
        """Drop a version that no microbatch needs, unless it is the newest."""
        if version != self.newest and not self.is_needed(version):
            self._kept.discard(version)


def most_versions(schedule: Schedule) -> tuple[int, ...]:
    """Return the most versions of its weights that each stage keeps at once; 1 each if the schedule is synchronous."""
    if not schedule.stream:
        return (1,) * schedule.num_stages
    most = []
    for stage, rank in enumerate(schedule.placement):
        count = 1
        for row in schedule.rows_of(rank):
            versions = Versions(schedule.rows[row], stage)
            for action in schedule.rows[row]:
                versions.perform(action)
                count = max(count, len(versions.kept))
        most.append(count)
    return tuple(most)


@dataclass(frozen=True, slots=True)
class Staleness:
    """The age of the weights with which an asynchronous schedule computes gradients.

    Attributes:
        versions: By stage, the most versions that it keeps.
        delays: By stage, the fewest and the most steps by which a gradient is older than the weights that it changes.
        mixed: The first microbatch for which two stages use unequal versions: (microbatch, stage, its version, other
            stage, its version); None if there is none.
    """

    versions: tuple[int, ...]
    delays: tuple[tuple[int, int], ...]
    mixed: tuple[int, int, int, int, int] | None

    def lines(self) -> list[str]:
        """Return the figures as text, a sentence a line."""
        oldest = " ".join(str(most) if least == most else f"{least}-{most}" for least, most in self.delays)
        lines = [
            f"versions of weights kept by stage: {' '.join(map(str, self.versions))}",
            f"steps by which the weights of a gradient are older than those that it changes, by stage: {oldest}",
        ]
        if self.mixed is None:
            return [*lines, "all stages compute a microbatch with the same version"]
        microbatch, stage, version, other, its = self.mixed
        trace = f"{stage}F{microbatch} computes with version {version}, {other}F{microbatch} with version {its}"
        return [*lines, f"stages compute a microbatch with unequal versions: {trace}"]


def staleness(schedule: Schedule) -> Staleness:
    """Return the age of the weights with which a schedule computes gradients.

    Args:
        schedule: The schedule, lowered or not. A synchronous one has one version and no delay.
    """
    used = [versions_in(schedule, stage) for stage in range(schedule.num_stages)]
    a_step = schedule.microbatches_a_step
    delays = [[microbatch // a_step - version for microbatch, version in one.items()] for one in used]
    bounds = (
        tuple((min(one, default=0), max(one, default=0)) for one in delays)
        if schedule.stream
        else ((0, 0),) * len(used)
    )
    return Staleness(most_versions(schedule), bounds, next(_mixed(used), None))


def _mixed(used: Sequence[dict[int, int]]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the microbatches for which two neighbouring stages use unequal versions, as ``Staleness.mixed``."""
    for microbatch, version in sorted(used[0].items()):
        for stage in range(1, len(used)):
            before, its = used[stage - 1].get(microbatch, version), used[stage].get(microbatch, version)
            if before != its:
                yield microbatch, stage - 1, before, stage, its
                break
