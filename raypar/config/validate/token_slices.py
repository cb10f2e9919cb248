"""Check what does not combine with microbatches that are cut into slices along the sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raypar.actors.specs.data import Batches, Examples
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run
from raypar.config.validate.model import divisors_near


def slice_faults(run: Run, right: Callable[..., bool]) -> Iterator[str]:
    """Yield what a run with ``token_slices`` can't have, each with its fix.

    Args:
        run: The run.
        right: Returns whether some fields have their declared types and ranges.
    """
    if not right("token_slices") or run.token_slices == 1:
        return
    named = f"token_slices is {run.token_slices}"
    if right("model"):
        yield from _model_faults(run, right, named)
    if right("mesh") and run.mesh.cp > 1:
        yield f"{named}, but with mesh.cp actors hold parts of a sequence: leave one of the two out"
    if right("mesh") and run.mesh.is_uneven:
        told = "replicas that take microbatches in turn would take slices in turn"
        fix = "leave token_slices out, or give mesh.dp or mesh.tp"
        yield f"{named}, but with mesh.rank_dp or mesh.rank_tp {told}: {fix}"
    if right("data") and isinstance(run.data, Examples) and run.data.packing:
        yield f"{named}, but with data.packing a slice does not know its documents: set data.packing to False"
    if right("data") and isinstance(run.data, Batches) and run.data.varying:
        yield f"{named}, but with data.varying lengths change: set data.varying to False, or leave token_slices out"
    if right("compile") and run.compile:
        yield f"{named}, but with compile layers are made for whole sequences: set compile to False"
    if right("flush_every") and run.flush_every is not None:
        yield f"{named}, but with flush_every steps are one stream of whole microbatches: leave one of the two out"


def _model_faults(run: Run, right: Callable[..., bool], named: str) -> Iterator[str]:
    """Yield why a model can't compute its sequences in slices."""
    model = run.model
    if not isinstance(model, Transformer):
        yield f"{named}, but own layers compute whole sequences: leave token_slices out, or train a GPT or Llama"
        return
    if model.moe is not None:
        told = "experts are chosen among the tokens of whole sequences"
        yield f"{named}, but {told}: leave token_slices out, or set model.moe to None"
    if right("model.dropout") and model.dropout:
        told = "masks are drawn for whole sequences"
        yield f"{named}, but model.dropout is {model.dropout:g}, and {told}: set model.dropout to 0"
    if not right("model.seq"):
        return
    if model.seq % run.token_slices:
        yield f"{named}, but model.seq is {model.seq}: set token_slices to {divisors_near(run.token_slices, model.seq)}"
    elif run.sequence_parallel and right("mesh.tp") and model.seq // run.token_slices % run.mesh.tensor_ranks:
        each = model.seq // run.token_slices
        yield f"{named}, so that a slice has {each} tokens, which mesh.tp does not divide: give fewer slices"
