"""Faults that are injected on purpose, to see that a run survives them: ``rp.launch(run, chaos=[rp.chaos.kill(...)])``.

A fault happens to one actor, with its name in messages ("pp=1 dp=0"), at a point of one step, counted from 1: before an
action of the actor's row, such as "1B3" or "STEP", or at one of ``POINTS`` (specs.injected_fault). It is the same in
every run, and it happens once, or ``times`` times, even if the step is taken again.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from raypar.actors.errors import CheckpointError
from raypar.actors.known_fields import unknown_faults
from raypar.actors.machine.files import checkpoint_errors, read_named
from raypar.actors.mesh.world import World
from raypar.actors.specs.injected_fault import POINTS, FaultKind, InjectedFault
from raypar.actors.specs.run import Run
from raypar.config.fields import field_faults, value_faults
from raypar.errors import ConfigError
from raypar.schedules.nearest_name import nearest
from raypar.schedules.schedule import Schedule

_MOST = 1 << 20  # bytes of a file of faults
_FORWARD = re.compile(r"\d+F\d+")
_NEEDED = {
    "kind": f"give one of {', '.join(get_args(FaultKind))}",
    "actor": 'name one as messages do, such as "pp=1"',
    "at": f'give an action of the actor\'s row, such as "1B3", or one of {", ".join(POINTS)}',
}


def kill(actor: str, *, at: str, step: int = 1, times: int = 1) -> InjectedFault:
    """Return a SIGKILL to an actor's process.

    Args:
        actor: The actor, such as "pp=1 dp=0".
        at: The action before which it happens, such as "1B3", or "start", "snapshot" or "end".
        step: The step, counted from 1. At "start": 1 for the launch, 2 for the first recovery, and so on.
        times: How often it happens, if the step is taken again.
    """
    return InjectedFault("kill", actor, at, step, times=times)


def stop(actor: str, *, at: str, step: int = 1, times: int = 1) -> InjectedFault:
    """Return a SIGSTOP to an actor's process, which then neither works nor ends. For the arguments see ``kill``."""
    return InjectedFault("stop", actor, at, step, times=times)


def delay(actor: str, *, at: str, step: int = 1, seconds: float, times: int = 1) -> InjectedFault:
    """Return a sleep of an actor, in seconds. For the other arguments see ``kill``."""
    return InjectedFault("delay", actor, at, step, seconds, times)


def raise_(actor: str, *, at: str, step: int = 1, times: int = 1) -> InjectedFault:
    """Return an exception on an actor. For the arguments see ``kill``."""
    return InjectedFault("raise", actor, at, step, times=times)


def corrupt(
    actor: str, *, at: str, step: int = 1, times: int = 1, of: Literal["weight", "activation"] = "weight"
) -> InjectedFault:
    """Return a flip of one bit in an actor: of a weight, or of an activation.

    Args:
        actor: See ``kill``, as for ``step`` and ``times``.
        at: The action before which the bit of a weight flips; for an activation the forward, such as "1F0", in which
            the output of the stage's first layer changes.
        step: The step.
        times: How often.
        of: Whether the bit is of a weight or of an activation.
    """
    return InjectedFault("corrupt", actor, at, step, times=times, of=of)


def drop_node(actor: str, *, at: str, step: int = 1, times: int = 1) -> InjectedFault:
    """Return a SIGKILL to Ray on an actor's node, with which all actors there end. For the arguments see ``kill``."""
    return InjectedFault("drop_node", actor, at, step, times=times)


def faults_in(file: str | Path) -> list[InjectedFault]:
    """Read faults from a TOML file: a table ``[[fault]]`` for each, with the fields of ``InjectedFault``.

    Raises:
        ConfigError: The file can't be read, or a field is wrong; lists all faults.
    """
    try:
        with checkpoint_errors(f"chaos: {str(file)!r} can't be read"):
            raw = read_named(Path(file), _MOST)
        plain = tomllib.loads(raw.decode())
    except CheckpointError as error:
        raise ConfigError(error.faults) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"chaos: {str(file)!r} is no TOML: {error}"]) from error
    listed = plain.get("fault")
    if set(plain) != {"fault"} or not isinstance(listed, list):
        raise ConfigError([f"chaos: {str(file)!r} has no faults: write a table [[fault]] for each, and nothing else"])
    found, wrong = list[InjectedFault](), list[str]()
    for number, one in enumerate(listed, 1):
        if faults := [*_entry_faults(one)]:
            wrong += [f"chaos: fault {number}: {fault}" for fault in faults]
        else:
            found.append(InjectedFault(**one))
    ConfigError.raise_if(wrong)
    return found


def _entry_faults(entry: Any) -> Iterator[str]:
    """Yield the mistakes in a fault of a file."""
    if not isinstance(entry, dict):
        yield f"{entry!r} is no table: write it below a line [[fault]]"
        return
    for field in fields(InjectedFault):
        if field.default is MISSING and field.name not in entry:
            yield f"{field.name} is missing: {_NEEDED[field.name]}"
    yield from unknown_faults(InjectedFault.__name__, entry)
    yield from (fault.text for fault in value_faults(InjectedFault, entry))


def injectable(
    faults: Sequence[InjectedFault], world: World, schedule: Schedule
) -> tuple[list[InjectedFault], list[str]]:
    """Find the actors and actions of faults in a run.

    A unique part of an actor's name suffices: "dp=1" if there is one pipeline rank. If a backward is split, "1B3" is
    its first half, "1I3".

    Args:
        faults: The faults.
        world: The ranks of the run.
        schedule: The schedule of its training step.

    Returns:
        The faults with the names and actions of the run, and the mistakes in the others, which would never happen.
    """
    found, wrong = list[InjectedFault](), list[str]()
    labels = {world.label(rank): rank for rank in range(world.size)}
    for number, fault in enumerate(faults, 1):
        if mistyped := [*field_faults(fault)]:
            wrong += [f"chaos: fault {number}: {one.text}" for one in mistyped]
            continue
        named = [one for one in labels if set(fault.actor.split()) <= set(one.split())] if fault.actor else []
        label = fault.actor if fault.actor in labels else named[0] if len(named) == 1 else None
        if label is None:
            wrong.append(f"chaos: {fault.actor!r} is no one's name: there are {', '.join(named or labels)}")
            if all(_point(fault.at, rank, world, schedule) is None for rank in labels.values()):
                wrong.append(f"chaos: no actor has {fault.at!r}: give an action of its row, or {', '.join(POINTS)}")
        elif (at := _point(fault.at, labels[label], world, schedule)) is None:
            row = " ".join(_row(labels[label], world, schedule))
            wrong.append(f"chaos: {label!r} has no {fault.at!r}: its row is {row}, and any has {', '.join(POINTS)}")
        elif fault.of == "activation" and (fault.kind != "corrupt" or not _FORWARD.fullmatch(at)):
            wrong.append(f'chaos: {fault}: only corrupt changes an activation, in a forward such as "1F0"')
        else:
            found.append(replace(fault, actor=label, at=at))
    return found, wrong


def never_happen(faults: Sequence[InjectedFault], run: Run, taken: int = 0) -> Iterator[str]:
    """Yield a message for each fault that never happens in the steps of a run, with the reason.

    Args:
        faults: The faults, from ``injectable``.
        run: The run.
        taken: Number of steps that it has taken before.
    """
    for fault in faults:
        why = ""
        if fault.at == "start":
            if fault.step > 1 and not run.max_failures:
                why = "actors start again only in a recovery, and max_failures is 0"
        elif fault.step > run.steps:
            why = f"the run has {run.steps} steps"
        elif fault.step <= taken:
            why = f"the run goes on after step {taken}"
        elif fault.at == "snapshot" and not (run.max_failures and run.snapshot_every):
            why = "the run takes no snapshots: set max_failures and snapshot_every"
        elif fault.at == "snapshot" and fault.step % run.snapshot_every:
            why = f"the run takes a snapshot after every {run.snapshot_every} steps"
        if why:
            yield f"chaos: {fault} never happens: {why}"


def _row(rank: int, world: World, schedule: Schedule) -> list[str]:
    """Return the actions of a rank as text."""
    return ["STEP"] if rank in world.server_ranks else [str(action) for action in schedule.rows[world.row(rank)]]


def _point(at: str, rank: int, world: World, schedule: Schedule) -> str | None:
    """Return the action or point of a rank that a text means; None if it has none."""
    there = {*_row(rank, world, schedule), *POINTS}
    return next((one for one in (at, at.replace("B", "I")) if one in there), None)


def __getattr__(name: str) -> object:
    kinds = ("corrupt", "delay", "drop_node", "kill", "raise_", "stop")
    meant = None if name.startswith("_") else nearest(name, kinds)
    raise AttributeError(
        f"rp.chaos has no {name!r}: " + (f"it has {meant!r}" if meant else f"it has {', '.join(kinds)}")
    )
