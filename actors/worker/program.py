"""A program of a run as one rank performs it."""

from __future__ import annotations

from dataclasses import dataclass

from raypar.actors.data_parallel.stage_weights import Windows
from raypar.actors.pipeline.p2p import Courier
from raypar.schedules.action import Action
from raypar.schedules.schedule import Schedule


@dataclass(frozen=True)
class Program:
    """A program as this rank performs it.

    Attributes:
        schedule: The lowered schedule.
        row: This rank's row of it.
        courier: Sends and receives its messages.
        windows: When sharded weights are whole.
    """

    schedule: Schedule
    row: tuple[Action, ...]
    courier: Courier
    windows: Windows
