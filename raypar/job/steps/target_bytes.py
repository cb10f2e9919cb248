"""The bytes of text that the targets of an evaluation stand for."""

from __future__ import annotations

from raypar.actors.data.example_shapes import ExampleError
from raypar.actors.specs.data import Examples, Text
from raypar.actors.specs.run import Run


def target_bytes(run: Run, steps: int, targets: int) -> int | None:
    """Return how many bytes the targets of an evaluation stand for; those that are left out stand for none.

    Args:
        run: The run.
        steps: The number of evaluation steps.
        targets: The number of targets that were counted in them.

    Returns:
        The number; None if data or tokenizer do not say it.
    """
    if not isinstance(run.data, Text | Examples):
        return None
    if run.data.tokenizer is None:
        return None if isinstance(run.data, Text) and run.data.path.endswith(".bin") else targets
    from raypar.actors.data.batches import batch_source  # imports torch
    from raypar.actors.data.tokenizer import Tokenizer
    from raypar.actors.models.base import IGNORED

    try:
        sizes = Tokenizer(run.data.tokenizer).id_bytes
        if sizes is None:
            return None
        source = batch_source(run.data, run.model, run.micro_batch_size, run.microbatches, run.mesh.dp, run.seed)
        counted = total = 0
        for step in range(steps):
            for dp in range(run.mesh.dp):
                for microbatch in range(run.microbatches):
                    (labels,) = source.targets("evaluate", step, microbatch, dp)
                    ids = labels[labels != IGNORED].numpy()
                    counted, total = counted + len(ids), total + int(sizes[ids].sum())
    except (ExampleError, OSError, ValueError, IndexError):  # the files are not on this machine any more
        return None
    return total if counted == targets else None
