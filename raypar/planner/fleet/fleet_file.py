"""The file of ``raypar simulate --cluster``: a cluster with stragglers, slow links, failures and saves, as TOML."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Le
from pydantic import ConfigDict, TypeAdapter, ValidationError

from raypar.actors.bounds import Count, Share
from raypar.actors.machine.files import read_named
from raypar.errors import ConfigError
from raypar.schedules.nearest_name import did_you_mean

_MOST = 1 << 20  # bytes
_MOST_ACTORS = 1_000_000  # times sampled steps, so that what is drawn takes some hundred MiB at most
_EXAMPLES = {"replicas": 64, "actors_per_node": 8, "steps": 10_000}
Seconds = Annotated[float, Ge(0), Le(1e9)]
Factor = Annotated[float, Ge(1), Le(1e3)]


@dataclass(frozen=True)
class Fleet:
    """A cluster and a training on it. All fields but the first three may be left out."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    replicas: Count
    """replicas of the pipeline (dp x cp)"""
    actors_per_node: Count
    """actors on a node, which fail together"""
    steps: Annotated[int, Ge(1), Le(10_000_000)]
    """steps of the training"""
    tensor_ranks: Count = 1
    """actors of a replica's pipeline rank, which wait for one another in every action"""
    reduce_seconds: Seconds = 0.0
    """seconds of the reduction between replicas that no computing hides, in each step"""
    straggler_share: Share = 0.0
    """share of the actors that are slow, all the time"""
    straggler_slowdown: Factor = 1.0
    """how many times as long they take"""
    jitter: Annotated[float, Ge(0), Le(2)] = 0.0
    """by how much every actor differs from step to step: the standard deviation of the logarithm of its durations"""
    slow_link_share: Share = 0.0
    """share of the actors whose link to other pipeline ranks is slow"""
    slow_link_slowdown: Factor = 1.0
    """how many times as long a message over it takes"""
    node_mtbf_hours: Seconds = 0.0
    """mean time between two failures of one node; 0: none fails"""
    restart_seconds: Seconds = 0.0
    """from a failure until all train again from the last checkpoint"""
    save_seconds: Seconds = 0.0
    """for how long a save stops the training"""
    save_every: Annotated[int, Ge(1), Le(10_000_000)] | Literal["young", "daly"] = "daly"
    """steps between two saves, or the formula that says how many"""
    sampled_steps: Annotated[int, Ge(1), Le(10_000)] = 32
    """how many different steps are drawn, from which the training's are taken"""
    seed: Annotated[int, Ge(0), Le(2**63 - 1)] = 0
    """seed of all that is drawn"""


def read_fleet(path: Path, num_ranks: int) -> Fleet:
    """Read a cluster's file.

    Args:
        path: The file.
        num_ranks: Number of pipeline ranks of the schedule.

    Raises:
        ConfigError: It can't be read, or has faults, all of which are listed.
    """
    named = f"--cluster {str(path)!r}"
    try:
        written = tomllib.loads(read_named(path, _MOST).decode())
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError([f"{named} can't be read ({reason}): correct the path or the text"]) from error
    if "each_node" in written:
        why = "it has each_node, as a cluster of raypar plan has: raypar simulate asks how its nodes fail"
        raise ConfigError([f"{named}: {why}, with replicas, actors_per_node, ... (docs/schedules.md)"])
    try:
        fleet = TypeAdapter(Fleet).validate_json(json.dumps(written, default=str))
    except ValidationError as error:
        raise ConfigError([f"{named}: {fault}" for fault in _faults(error)]) from error
    faults = []
    if num_ranks * fleet.replicas * fleet.tensor_ranks * fleet.sampled_steps > _MOST_ACTORS * 32:
        faults.append(f"{named}: more than {_MOST_ACTORS:,} actors: use fewer replicas, or fewer sampled_steps")
    if fleet.node_mtbf_hours and not fleet.save_seconds and isinstance(fleet.save_every, str):
        text = f"{named}: nodes fail, and save_seconds is 0, so that {fleet.save_every} has no interval"
        faults.append(f"{text}: give save_seconds, or save_every in steps")
    ConfigError.raise_if(faults)
    return fleet


def _faults(error: ValidationError) -> list[str]:
    """Say of each field what is wrong with it, and what helps."""
    found = dict[str, str]()  # a field with several types has a fault for each: the first says all
    for one in error.errors():
        name = str(one["loc"][0]) if one["loc"] else "the file"
        found.setdefault(name, _fault(name, one["type"], one["input"], one.get("ctx", {})))
    return list(found.values())


def _fault(name: str, kind: str, given: Any, bounds: Mapping[str, Any]) -> str:
    """Say what is wrong with a field, and what helps."""
    if kind == "missing":
        return f"{name} is missing: give it, as {name} = {_EXAMPLES.get(name, 1)}"
    known = [field.name for field in fields(Fleet)]
    if kind == "unexpected_keyword_argument":
        if isinstance(given, dict):
            return f"[{name}] is a table, and fields stand outside of any: leave its line out"
        return f"there is no {name}: {did_you_mean(name, known, 'known are ' + ', '.join(known))}"
    if name == "save_every":
        return f"save_every is {_spelled(given)}: give a number of steps from 1 on, 'young' or 'daly'"
    if isinstance(given, float) and not math.isfinite(given):
        return f"{name} is {given}: give a finite number"
    if "ge" in bounds or "le" in bounds:
        least, most = bounds.get("ge"), bounds.get("le")
        return f"{name} is {_spelled(given)}: it must be {f'at least {least}' if most is None else f'at most {most}'}"
    if "lt" in bounds:
        return f"{name} is {_spelled(given)}: it must be less than {bounds['lt']}"
    return f"{name} is {_spelled(given)}: {'give a whole number' if 'int' in kind else 'give a number'}"


def _spelled(given: Any) -> str:
    text = str(given).lower() if isinstance(given, bool) else repr(given)
    return text if len(text) <= 60 else f"{text[:60]}..."
