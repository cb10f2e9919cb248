"""What each actor of a run takes of its node, and on which nodes it may be."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Gt, Le, MaxLen, MinLen, Predicate

from raypar.actors.bounds import Positive
from raypar.actors.known_fields import known_fields

PlacementStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)\s*")
_UNITS = {"B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}iB": 1024**power for power, letter in enumerate("KMGT", 1)}
_OF_FIELDS = {"CPU": "cpus", "GPU": "gpus", "memory": "memory"}  # Ray's names of what has a field of its own


def is_size(text: str) -> bool:
    """Return whether a text is a number of bytes with its unit, as "8GiB" or "500MB"."""
    return num_bytes(text) > 0


def num_bytes(text: str) -> int:
    """Return the number of bytes that a text means, as "8GiB"; 0 if it means none."""
    found = _SIZE.fullmatch(text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else 0


Size = Annotated[str, Predicate(is_size)]
Name = Annotated[str, MinLen(1), MaxLen(256), Predicate(str.isprintable)]


@known_fields(num_cpus="cpus", num_gpus="gpus", resources="custom", label_selector="labels")
@dataclass(frozen=True)
class Resources:
    """What each actor reserves on its node in Ray, and which nodes may run it."""

    cpus: Annotated[float, Gt(0), Le(1e6)] = 1.0
    """CPUs; an actor computes with as many threads, one at least, unless the run's threads say otherwise"""
    gpus: Annotated[float, Gt(0), Le(1)] | None = None
    """a GPU, or a part of one; None: as the run's device says"""
    memory: Size | None = None
    """memory of the node with its unit, as 8GiB, which Ray sets aside and does not enforce; None: none is set aside"""
    custom: Mapping[Name, Positive] = field(default_factory=dict, hash=False)
    """resources of your cluster's own, as started with ray start --resources, and how much of each"""
    accelerator_type: Name | None = None
    """kind of accelerator that the node must have, by Ray's name, as A100"""
    labels: Mapping[Name, Name] = field(default_factory=dict, hash=False)
    """labels that the node must have, and the value of each: a word, !word, in(a,b) or !in(a,b), as Ray selects"""
    placement_strategy: PlacementStrategy = "PACK"
    """where actors go, a tensor group as a whole: PACK on few nodes, those that talk most together; SPREAD over nodes;
    STRICT_PACK all on one; STRICT_SPREAD each on another node. Those that replace one that has failed go anywhere"""

    def __str__(self) -> str:
        """Say what an actor takes and where, as "2 CPUs and 8GiB of memory on nodes with region=us-west"."""
        amounts = [f"{self.cpus:g} CPU{'s' * (self.cpus != 1)}"]
        amounts += [] if self.gpus is None else [f"{self.gpus:g} GPU{'s' * (self.gpus != 1)}"]
        amounts += [] if self.memory is None else [f"{self.memory} of memory"]
        amounts += [f"{amount:g} {name}" for name, amount in self.custom.items()]
        where = [] if self.accelerator_type is None else [self.accelerator_type]
        where += [f"{name}={value}" for name, value in self.labels.items()]
        on = f" on nodes with {' and '.join(where)}" if where else ""
        placed = "" if self.placement_strategy == "PACK" else f", placed by {self.placement_strategy}"
        return f"{' and '.join(amounts)}{on}{placed}"

    @property
    def threads(self) -> int:
        """Number of threads that an actor with these CPUs computes with."""
        return max(1, int(self.cpus))

    @property
    def others(self) -> dict[str, float]:
        """What an actor takes besides CPUs and GPUs, by Ray's names."""
        found = dict(self.custom)
        if self.memory is not None:
            found["memory"] = num_bytes(self.memory)
        if self.accelerator_type is not None:
            found[f"accelerator_type:{self.accelerator_type}"] = 0.001  # the amount that Ray itself reserves
        return found

    def faults(self) -> Iterator[str]:
        """Yield what is wrong with several fields together, each with its fix."""
        for name in self.custom:
            if name in _OF_FIELDS:
                yield f"resources.custom has {name!r}, which has a field of its own: set resources.{_OF_FIELDS[name]}"
        amounts = {f"resources.custom[{name!r}]": amount for name, amount in self.custom.items()}
        for name, amount in ({"resources.cpus": self.cpus} | amounts).items():
            if amount > 1 and amount != int(amount):
                yield f"{name} is {amount:g}, but above 1 Ray takes whole numbers only: set it to {int(amount)}"
