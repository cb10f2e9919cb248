"""Runs with planted faults: wrong values of single fields, and values of several fields that do not go together."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import raypar as rp
from raypar.config.mended import changed
from tests.support.covering import Row
from tests.support.features import FEATURES, faults_of, needed, run_of_row
from tests.support.fixes import settings

# Values that do not go together, which the features have not.
TOGETHER: tuple[Mapping[str, Any], ...] = (
    {"early_stop": 2},
    {"keep_last": 2},
    {"save_every": 2},
    {"spares": 1},
    {"min_dp": 2},
    {"buddy_every": 3, "snapshot_every": 2, "max_failures": 1},
    {"order": "dynamic"},
    {"optim.warmup": 1000},
    {"optim.decay": "wsd", "optim.decay_steps": 1000},
    {"overflow_format": "fp16"},
    {"loss_scale.init": 0.5},
    {"loss_scale.overflow": "clamp"},
    {"precision": rp.Precision("fp16", reduce="fp32", master="bf16")},
    {"precision": rp.Precision("bf16", reduce="fp16")},
    {"ema": 0.9, "precision": rp.Precision("bf16", master="bf16")},
    {"model.hidden": 18, "model.heads": 4},
    {"model.positions": "rope", "model.hidden": 12, "model.heads": 4},
    {"track": ("ray",)},
    {"unit": "tokens"},
    {"split": (1, 1, 1)},
    {"split": (9,)},
    {"recompute": ("full",)},
    {"schedule": "1f2b"},
    {"schedule": "gone.csv"},
    {"folder": "a b"},
    {"optim.no_decay": ("nothing.*",)},
    {"optim.rates": {"nothing.*": 0.5}},
    {"tile": {"nothing.*": 2}},
    {"offload": "none", "offload_folder": "gone/folder"},
    {"mesh.etp": 1},
    {"mesh.shard": 2},
)
WRONG_KINDS: tuple[Any, ...] = ("x", 1.5, True, None, -1, 0, 7, 10**9, float("nan"), (1, "a"), {"a": -1.0}, [], b"x")
UNDECLARED = {"kind"}  # constants, which say of what kind a part is


KINDS: tuple[Row, ...] = (
    {},
    {"mesh.pp": 2, "mesh.dp": 2},
    {"model.kind": "llama", "model.positions": "rope", "optim.kind": "adamw", "data": "text", "model.vocab": 259},
    {"model.moe": "softmax", "mesh.dp": 2, "mesh.ep": 2},
    {"model.lora": 3, "data": "packed", "model.vocab": 259, "optim.kind": "adamw"},
    {"mesh.tp": 2, "optim.kind": "muon"},
)


@dataclass(frozen=True)
class Plant:
    """A planted fault.

    Attributes:
        features: Values of features, by name.
        values: Values of other fields, by path.
        faults: What is wrong with a run that has this fault alone.
    """

    features: Row
    values: Mapping[str, Any]
    faults: tuple[str, ...]

    @property
    def touched(self) -> frozenset[str]:
        """All fields that have other values because of it, and those that its faults name, without their parts."""
        words = {word for fault in self.faults for word in re.findall(r"[a-z_]+", fault.partition(": it must be")[0])}
        paths = {part for path in (*self.features, *self.values) for part in path.split(".")}
        words |= {word.removeprefix("rank_") for word in words | paths}
        for those, depended in DEPENDED:
            words |= depended if words & those else set()
        return frozenset(paths - PARTS | (words & FIELDS))

    def overlaps(self, other: Plant) -> bool:
        """Return whether a fault has fields in common with another one."""
        pairs = [(f"{one}.", f"{two}.") for one in self.paths for two in other.paths]
        if any(self.is_about(path) for path in PARTS & {*other.paths}) or any(
            other.is_about(path) for path in PARTS & {*self.paths}
        ):
            return True
        within = any(one.startswith(two) or two.startswith(one) for one, two in pairs)
        return within or bool(self.touched & other.touched)

    def is_about(self, part: str) -> bool:
        """Return whether its faults name fields of a part of a run, such as data."""
        return any(f"{part}." in fault for fault in self.faults)

    @property
    def paths(self) -> list[str]:
        """The fields and features that have other values because of it."""
        return [*self.features, *self.values]


@dataclass(frozen=True)
class Wrong:
    """A run with planted faults.

    Attributes:
        run: The run.
        before: The run without them.
        plants: The faults.
    """

    run: rp.Run
    before: rp.Run
    plants: tuple[Plant, ...]

    def missing(self) -> list[str]:
        """Return the planted faults that the run's check does not name."""
        faults = rp.faults(self.run)
        rules = set(map(rule_of, faults))
        heads = {fault.partition(",")[0] for fault in faults if ", but " in fault}  # the same value is wrong twice
        planted = [fault for plant in self.plants for fault in plant.faults]
        return [fault for fault in planted if rule_of(fault) not in rules and fault.partition(",")[0] not in heads]


def rule_of(fault: str) -> str:
    """Return a fault without its numbers, names and values."""
    return re.sub(r"'[^']*'|[\d.,]+|\([^)]*\)|\b(True|False|None|one|two)\b", "#", fault)


def wrong_run(case: int) -> Wrong:
    """Return the run of a case, with one to five faults that have no field in common."""
    draw = random.Random(case)
    row = {name: values[0] for name, values in FEATURES.items()} | draw.choice(KINDS)
    assert not faults_of(row), faults_of(row)
    plants: list[Plant] = []
    wanted = draw.randint(1, 5)
    for _ in range(200):
        plant = _plant(row, draw)
        if plant is not None and not any(plant.overlaps(other) for other in plants):
            plants.append(plant)
        if len(plants) == wanted:
            break
    features = {name: value for plant in plants for name, value in plant.features.items()}
    values = {path: value for plant in plants for path, value in plant.values.items()}
    return Wrong(_run_of(row | features, values), run_of_row(row), tuple(plants))


def _plant(row: Row, draw: random.Random) -> Plant | None:
    """Return a fault that can be planted in a run; None if what was drawn is none."""
    features: Row = {}
    values: dict[str, Any] = {}
    kind = draw.random()
    if kind < 0.4:
        paths = [path for path, _ in settings(run_of_row(row)) if path.rpartition(".")[2] not in UNDECLARED]
        values = {draw.choice(paths): draw.choice(WRONG_KINDS)}
    elif kind < 0.6:
        values = dict(draw.choice(TOGETHER))
    else:
        features = {name: draw.choice(FEATURES[name]) for name in draw.sample(sorted(FEATURES), 2)}
        if any(needed(name, row | features) for name in features):
            return None
    try:
        faults = rp.faults(_run_of(row | features, values))
    except (AttributeError, TypeError):  # a part that the run has not
        return None
    return _minimal(row, Plant(features, values, tuple(faults))) if faults else None


def _minimal(row: Row, plant: Plant) -> Plant:
    """Return a fault without the values that it does not need."""
    for path in plant.paths:
        features = {name: value for name, value in plant.features.items() if name != path}
        values = {name: value for name, value in plant.values.items() if name != path}
        if len(plant.paths) > 1 and tuple(rp.faults(_run_of(row | features, values))) == plant.faults:
            return _minimal(row, Plant(features, values, plant.faults))
    return plant


def _run_of(row: Row, values: Mapping[str, Any]) -> rp.Run:
    run = run_of_row(row)
    for path, value in values.items():
        run = changed(run, path, value)
    return run


# What faults that name one of these fields depend on without naming it.
DEPENDED = (
    ({"no_decay", "rates", "tile", "expert_order", "recompute", "split"}, {"moe", "lora", "layers", "model"}),
    ({"split"}, {"pp", "chunks"}),
    ({"heads", "positions"}, {"head_width", "hidden"}),
)
PARTS = frozenset({"model", "optim", "data", "mesh"})
FIELDS = frozenset(name.rpartition(".")[2] for name in (*FEATURES, *dict(settings(rp.Run())))) - PARTS
