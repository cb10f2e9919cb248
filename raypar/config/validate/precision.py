"""Rules of a run's precision."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.actors.specs.optim import AdamW, Muon
from raypar.actors.specs.precision import FP16_SMALLEST
from raypar.config.rules import Conflict, Examined, RunRule, RunSetting
from raypar.config.validate.settings import SERVERS


def _dtype_faults(examined: Examined) -> Iterator[str]:
    """Yield what is wrong with the dtypes and the scale of the loss by themselves."""
    run = examined.run
    yield from run.precision.faults()
    yield from run.loss_scale.faults(run.precision)


def _eps_faults(examined: Examined) -> Iterator[str]:
    """Yield a fault if the optimizer's states are fp16, in which its eps is 0."""
    run = examined.run
    eps = {AdamW: "eps", Muon: "adamw_eps"}.get(type(run.optim), "")
    value, is_all_fp16 = getattr(run.optim, eps, 1.0), run.precision.master == run.precision.compute == "fp16"
    if is_all_fp16 and value <= FP16_SMALLEST / 2:
        yield (
            f"optim.{eps} {value:g} is 0 in fp16, so an update could be infinite: set precision.master to fp32, or "
            f"optim.{eps} to 1e-4"
        )


_HALF = RunSetting("precision.is_half", said="precision.compute is {run.precision.compute!r}")
_SKIPS = RunSetting(
    "run",
    lambda run: run.counts_skips and not run.precision.is_half,
    "nonfinite is {run.nonfinite!r}, and loss_scale.use {run.loss_scale.use!r}",
)
_REWINDS = RunSetting("nonfinite", "rewind")
_UNSAVED = RunSetting(
    "run", lambda run: run.folder is None or not run.save_every, "no checkpoints are saved on the way"
)
PRECISION_RULES: tuple[RunRule, ...] = (
    _dtype_faults,
    Conflict(_HALF, SERVERS, "but parameter servers hold fp32 weights only", SERVERS.undo),
    Conflict(_SKIPS, SERVERS, "but parameter servers do not skip steps", SERVERS.undo),
    _eps_faults,
    Conflict(_REWINDS, _UNSAVED, fix="give folder and save_every"),
)
