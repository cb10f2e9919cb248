"""How much of the peak of its GPUs a run reaches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run
from raypar.planner.cost_model import flops_of_token
from raypar.planner.hardware.peak_flops import peak_of_gpu
from raypar.schedules.float_sum import float_sum


@dataclass(frozen=True)
class Utilisation:
    """The FLOPs of a sample of a run, as shares of what its GPUs could do in a second.

    Attributes:
        model: Of the FLOPs that the model needs: a forward, and twice as much in the backward.
        hardware: Of these and of what is computed again in the backward.
    """

    model: float
    hardware: float

    def mfu(self, samples: int, seconds: float) -> float:
        """Return the model FLOPs utilisation of a step of so many samples, 0 to 1."""
        return self.model * samples / seconds

    def hfu(self, samples: int, seconds: float) -> float:
        """Return the hardware FLOPs utilisation of a step of so many samples, 0 to 1."""
        return self.hardware * samples / seconds


def utilisation_of(run: Run, gpus: Iterable[tuple[str, str]]) -> Utilisation | None:
    """Return what a run's samples are of the peak of its GPUs; None if the model's FLOPs or a peak are not known.

    Args:
        run: The run. The FLOPs of the user's own layers are not known.
        gpus: Of each actor what torch calls its GPU, and its identity, by which one that actors share counts once; ""
            on CPUs, which have no data sheet.

    Source: Chowdhery et al. 2022, appendix B; Korthikanti et al. 2022, section 6.3.
    """
    if not isinstance(run.model, Transformer):
        return None
    peaks = [peak_of_gpu(name, run.precision.layers) for name, _ in {*gpus}]
    if not peaks or None in peaks:
        return None
    whole = float_sum(peak for peak in peaks if peak is not None) / run.model.seq
    needed, done = flops_of_token(run.model, run.recompute)
    return Utilisation(needed / whole, done / whole)
