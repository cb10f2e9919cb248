"""What is trained: the sizes, and the run that every contestant takes its model, data and optimizer from."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import raypar as rp
from raypar.actors.data.text.token_batches import TokenBatches, open_corpus
from raypar.actors.models.base import Model
from raypar.actors.models.build import build_model

# whole: all of the model in one process; pipeline: half of the layers in each of two; replicas: half of the batch;
# tensors: half of every layer
Layout = Literal["whole", "pipeline", "replicas", "tensors"]
# who takes part: of replicas, pipelines or tensor parallelism on CPUs, or those of so many GPUs. Not all at once: idle
# contestants wake up, too
Kind = Literal["replicas", "pipelines", "tensors", "zero-bubble", "sharded", "experts", "gpu", "gpus"]
RANKS = 2


@dataclass(frozen=True)
class Size:
    """A model and its batch.

    batch             samples a step, over all processes
    micro_batch_size  samples of a microbatch, in a pipeline and in one process; replicas divide their half of the
                      batch into ``accumulated`` microbatches
    steps             of a round: some seconds, so that how a round begins and ends does not count
    kinds             those of one of these kinds take part
    gpus              that it needs; 0 is a heat of CPUs
    accumulated       microbatches that a replica's half of the batch is divided into
    """

    name: str
    model: rp.GPT
    batch: int = 16
    micro_batch_size: int = 2
    steps: int = 2
    kinds: tuple[Kind, ...] = ("replicas",)
    gpus: int = 0
    accumulated: int = 1

    @property
    def microbatches(self) -> int:
        return self.batch // self.micro_batch_size

    def tokens(self, layout: Layout) -> int:
        """Tokens that one training takes in a step: of ``replicas`` those of one replica."""
        return self.batch * self.model.seq // (RANKS if layout == "replicas" else 1)


_QUICK: tuple[Kind, ...] = ("replicas", "sharded", "pipelines", "zero-bubble", "tensors")
_SMALL = rp.GPT(layers=8, hidden=256, heads=8, seq=256)
_WIDE = rp.GPT(layers=2, hidden=1024, heads=16, seq=16)
_SMALLEST = rp.GPT(layers=4, hidden=16, heads=2, seq=16)
_MOE = rp.MoE(experts=4, top_k=2, normalise=True, loss="none")  # no peer has raypar's auxiliary losses
# Noise beside which the scores are nothing gives each expert as many tokens, but for chance: of 128 in a sequence
# hardly ever 32 more. So next to nothing is over a capacity of 1.25; losses differ in the sixth digit only.
EVEN = replace(_SMALL, moe=replace(_MOE, noise=100.0))
DROPPING = replace(_SMALL, moe=replace(_MOE, noise=100.0, capacity=1.25))
SIZES = {
    size.name: size
    for size in (
        Size("dp", _SMALL),
        Size("dp-wide", _WIDE, steps=10),
        Size("pp", _SMALL, kinds=("pipelines",)),
        Size("pp-wide", _WIDE, steps=10, kinds=("pipelines",)),
        Size("zb", _SMALL, kinds=("zero-bubble",)),
        Size("zb-two", _SMALL, micro_batch_size=8, kinds=("zero-bubble",)),
        Size("tp", _SMALL, kinds=("tensors",)),
        Size("tp-batch", _SMALL, micro_batch_size=16, kinds=("tensors",)),
        Size("tp-wide", rp.GPT(layers=2, hidden=1024, heads=16, seq=64), kinds=("tensors",)),
        Size("gpu", rp.GPT(layers=12, hidden=768, heads=12, seq=512), kinds=("gpu",), gpus=1),
        Size("gpus", rp.GPT(layers=12, hidden=768, heads=12, seq=512), kinds=("gpus",), gpus=2),
        Size("dp-torch", replace(_SMALL, linear="torch", attention="fused")),  # raypar with the peers' layers, too
        Size("dp-wide-torch", replace(_WIDE, linear="torch", attention="fused"), steps=10),
        Size("pp-torch", replace(_SMALL, linear="torch", attention="fused"), kinds=("pipelines",)),
        Size("zero", _SMALL, kinds=("sharded",)),
        Size("zero-accumulated", _SMALL, kinds=("sharded",), accumulated=8),
        Size("zero-wide", _WIDE, steps=10, kinds=("sharded",)),
        Size("moe", replace(_SMALL, moe=_MOE), kinds=("experts",), accumulated=8),
        Size("moe-once", replace(_SMALL, moe=_MOE), kinds=("experts",)),
        Size("quick", rp.GPT(layers=4, hidden=64, heads=4, seq=64), kinds=_QUICK),
        Size("smallest", _SMALLEST, batch=8, kinds=_QUICK),
        Size("smallest-moe", replace(_SMALLEST, moe=_MOE), batch=8, kinds=("experts",), accumulated=2),
    )
}
_TORCH = ("dp-torch", "dp-wide-torch", "pp-torch")
_EXPERTS = ("moe", "moe-once")
_ZERO_BUBBLE = ("zb", "zb-two")
_ZERO = ("zero", "zero-accumulated", "zero-wide")
_TRIALS = ("quick", "smallest", "smallest-moe")
ALL = tuple(name for name in SIZES if name not in (*_TORCH, *_ZERO, *_ZERO_BUBBLE, *_EXPERTS, *_TRIALS))
CHOICES = {name: (name,) for name in SIZES if name not in ("quick", "zero", "moe", "zb")} | {  # of the command line
    "small": ("dp", "pp"),
    "wide": ("dp-wide", "pp-wide"),
    "tp": ("tp", "tp-batch", "tp-wide"),
    "torch": _TORCH,
    "zb": _ZERO_BUBBLE,
    "zero": _ZERO,
    "moe": _EXPERTS,
    "all": ALL,
}


def model_of(run: rp.Run) -> Model:
    """The run's model, for the peers: with torch's own linear layers and attention, as a user of theirs writes it."""
    assert isinstance(run.model, rp.GPT | rp.Llama)
    return build_model(replace(run.model, linear="torch", attention="fused"), run.seed)


def batches_of(run: rp.Run) -> TokenBatches:
    """The run's batches, for the peers: ``train(step, microbatch, dp)`` gives tokens and labels."""
    assert isinstance(run.model, rp.GPT | rp.Llama)
    assert isinstance(run.data, rp.Text)
    corpus = open_corpus(run.data, run.model.seq)
    return TokenBatches(corpus, run.model.seq, run.micro_batch_size, run.microbatches, run.mesh.dp, run.seed)


def run_of(size: Size, layout: Layout, **settings: Any) -> rp.Run:
    """The run of a size in a layout; ``settings`` are further fields of it.

    The learning rate is constant, so that a peer's loop needs no schedule of its own.
    """
    run = rp.Run(model=size.model, optim=rp.AdamW(lr=3e-4), microbatches=size.microbatches)
    run = replace(run, micro_batch_size=size.micro_batch_size)
    if layout == "pipeline":
        run = replace(run, mesh=rp.Mesh(pp=RANKS))
    elif layout == "tensors":
        run = replace(run, mesh=rp.Mesh(tp=RANKS))
    elif layout == "replicas":
        half = size.batch // RANKS
        run = replace(run, mesh=rp.Mesh(dp=RANKS), microbatches=size.accumulated)
        run = replace(run, micro_batch_size=half // size.accumulated)
    if size.model.moe is not None:  # the norm over experts of several ranks is no peer's to compute
        run = replace(run, clip=None)
    return replace(run, device="cuda" if size.gpus else "cpu", **settings)
