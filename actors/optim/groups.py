"""The parameter group of a weight: its optimizer, share of the learning rate, and weight decay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from raypar.actors.specs.optim import AnyOptimizer, Muon


class Rule(NamedTuple):
    """The rule by which a weight is updated. Weights with the same rule are one parameter group.

    Attributes:
        kind: The optimizer. With a Muon this is "muon" for the matrices of hidden layers, else "adamw".
        rate: Factor of the run's learning rate.
        weight_decay: The weight decay.
    """

    kind: Literal["adamw", "sgd", "muon"]
    rate: float
    weight_decay: float


def rule_of(spec: AnyOptimizer, name: str, dims: int) -> Rule:
    """Return the rule of a weight.

    Args:
        spec: The optimizer's settings.
        name: Logical name of the weight.
        dims: Its number of dims.
    """
    rate = next((rate for pattern, rate in spec.rates.items() if fnmatchcase(name, pattern)), 1.0)
    decays = dims >= 2 and not is_named(name, spec.no_decay)
    weight_decay = spec.weight_decay if decays else 0.0
    if isinstance(spec, Muon) and not is_matrix(spec, name, dims):
        return Rule("adamw", rate * (1.0 if spec.adamw_lr is None else spec.adamw_lr / spec.lr), weight_decay)
    return Rule(spec.kind, rate, weight_decay)


def is_matrix(spec: Muon, name: str, dims: int) -> bool:
    """Return whether Muon itself updates a weight of this logical name and number of dims, not its AdamW."""
    return dims == 2 and not is_named(name, spec.adamw)


def optimizer_patterns(spec: AnyOptimizer) -> Iterator[tuple[str, str]]:
    """Yield every pattern of names in an optimizer's settings: (field, pattern)."""
    yield from (("no_decay", pattern) for pattern in spec.no_decay)
    yield from (("rates", pattern) for pattern in spec.rates)
    if isinstance(spec, Muon):
        yield from (("adamw", pattern) for pattern in spec.adamw)


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether one of some shell patterns matches a logical name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)
