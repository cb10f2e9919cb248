"""Rules of microbatches that are cut into slices along the sequence."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.config.rules import Conflict, Examined, RunRule, RunSetting
from raypar.config.validate.model import divisors_near
from raypar.config.validate.settings import CONTEXT, EXPERTS, OWN_LAYERS, SLICES, UNEVEN

_FLUSH = RunSetting("flush_every", lambda steps: steps is not None)
_DROPOUT = RunSetting("model.dropout", undo="set model.dropout to 0")
_PACKED = RunSetting("data.packing", undo="set data.packing to False")
_VARYING = RunSetting("data.varying", undo="set data.varying to False")
_COMPILED = RunSetting("compile", undo="set compile to False")


def _length_faults(examined: Examined) -> Iterator[str]:
    """Yield why sequences can't be cut into slices of equal length, which tensor ranks divide."""
    run = examined.run
    if OWN_LAYERS.is_in(examined) or not SLICES.is_in(examined):
        return
    named, seq = f"token_slices is {run.token_slices}", run.model.seq
    assert seq is not None
    if seq % run.token_slices:
        yield f"{named}, but model.seq is {seq}: set token_slices to {divisors_near(run.token_slices, seq)}"
    elif run.sequence_parallel and seq // run.token_slices % run.mesh.tensor_ranks:
        each = seq // run.token_slices
        yield f"{named}, so that a slice has {each} tokens, which mesh.tp does not divide: give fewer slices"


SLICE_RULES: tuple[RunRule, ...] = (
    Conflict(SLICES, OWN_LAYERS, "but own layers compute whole sequences"),
    Conflict(SLICES, EXPERTS, "but experts are chosen among the tokens of whole sequences"),
    Conflict(SLICES, _DROPOUT, "but {other}, and masks are drawn for whole sequences"),
    _length_faults,
    Conflict(SLICES, CONTEXT, "but with mesh.cp actors hold parts of a sequence"),
    *(Conflict(SLICES, axis, "but with {other} replicas that take turns would take slices in turn") for axis in UNEVEN),
    Conflict(SLICES, _PACKED, "but with data.packing a slice does not know its documents"),
    Conflict(SLICES, _VARYING, "but with data.varying lengths change"),
    Conflict(SLICES, _COMPILED, "but with compile layers are made for whole sequences"),
    Conflict(SLICES, _FLUSH, "but with flush_every steps are one stream of whole microbatches"),
)
