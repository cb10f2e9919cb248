"""Errors that the driver raises."""

from __future__ import annotations

from dataclasses import dataclass

from raypar.actors.errors import FaultsError
from raypar.schedules.drawing.notebook import own_lines

TO_GO_ON = "To go on, "  # the beginning of an error's note with the Python call to continue; commands replace it


class ConfigError(FaultsError, ValueError):
    """The user's mistakes in a run, all of them, each with its fix. Raised before any actor starts.

    Attributes:
        faults: One sentence per mistake.
    """


class RoomError(ConfigError):
    """The cluster has no room for the run's actors, or had none in time: no mistake, and a later try may succeed."""


class UnknownNameError(KeyError):
    """A name that a job does not have. The text lists the names that it has."""

    _render_traceback_ = own_lines

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError's own text is a repr, with quotes around it


class JobError(RuntimeError):
    """The run cannot continue. The text names the actor, its action and the cause. The job's actors have ended."""

    _render_traceback_ = own_lines


@dataclass(frozen=True)
class Death:
    """The known facts about the end of an actor's process.

    Attributes:
        cause: Why it ended, in words; "" if not known, as for a process on a node that does not answer.
        exit_code: Its exit code; None if it ended by a signal, or if not known.
        signal: The signal that ended it, such as "SIGKILL"; "" if none did, or if not known.
        out_of_memory: Whether it was ended because its node was short of memory.
        last_action: The last action that it began, such as "1B3 of step 4"; "" if not known.
        log: The last lines of its log, or those of a crash; none if they are on another node.
        log_file: The file of these lines; "" if there is none on this node.
        is_preempted: Whether its node was preempted, with notice.
    """

    cause: str = ""
    exit_code: int | None = None
    signal: str = ""
    out_of_memory: bool = False
    last_action: str = ""
    log: tuple[str, ...] = ()
    log_file: str = ""
    is_preempted: bool = False

    def __str__(self) -> str:
        text = f"It was {self.cause}" if self.cause else "Why it died is not known"
        text += f"; it died in or after {self.last_action}, the last action that it began." if self.last_action else "."
        if self.log:
            text += f" Its log, {self.log_file}, ends with:\n" + "\n".join(f"    {line}" for line in self.log)
        return text


class ActorDiedError(JobError):
    """An actor's process or node died.

    Args:
        text: The message: the actor, and the operation under way.
        death: The known facts, which become a note; None if there are none.
        rank: Its rank; None if not known.
    """

    def __init__(self, text: str, death: Death | None = None, rank: int | None = None) -> None:
        super().__init__(text)
        self.death, self.rank = death, rank
        if death is not None:
            self.add_note(str(death))


class StalledError(JobError):
    """An actor made no progress for the run's timeout."""


class PreemptedError(JobError):
    """Nodes are being drained, and the run can't go on without them. It was saved, if it has a folder."""


class RayLostError(JobError):
    """Ray's control server, the GCS, is gone, and the run can't go on without it. It was saved, if it has a folder."""


class StepLostError(JobError):
    """A step by hand was lost in a failure that the run has survived. The job goes on with ``job.stepper()``."""


class CallError(JobError):
    """A call that changes no weight, such as ``job.generate``, failed on actors that live. The job goes on."""


class RelayoutLostError(JobError):
    """A relayout was lost in a failure that the run has survived. The job goes on in the layout before."""


class MovedError(RuntimeError):
    """The layout changed while the actors were queried, so that the answers are inconsistent. Query again."""

    _render_traceback_ = own_lines


class NoRoomError(JobError):
    """No node has room for the replacement of a lost actor."""
