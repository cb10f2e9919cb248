"""How far float32 is from float64 in a run, so that rounding is not taken for a fault."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from raypar.actors.specs.run import Run
from raypar.parity.compare import norm_of, relative_error
from raypar.parity.reference import Trained, gradient_name, train_plainly

_TIMES = 4.0  # how many times as far from float64 as plain float32 a right result may be
_ROUNDED = 2.0**-22  # four roundings of float32, relative to what is rounded: a figure, or the addends of a sum
_SAME = 1e-3  # relative difference of losses beyond which float64 computes something else, as by a dtype in the model


@dataclass(frozen=True)
class Rounding:
    """A run in float64, and in plain float32 with its microbatches added in several orders.

    Attributes:
        exact: The run in float64, by name of the figure or tensor.
        plain: The run in float32, a mapping for each order.
        addends: Of sums over microbatches, by name: the sum of the norms of what is added.
    """

    exact: Mapping[str, Tensor]
    plain: tuple[Mapping[str, Tensor], ...]
    addends: Mapping[str, float]

    def error(self, what: str, found: Tensor, scale: float | None = None) -> float:
        """Return how far a figure or tensor is from float64.

        Args:
            what: Its name.
            found: It itself.
            scale: What the distance is relative to; None for the norm in float64.
        """
        return relative_error(found, self.exact[what], scale)

    def allowed(self, what: str, scale: float | None = None) -> float:
        """Return how far from float64 a right figure or tensor may be, relative to ``scale``; see ``error``."""
        rounded = [relative_error(plain[what], self.exact[what], scale) for plain in self.plain]
        norm = norm_of(self.exact[what]) if scale is None else scale
        return max(_TIMES * max(rounded), _ROUNDED * max(1.0, self.addends.get(what, 0.0) / (norm or 1.0)))


def rounding_of(run: Run, plain: Trained) -> Rounding | None:
    """Train a run in float64, and in float32 with its microbatches in two more orders.

    An order in which the microbatches of the first step have other losses does not count: their forwards change a state
    of the model that others read.

    Args:
        run: The run.
        plain: What plain float32 makes of it.

    Returns:
        How far float32 is from float64; None where layers compute in half precision, or where the model can't run in
        float64, or computes something else there.
    """
    if run.precision.is_half:
        return None
    log = logging.getLogger(__name__)
    try:
        exact = train_plainly(run, exact=True)
    except Exception as error:  # of any kind: the user's layers raise it
        log.warning("the model can't run in float64 (%s: %s): judged beside float32 alone", type(error).__name__, error)
        return None
    if not all(map(_alike, exact.forwards, plain.forwards)):
        log.warning("the model has other losses in float64: judged beside float32 alone")
        return None
    count = run.microbatches * run.mesh.dp
    orders = [[*range(count)][::-1], [*range(0, count, 2), *range(1, count, 2)]]
    others = [train_plainly(run, order) for order in orders]
    alike = [plain, *(other for other in others if other.forwards == plain.forwards)]
    addends = {gradient_name(name): size for name, size in exact.addends.items()}
    return Rounding(exact.figures(), tuple(one.figures() for one in alike), addends)


def _alike(one: float, other: float) -> bool:
    return one == other or abs(one - other) <= _SAME * abs(other) or (math.isnan(one) and math.isnan(other))
