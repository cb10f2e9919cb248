"""Types with bounds, for the fields of a run."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen, Predicate

Count = Annotated[int, Ge(1), Le(10_000_000)]
Some = Annotated[int, Ge(0), Le(10_000_000)]  # a count that may be 0
NotNegative = Annotated[float, Ge(0)]
Positive = Annotated[float, Gt(0)]
BucketSize = Annotated[float, Gt(0), Le(1e6)]  # MiB
Share = Annotated[float, Ge(0), Lt(1)]
Probability = Annotated[float, Gt(0), Le(1)]
Step = Annotated[int, Ge(0), Lt(10**15)]  # a number of steps taken, in files
Steps = Annotated[int, Ge(0), Le(10**18)]
Seed = Annotated[int, Ge(0), Le(2**64 - 1)]  # the seeds of torch's and numpy's generators
Word = Annotated[str, MinLen(1), MaxLen(24), Predicate(str.isprintable)]
