"""Types and bounds that several specs use."""

from __future__ import annotations

from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

ProgramName = Literal["train", "evaluate"]
DeviceKind = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto", DeviceKind]

SEND_WINDOW = 8  # sends to one peer that may be under way before an actor waits; every schedule is checked for it
KEPT = 4  # training steps whose events an actor remembers

Count = Annotated[int, Ge(1), Le(10_000_000)]
NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
BucketSize = Annotated[float, Gt(0), Le(1e6)]  # MiB
Share = Annotated[float, Ge(0), Lt(1)]
Steps = Annotated[int, Ge(0)]
