"""A run as plain, frozen data: the one description of it, on the driver and on every actor. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, Le

from raypar.actors.bounds import BucketSize, Count, Positive, Steps
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import DataParallel, Zero
from raypar.actors.specs.data import Batches, Text
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.optim import SGD, AdamW
from raypar.actors.specs.recompute import Recompute
from raypar.actors.specs.types import Backward, Context, DeviceChoice, Split, Tracker
from raypar.schedules.schedule import Schedule


@dataclass(frozen=True)
class Run:
    """A training run: what is trained, on which actors, in which order, for how long."""

    model: GPT | Llama | Layers = field(default_factory=GPT)
    """what is trained: a GPT, a Llama, or the user's own Layers"""
    mesh: Mesh = field(default_factory=Mesh)
    """how the work is split; ``Mesh(pp=2)`` is two pipeline ranks"""
    schedule: str | Schedule = "1f1b"
    """a name (naive, gpipe, 1f1b, interleaved, registered ones), a CSV file, code as my.py:function, or a Schedule"""
    chunks: Count | None = None
    """stages a rank holds; None is the schedule's own default (2 for interleaved, else 1)"""
    backward: Backward = "auto"
    """auto splits a backward into I (what the rank before waits for) and W (the weights' gradients) where W fills waits
    of the pipeline; split splits every backward, whole none: the numbers are the same"""
    microbatches: Count = 4
    """a step's batch is so many microbatches on each replica ..."""
    micro_batch_size: Count = 2
    """... of so many samples each"""
    data: Text | Batches = field(default_factory=Text)
    """Text, or the user's own Batches"""
    data_parallel: DataParallel = "all_reduce"
    """how replicas share gradients: all_reduce among themselves, or a parameter_server that holds the optimizer"""
    bucket_mb: BucketSize = 4.0
    """gradients are reduced in buckets of so many MiB at most, each as soon as it is complete"""
    servers: Count = 1
    """parameter servers of each pipeline rank"""
    zero: Zero | None = None
    """1 splits the optimizer over the replicas (ZeRO stage 1): less memory, less work, the same numbers; 0 does not;
    None: 1, but with a parameter_server 0"""
    sequence_parallel: bool = False
    """with mesh.tp, norms and dropout are divided too, along the sequence: less memory, as many bytes"""
    context: Context = "ring"
    """with mesh.cp, how attention reaches all tokens: ring, all_gather, ulysses (by heads), or rsa (full scores)"""
    optim: AdamW | SGD = field(default_factory=AdamW)
    """AdamW or SGD, with the learning-rate schedule"""
    clip: Positive | None = 1.0
    """largest global gradient norm; None does not clip"""
    recompute: Recompute = "none"
    """full keeps only the inputs of a stage and runs its forward again before its backward; selective runs attention's
    core again; or a word for each layer, where full keeps that layer's inputs"""
    split: Split = "even"
    """layers to stages: even, balanced by cost, or a count for each stage"""
    seed: int = 0
    """of initial weights, data order and dropout"""
    steps: Count = 100
    """length of the run; the learning rate decays over it"""
    eval_every: Steps = 0
    """evaluate every so many steps, and at the end; 0: only at the end"""
    eval_steps: Count = 4
    """steps of an evaluation: so many times ``microbatches`` microbatches"""
    folder: str | None = None
    """a folder for all that the run leaves behind: configuration, metrics, schedule, timeline, log, checkpoints"""
    save_every: Steps = 0
    """save a checkpoint there every so many steps, and at the end; 0: only at the end"""
    keep_last: Count | None = None
    """so many checkpoints stay, the newest ones; None keeps all"""
    track: tuple[Tracker, ...] = ()
    """who is told of every step: tensorboard (files in the folder), wandb, mlflow, ray (the cluster's dashboard)"""
    threads: Annotated[int, Ge(1), Le(1024)] = 1
    """CPU threads of an actor"""
    device: DeviceChoice = "auto"
    """what actors compute on: cpu, cuda (GPUs, shared if they are fewer), or auto: GPUs if each actor gets its own"""
    timeout: Annotated[float, Gt(0), Le(1e6)] = 300.0
    """seconds that an actor may wait for another one before the run fails"""
