"""Types of a run's fields, and constants that the driver and the actors share."""

from __future__ import annotations

from typing import Literal

ProgramName = Literal["train", "evaluate"]
DeviceKind = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto", DeviceKind]
Backward = Literal["auto", "whole", "split"]  # which backwards are split into I and W
Tracker = Literal["tensorboard", "wandb", "mlflow", "ray"]
Split = Literal["even", "balanced"] | tuple[int, ...]  # layers to stages: a rule, or a count for each stage
Context = Literal["ring", "all_gather", "ulysses", "rsa"]  # how attention reaches all tokens of a divided sequence

SEND_WINDOW = 8  # sends to one peer that may be under way before an actor waits; every schedule is checked for it
KEPT = 4  # number of training steps whose events an actor keeps
ELEMENTS = ("tokens", "targets")  # units of throughput that are elements of the targets; all others are samples
