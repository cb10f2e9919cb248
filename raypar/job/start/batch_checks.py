"""Checks of a user's batch function in the driver: is it pure, and do replicas get samples of their own?"""

from __future__ import annotations

import logging

from raypar.actors.data.batches import function_source
from raypar.actors.data.examples.example_batches import open_sequences
from raypar.actors.data.tokenizers.example_shapes import ExampleError
from raypar.actors.data.tokenizers.tokenizer import Tokenizer
from raypar.actors.data_parallel.replica_checks import digest
from raypar.actors.specs.data import Batches, Examples
from raypar.actors.specs.run import Run
from raypar.errors import ConfigError

log = logging.getLogger(__name__)

_IMPURE = (
    "data.fn gives another batch when it is asked for the same one again: make it a function of (step, microbatch, dp) "
    "alone, with torch.Generator().manual_seed(...) of these for what is random"
)


def _first_batch(data: Batches, dp: int) -> bytes:
    """Return the digest of a replica's first batch."""
    source, index = function_source(data), (0, 0, dp)
    values = source.inputs("train", *index) + source.targets("train", *index)
    return digest({str(number): value for number, value in enumerate(values)})


def warn_of_examples(data: Examples, seq: int) -> None:
    """Log a warning if the chat template of examples does not end answers, or if most examples are left out.

    Args:
        data: The examples.
        seq: Tokens of a sequence.
    """
    try:
        template = Tokenizer(data.tokenizer, data.template).template
        ends = template is None or template.ends_answers()
    except ExampleError:  # its faults are found elsewhere
        return
    if not ends:
        log.warning(
            "the chat template ends an answer by what follows it, and not by a special token: of conversations the "
            "model does not learn to end one; give a template that does as data.template"
        )
    try:
        parts = open_sequences(data, seq)[0].parts
    except (ExampleError, ConfigError):
        return
    for path, part in parts.items():
        left_out, kept = part.pieces.dropped, len(part.pieces.firsts)
        if left_out > kept:
            counts = f"{left_out:,} examples are left out and {kept:,} kept"
            lack = f"nothing is learned in the first {seq:,} tokens of those"
            log.warning("%s: %s: %s; set model.seq higher, or data.learn to 'all'", path, counts, lack)


def demand_pure(run: Run) -> None:
    """Check that the user's batch function returns the same batch when called twice, for step 0 of up to two replicas.

    Args:
        run: The run; it is not checked if its data is not a batch function.

    Raises:
        ConfigError: If the second call returns another batch. Then inputs and targets, which different actors ask for,
            would not belong together.
    """
    data = run.data
    if not isinstance(data, Batches):
        return
    replicas = range(min(2, run.mesh.dp))
    if [_first_batch(data, dp) for dp in replicas] != [_first_batch(data, dp) for dp in replicas]:
        raise ConfigError([_IMPURE])


def warn_of_batches(run: Run) -> None:
    """Log a warning if the user's batches, or the chat template of examples, are likely to be mistakes.

    A batch function should be pure, and give replicas 0 and 1 other batches. A template should end answers.
    """
    data = run.data
    if isinstance(data, Examples):
        warn_of_examples(data, run.model.seq or 1)
    if not isinstance(data, Batches):
        return
    try:
        first, again = _first_batch(data, 0), _first_batch(data, 0)
        equal = run.mesh.dp > 1 and first == _first_batch(data, 1)
    except Exception:  # here its files may be missing; an actor reports the error with its traceback
        return
    if first != again:
        log.warning("%s", _IMPURE)
    elif equal:
        log.warning("data.fn gives replicas 0 and 1 the same samples: have it look at dp")
