"""Continuations of the validation text while a run trains: what the model would write by now."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from raypar.actors.specs.data import Text
from raypar.actors.specs.run import Run
from raypar.config.conflicts.generation import generation_faults
from raypar.errors import CallError
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.report import Report

if TYPE_CHECKING:
    from raypar.job.job import Job

log = logging.getLogger(__name__)

_SAMPLES, _LEAST = 2, 8  # pieces of the text; and positions of the model that leave room for a piece and what follows
_NEW_TOKENS = 48  # the most that a piece gets


def sample_faults(run: Run, every: int) -> Iterator[str]:
    """Yield why a run can't be sampled, or what is wrong with how often.

    Args:
        run: The run.
        every: After how many steps each; 0 for never.
    """
    if every < 0:
        yield f"--sample-every is {every}: it must be at least 0, which is never"
    if every <= 0:
        return
    if not isinstance(run.data, Text) or (run.model.seq or 0) < _LEAST:
        yield f"--sample-every goes on with text, for a model of at least {_LEAST} positions: leave it out"
    yield from (f"--sample-every: {fault}" for fault in generation_faults(run))


def sampling(job: Job, every: int) -> Callable[[Report | Evaluation], None]:
    """Return what logs continuations after a step that is due, for ``job.train(on=...)`` without steps ahead.

    Args:
        job: The job, whose run has no ``sample_faults``.
        every: After how many steps each; 0 for never.
    """
    pieces = list[list[int]]()

    def sample(outcome: Report | Evaluation) -> None:
        if not every or isinstance(outcome, Evaluation) or outcome.steps_taken % every:
            return
        from raypar.job.text.generation import tokenizer_of  # imports what dry runs do not need

        pieces.extend([] if pieces else _pieces_of(job.run))
        tokenizer = tokenizer_of(job.run)
        try:
            texts = job.generate(pieces, min(_NEW_TOKENS, len(pieces[0])))
        except CallError:  # the job has logged it, and goes on
            return
        for piece, made in zip(pieces, texts, strict=True):
            if tokenizer is None:
                log.info("sample after step %d: %s > %s", outcome.steps_taken, piece, list(made.tokens))
            else:
                log.info("sample after step %d: %r > %r", outcome.steps_taken, tokenizer.decoded(piece), made.text)

    return sample


def _pieces_of(run: Run) -> list[list[int]]:
    """Return beginnings of validation sequences, of half the model's positions and at most 32 tokens."""
    from raypar.actors.data.batches import batch_source  # imports torch

    assert isinstance(run.data, Text)
    source = batch_source(run.data, run.model, _SAMPLES, 1, 1, run.seed)
    (ids_BS,) = source.inputs("evaluate", 0, 0, 0)
    return [row[: min(32, len(row) // 2)].tolist() for row in ids_BS]
