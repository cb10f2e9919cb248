"""A fault that is injected on purpose, to test that a run survives it. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from raypar.actors.known_fields import known_fields

FaultKind = Literal["kill", "stop", "delay", "raise", "corrupt", "drop_node"]
"""kill: SIGKILL to the actor's process; stop: SIGSTOP; delay: it sleeps; raise: an exception; corrupt: a bit of a
weight or of an activation flips; drop_node: SIGKILL to Ray on the actor's node, with which all actors there end"""

POINTS = ("start", "end", "snapshot", "report")
"""points of an actor's life besides the actions of its row: it joins its groups, which is in no step; its step is over;
its snapshot is copied, but not marked as whole yet; its snapshot is taken, but its report is not sent"""


@known_fields()
@dataclass(frozen=True)
class InjectedFault:
    """A fault of one actor, at one point of one step.

    Attributes:
        kind: What happens.
        actor: The actor, as messages name it, such as "pp=1 dp=0".
        at: An action of its row, such as "1B3" or "STEP", before which it happens; or one of ``POINTS``.
        step: The step, counted from 1. At "start": 1 for the launch, 2 for the first recovery, and so on.
        seconds: How long a delay takes.
        times: How often it happens, if the step is taken again.
        of: Where a bit flips: in a weight; or, in a forward such as "1F0", in the output of the stage's first layer.
    """

    kind: FaultKind
    actor: str
    at: str
    step: Annotated[int, Ge(1)] = 1
    seconds: Annotated[float, Ge(0.0), Le(1e6)] = 0.0
    times: Annotated[int, Ge(1), Le(10**6)] = 1
    of: Literal["weight", "activation"] = "weight"

    def __str__(self) -> str:
        often = f", {self.times} times" if self.times > 1 else ""
        what = " an activation of" if self.of == "activation" else ""
        return f"{self.kind}{what} {self.actor!r} at {self.at} of step {self.step}{often}"
