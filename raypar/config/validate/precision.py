"""Check a run's precision against its other fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypar.actors.specs.optim import AdamW, Muon
from raypar.actors.specs.precision import FP16_SMALLEST
from raypar.actors.specs.run import Run


def precision_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield what a run's precision does not combine with, each with its fix.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    precision = run.precision
    if right("precision"):
        yield from precision.faults()
    if right("precision", "loss_scale"):
        yield from run.loss_scale.faults(precision)
    if right("precision", "loss_scale", "nonfinite", "data_parallel") and run.data_parallel == "parameter_server":
        fix = "set data_parallel to 'all_reduce'"
        if precision.is_half:
            yield f"precision.compute is {precision.compute!r}, but parameter servers hold fp32 weights only: {fix}"
        elif run.counts_skips:
            yield f"parameter servers do not skip steps, as loss_scale.use and nonfinite {run.nonfinite!r} ask: {fix}"
    if right("precision", "optim"):
        yield from _eps_faults(run)
    rewinds = right("nonfinite", "folder", "save_every") and run.nonfinite == "rewind"
    if rewinds and (run.folder is None or not run.save_every):
        yield "nonfinite is 'rewind', but no checkpoints are saved on the way: give folder and save_every"


def _eps_faults(run: Run) -> Iterator[str]:
    """Yield a fault if the optimizer's states are fp16, in which its eps is 0."""
    eps = {AdamW: "eps", Muon: "adamw_eps"}.get(type(run.optim), "")
    value, is_all_fp16 = getattr(run.optim, eps, 1.0), run.precision.master == run.precision.compute == "fp16"
    if is_all_fp16 and value <= FP16_SMALLEST / 2:
        yield (
            f"optim.{eps} {value:g} is 0 in fp16, so an update could be infinite: set precision.master to fp32, or "
            f"optim.{eps} to 1e-4"
        )
