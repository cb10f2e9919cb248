"""Check a run's precision against its other fields."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypar.actors.specs.optim import AdamW, Muon
from raypar.actors.specs.precision import FP16_SMALLEST
from raypar.actors.specs.run import Run


def precision_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield what a run's precision does not go with, each with its fix.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    if not right("precision", "loss_scale", "nonfinite", "data_parallel", "optim", "zero", "folder", "save_every"):
        return
    precision = run.precision
    yield from precision.faults()
    yield from run.loss_scale.faults(precision)
    if run.data_parallel == "parameter_server":
        fix = "set data_parallel to 'all_reduce'"
        if precision.is_half:
            yield f"precision.compute is {precision.compute!r}, but parameter servers hold fp32 weights only: {fix}"
        elif run.counts_skips:
            yield f"parameter servers do not skip steps, as loss_scale.use and nonfinite {run.nonfinite!r} ask: {fix}"
    eps = {AdamW: "eps", Muon: "adamw_eps"}.get(type(run.optim), "")
    value, is_all_fp16 = getattr(run.optim, eps, 1.0), precision.master == precision.compute == "fp16"
    if is_all_fp16 and value <= FP16_SMALLEST / 2:
        yield (
            f"optim.{eps} {value:g} is 0 in fp16, so an update could be infinite: set precision.master to fp32, or "
            f"optim.{eps} to 1e-4"
        )
    if run.nonfinite == "rewind" and (run.folder is None or not run.save_every):
        yield "nonfinite is 'rewind', but no checkpoints are saved on the way: give folder and save_every"
