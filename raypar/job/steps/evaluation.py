"""The loss on validation data, of some steps without an update, and when it has stopped falling.

Also the number of bytes of text of an evaluation's targets.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product, repeat
from typing import Any

from raypar.actors.data.tokenizers.example_shapes import ExampleError
from raypar.actors.specs.data import Batches, Examples, Text
from raypar.actors.specs.model import Layers
from raypar.actors.specs.results import losses_of, mean_loss
from raypar.actors.specs.run import Run
from raypar.errors import ConfigError
from raypar.job.steps.averages import demand_averages
from raypar.reporting.evaluation import Evaluation, are_tokens, is_cross_entropy


def target_bytes(run: Run, steps: int, targets: int) -> int | None:
    """Return the number of bytes of text of an evaluation's targets; ignored targets count none.

    Args:
        run: The run.
        steps: The number of evaluation steps.
        targets: The number of targets that were counted in them.

    Returns:
        The number; None if data or tokenizer do not have it.
    """
    if not isinstance(run.data, Text | Examples):
        return None
    if run.data.tokenizer is None:
        return None if isinstance(run.data, Text) and run.data.path.endswith(".bin") else targets
    from raypar.actors.data.batches import batch_source  # imports torch
    from raypar.actors.data.tokenizers.tokenizer import Tokenizer
    from raypar.actors.models.base import IGNORED

    try:
        sizes = Tokenizer(run.data.tokenizer).id_bytes
        if sizes is None:
            return None
        source = batch_source(run.data, run.model, run.micro_batch_size, run.microbatches, run.mesh.dp, run.seed)
        counted = total = 0
        for step, dp, microbatch in product(range(steps), range(run.mesh.dp), range(run.microbatches)):
            (labels,) = source.targets("evaluate", step, microbatch, dp)
            ids = labels[labels != IGNORED].numpy()
            counted, total = counted + len(ids), total + int(sizes[ids].sum())
    except (ExampleError, OSError, ValueError, IndexError):  # the files are not on this machine any more
        return None
    return total if counted == targets else None


class Evaluations:
    """The evaluations of a run.

    Args:
        run: The run.

    Attributes:
        run: The run, as it goes on in the present layout.
    """

    def __init__(self, run: Run) -> None:
        self.run, self._losses = run, dict[int, float]()

    @property
    def every(self) -> int:
        """Number of steps between two evaluations in training; 0 if there are none."""
        return self.run.eval_every if self._has_data else 0

    def is_due(self, step: int) -> bool:
        """Return whether the run asks for an evaluation after ``step`` steps; after its last one it asks for none."""
        return bool(self.every) and step % self.every == 0 and step < self.run.steps

    def next_due(self, step: int, last: int) -> int:
        """Return the number of steps after which the next evaluation is due, up to ``last``."""
        return min(last, (step // self.every + 1) * self.every) if self.every else last

    def begin(self, earlier: Mapping[int, float]) -> None:
        """Go on with the losses of evaluations that a run had before it was resumed, by number of steps taken."""
        self._losses = {step: loss for step, loss in earlier.items() if self.every and step % self.every == 0}

    def take(
        self, step: int, count: int | None, step_taken: Callable[[int], list[Any]], *, ema: bool = False
    ) -> Evaluation:
        """Evaluate the run.

        Args:
            step: Number of training steps taken.
            count: Number of evaluation steps; None for ``run.eval_steps``.
            step_taken: Takes the evaluation step of a number, from 0, and returns the result of each actor.
            ema: Whether the steps are taken with the averages of the weights.

        Raises:
            ConfigError: The run has no validation data, or no averages.
        """
        if ema:
            demand_averages(self.run)
        if not self._has_data:
            raise ConfigError(["data has no validation batches: give Batches a validate function"])
        start, losses, counts = time.perf_counter(), list[float](), list[int]()
        measured = list[Sequence[tuple[float, float]]]()
        steps = self.run.eval_steps if count is None else count
        for number in range(steps):
            results = step_taken(number)
            more_losses, more_counts = losses_of(results)
            measured += (one for result in results for one in result.metrics)
            losses += more_losses
            counts += more_counts
        seconds, tokens = time.perf_counter() - start, sum(counts)
        return Evaluation(
            step,
            mean_loss(losses, counts),
            tokens,
            seconds,
            is_cross_entropy=is_cross_entropy(self.run),
            of_tokens=are_tokens(self.run),
            is_averaged=ema,
            num_bytes=target_bytes(self.run, steps, tokens),
            metrics=_means(self.run.model.metrics if isinstance(self.run.model, Layers) else (), measured),
        )

    def keep(self, evaluation: Evaluation) -> str:
        """Keep an evaluation of the training, and return why the training ends with it; "" if it goes on."""
        if evaluation.loss is None:
            return ""
        self._losses[evaluation.step] = evaluation.loss
        losses = {step: math.inf if math.isnan(loss) else loss for step, loss in sorted(self._losses.items())}
        best, most = min(losses, key=losses.__getitem__), self.run.early_stop
        if not most or sum(step > best for step in losses) < most:
            return ""
        lowest = f"the validation loss was lowest after step {best}, {losses[best]:.4f}"
        return f"{lowest}, and early_stop is {most}: the training ends after step {evaluation.step}"

    @property
    def _has_data(self) -> bool:
        return not isinstance(self.run.data, Batches) or self.run.data.validate is not None


def _means(names: Iterable[str], measured: Sequence[Sequence[tuple[float, float]]]) -> dict[str, float | None]:
    """Return the mean of each metric, whose sums and numbers each microbatch has; None where nothing was summed.

    Sums are exact, so that they do not depend on the order, which depends on the layout.
    """
    sums = zip(*measured, strict=True) if measured else repeat(())
    return {name: _mean([*pairs]) for name, pairs in zip(names, sums, strict=False)}


def _mean(pairs: Sequence[tuple[float, float]]) -> float | None:
    number = math.fsum(number for _, number in pairs)
    if not number:
        return None
    try:
        return math.fsum(total for total, _ in pairs) / number
    except ValueError:  # infinite ones of both signs
        return math.nan
