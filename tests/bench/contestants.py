"""Who takes part: raypar's layouts, the peers that a user would pick instead, and the limits that both are held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import raypar as rp
from tests.bench.workload import DROPPING, EVEN, RANKS, Kind, Layout, Size

Loop = Literal[
    "plain",
    "ddp",
    "all-to-all",
    "fsdp",
    "deepspeed",
    "deepspeed-moe",
    "pipelining",
    "dtensor",
    "ray-train",
    "raypar",
]


@dataclass(frozen=True)
class Contestant:
    """One way to train.

    name        for ``--only`` and the JSON
    what        for the tables
    loop        whose training loop its processes run; Ray's drivers are one process, whatever they start
    settings    of raypar's run, or the schedule of torch's pipeline, or whether DTensors divide the sequence
    processes   that the bench starts
    apart       they are trainings of their own, side by side
    limit       the contestant whose speed, less the pipeline's bubble, is as fast as this one could be
    chunks      stages a rank; 0 without a pipeline
    launched    the launch is measured too
    microbatches  the fewest that it takes
    kinds       of heats in which it takes part; on GPUs there is room in one Ray for one of raypar's layouts
    """

    name: str
    what: str
    loop: Loop
    layout: Layout
    settings: dict[str, Any] = field(default_factory=dict)
    processes: int = 1
    apart: bool = False
    limit: str | None = None
    chunks: int = 0
    launched: bool = False
    microbatches: int = 1
    kinds: tuple[Kind, ...] = ("replicas",)

    @property
    def ours(self) -> bool:
        return self.loop == "raypar"

    def fits(self, size: Size) -> bool:
        """Whether the size is of a kind in which it takes part, and has a layer for every stage."""
        is_of_kind = not {*self.kinds}.isdisjoint(size.kinds)
        return is_of_kind and RANKS * self.chunks <= size.model.layers and self.microbatches <= size.microbatches

    def ideal(self, size: Size) -> float:
        """Share of the limit that the pipeline's bubble leaves: mv / (mv + p - 1); 1 without a pipeline."""
        work = size.microbatches * self.chunks
        return work / (work + RANKS - 1) if self.chunks else 1.0


_EXPERTS: tuple[Kind, ...] = ("experts",)
_REPLICAS: dict[str, Any] = {"layout": "replicas", "limit": "pair-halves"}


def _replicas(
    name: str, what: str = "", *, launched: bool = False, kinds: tuple[Kind, ...] = ("replicas",), **settings: Any
) -> Contestant:
    """raypar's replicas."""
    common: dict[str, Any] = {"settings": settings, "launched": launched, "kinds": kinds, **_REPLICAS}
    return Contestant(name, f"raypar dp=2{what}", "raypar", **common)


def _deepspeed(level: int) -> Contestant:
    """DeepSpeed's replicas."""
    common: dict[str, Any] = {"settings": {"zero": level}, "processes": 2, "kinds": ("sharded",), **_REPLICAS}
    return Contestant(f"deepspeed-{level}", f"DeepSpeed ZeRO-{level}", "deepspeed", **common)


def _deepspeed_moe(suffix: str, what: str, capacity: float | None) -> Contestant:
    """DeepSpeed's layer of experts."""
    common: dict[str, Any] = {"settings": {"capacity": capacity}, "processes": 2, "kinds": _EXPERTS, **_REPLICAS}
    return Contestant(f"deepspeed-moe{suffix}", f"DeepSpeed-MoE{what}", "deepspeed-moe", **common)


def _ours_apart(name: str, what: str = "", **settings: Any) -> Contestant:
    """raypar's replicas with half of the experts each."""
    return _replicas(name, f" ep=2{what}", kinds=_EXPERTS, mesh=rp.Mesh(dp=2, ep=2), **settings)


def _pipeline(schedule: str, suffix: str = "", *, chunks: int = 1, **settings: Any) -> Contestant:
    """raypar's pipeline in a schedule that torch lacks, beside torch's zero-bubble schedules."""
    common: dict[str, Any] = {"layout": "pipeline", "limit": "pair", "chunks": chunks, "kinds": ("zero-bubble",)}
    told = {"schedule": schedule, **settings}
    return Contestant(
        f"raypar-{schedule}{suffix}", f"raypar pp=2 {schedule}{suffix}", "raypar", settings=told, **common
    )


def _pipelines(
    schedule: str,
    torchs: str,
    *,
    chunks: int = 1,
    launched: bool = False,
    microbatches: int = 1,
    kinds: tuple[Kind, ...] = ("pipelines",),
) -> tuple[Contestant, Contestant]:
    """torch's pipeline and raypar's, in the same schedule; torch's takes no fewer microbatches."""
    settings = {"schedule": schedule}
    common: dict[str, Any] = {"layout": "pipeline", "limit": "pair", "chunks": chunks, "launched": launched}
    common |= {"kinds": kinds, "settings": settings}
    return (
        Contestant(
            f"torch-{schedule}", f"torch {torchs}", "pipelining", processes=2, microbatches=microbatches, **common
        ),
        Contestant(f"raypar-{schedule}", f"raypar pp=2 {schedule}", "raypar", **common),
    )


def _tensors(suffix: str, what: str, *, sequence: bool) -> tuple[Contestant, Contestant]:
    """torch's tensor parallelism and raypar's."""
    settings = {"sequence_parallel": sequence}
    common: dict[str, Any] = {"layout": "tensors", "limit": "pair", "kinds": ("tensors",), "settings": settings}
    return (
        Contestant(f"torch-tp{suffix}", f"torch DTensor{what}", "dtensor", processes=2, **common),
        Contestant(f"raypar-tp{suffix}", f"raypar tp=2{what}", "raypar", **common),
    )


_EVERYWHERE: tuple[Kind, ...] = ("replicas", "sharded", "experts", "pipelines", "zero-bubble", "tensors", "gpu", "gpus")
_TWO: tuple[Kind, ...] = ("replicas", "gpus")
_SHARDED: tuple[Kind, ...] = ("sharded",)
_ZERO_BUBBLE: tuple[Kind, ...] = ("zero-bubble",)
_HALVES: tuple[Kind, ...] = (*_TWO, *_SHARDED)
_ONCE: dict[str, Any] = {"zero": 3, "zero_reduce": "step", "zero_gather": "step"}
REFERENCE = "plain"  # whose losses everybody's are held against

CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant(REFERENCE, "one process", "plain", "whole", launched=True, kinds=_EVERYWHERE),
        Contestant("raypar-one", "raypar, one actor", "raypar", "whole", limit=REFERENCE, kinds=("replicas", "gpu")),
        Contestant(
            "pair-halves",
            "limit of dp",
            "plain",
            "replicas",
            processes=2,
            apart=True,
            kinds=(*_TWO, "sharded", "experts"),
        ),
        Contestant("torch-ddp", "torch DDP", "ddp", processes=2, launched=True, kinds=_TWO, **_REPLICAS),
        Contestant("ray-train", "Ray Train, DDP", "ray-train", launched=True, **_REPLICAS),
        _replicas("raypar-dp", launched=True, kinds=_TWO),
        _replicas("raypar-zero-0", " zero=0", zero=0),
        Contestant("torch-fsdp", "torch FSDP2", "fsdp", processes=2, kinds=_SHARDED, **_REPLICAS),
        *(_deepspeed(level) for level in (1, 2, 3)),
        _replicas("raypar-zero-1", " zero=1", zero=1, kinds=_SHARDED),
        _replicas("raypar-zero-2", " zero=2", zero=2, kinds=_SHARDED),
        _replicas("raypar-zero-3", " zero=3", zero=3, kinds=_SHARDED),
        _replicas("raypar-zero-3-step", " zero=3, once a step", kinds=_SHARDED, **_ONCE),
        Contestant("torch-ep", "torch all_to_all_single, DDP", "all-to-all", processes=2, kinds=_EXPERTS, **_REPLICAS),
        _deepspeed_moe("", "", None),
        _deepspeed_moe("-dropping", ", capacity 1.25", 1.25),
        _ours_apart("raypar-ep"),
        _ours_apart("raypar-ep-rounds", ", two rounds", expert_rounds=2),
        _ours_apart("raypar-ep-even", ", even load", model=EVEN),
        _ours_apart("raypar-ep-dropping", ", even load, capacity 1.25", model=DROPPING),
        _ours_apart("raypar-ep-0", ", zero=0", zero=0),
        _replicas("raypar-ps", " parameter_server", data_parallel="parameter_server"),
        Contestant(
            "pair",
            "limit of pp and tp",
            "plain",
            "whole",
            processes=2,
            apart=True,
            kinds=("pipelines", "zero-bubble", "tensors"),
        ),
        *_pipelines("gpipe", "GPipe"),
        *_pipelines("1f1b", "1F1B", launched=True, kinds=("pipelines", "zero-bubble")),
        *_pipelines("interleaved", "Interleaved1F1B, v=2", chunks=2),
        *_pipelines("zb-interleaved", "InterleavedZeroBubble, v=2", chunks=2, kinds=_ZERO_BUBBLE),
        *_pipelines("zb-v", "ZBV", chunks=2, kinds=_ZERO_BUBBLE),
        *_pipelines("dualpipe-v", "DualPipeV", chunks=2, microbatches=2 * RANKS, kinds=_ZERO_BUBBLE),
        _pipeline("1f1b", "-whole", backward="whole"),
        _pipeline("zb-h1"),
        _pipeline("zb-1p"),
        *_tensors("", "", sequence=False),
        *_tensors("-sequence", " along the sequence", sequence=True),
    )
}


def entered(size: Size, only: Sequence[str] = ()) -> list[Contestant]:
    """Who runs at a size: those named (none: all), with the reference and the limits that they are held to."""
    named = [CONTESTANTS[name] for name in only] or list(CONTESTANTS.values())
    wanted = {REFERENCE} | {contestant.name for contestant in named}
    wanted |= {contestant.limit for contestant in named if contestant.limit}
    return [contestant for contestant in CONTESTANTS.values() if contestant.name in wanted and contestant.fits(size)]
