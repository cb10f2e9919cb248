"""A run as plain, frozen data, which describes it on the driver and on every actor. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from annotated_types import Ge, Gt, Le

from raypar.actors.bounds import BucketSize, Count, Positive, Seed, Share, Steps, Word
from raypar.actors.in_brief import changed_settings
from raypar.actors.known_fields import known_fields
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import DataParallel, Offload, Zero
from raypar.actors.specs.data import Batches, Examples, Text
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.optim import AdamW, AnyOptimizer
from raypar.actors.specs.precision import LossScale, Nonfinite, Precision
from raypar.actors.specs.recompute import Recompute
from raypar.actors.specs.resources import Resources
from raypar.actors.specs.types import (
    Backward,
    Compile,
    Context,
    DeviceChoice,
    ExecutorName,
    Format,
    SharedGpu,
    Split,
    TaskOrder,
    Tracker,
)
from raypar.schedules.drawing.notebook import box, notebook_table, text_block
from raypar.schedules.passes.gather_weights import GatherWhen, ReshardAfterForward
from raypar.schedules.passes.reduce_gradients import ReduceWhen
from raypar.schedules.schedule import Schedule


@known_fields()
@dataclass(frozen=True)
class Run:
    """A training run: the model, the data, the actors, the schedule, and the number of steps."""

    model: GPT | Llama | Layers = field(default_factory=GPT)
    """the model: a GPT, a Llama, or the user's own Layers"""
    mesh: Mesh = field(default_factory=Mesh)
    """how the work is split; ``Mesh(pp=2)`` is two pipeline ranks"""
    schedule: str | Schedule = "1f1b"
    """a name (1f1b, interleaved, zb-v and the others of the catalog, registered ones),
    a CSV file, code as my.py:function, or a Schedule"""
    chunks: Count | None = None
    """stages on each rank; None is the schedule's own default (2 for interleaved ones and for a V, else 1)"""
    flush_every: Count | None = None
    """steps from one flush of the pipeline to the next; evaluations and checkpoints flush it too. None: of an
    asynchronous schedule 8, or what its file has, of a synchronous one every step"""
    delay_feedback: bool = False
    """with an asynchronous schedule, a stage whose gradients are those of older weights adds to each its change since
    the step before, 2 u(t) - u(t-1), as an estimate of the gradient of the present ones"""
    backward: Backward = "auto"
    """auto splits a backward into I (the gradients that the rank before waits for) and W (those of the weights) where W
    fills a wait of the pipeline; split splits every backward, whole none; the results have the same bits"""
    microbatches: Count = 4
    """microbatches of a step on each replica"""
    activations_on_device: Count | None = None
    """how many activations, each of a microbatch in a stage, an actor's device holds at the most; the others are in
    host memory until their backward (OFFLOAD, RELOAD); None: all that the schedule keeps"""
    token_slices: Count = 1
    """of a GPT or Llama, the slices along the sequence in which a microbatch passes the stages, one after the other
    (Seq1F1B): a shorter bubble, and less memory for activations; 1: whole sequences"""
    micro_batch_size: Count = 2
    """samples of a microbatch"""
    data: Text | Examples | Batches = field(default_factory=Text)
    """Text, Examples for fine-tuning, or the user's own Batches"""
    data_parallel: DataParallel = "all_reduce"
    """how replicas share gradients: all_reduce among themselves, or a parameter_server that holds the optimizer"""
    bucket_mb: BucketSize = 4.0
    """size limit of a gradient bucket in MiB; each bucket is reduced as soon as it is complete"""
    servers: Count = 1
    """parameter servers of each pipeline rank"""
    zero: Zero | None = None
    """what replicas share out among them (ZeRO): 1: the optimizer, with less memory, less work and the same numbers; 2:
    also gradients; 3: also weights, which are gathered for use (FSDP); 0: nothing; None: 1, but 0 with a
    parameter_server"""
    zero_units: Count = 1
    """with zero 3, layers whose weights are gathered together; an embedding and a head are gathered alone"""
    zero_reduce: ReduceWhen | None = None
    """how often replicas reduce gradients: once a step, which sends less, or once a microbatch, so that none holds them
    all; None: a microbatch with zero 2 and 3, else a step"""
    zero_gather: GatherWhen = "microbatch"
    """with zero 3, when weights are gathered: for each forward and backward of a microbatch, layer by layer; or once a
    step, which sends less and holds the weights of whole stages"""
    zero_resident: Count | None = None
    """with zero_gather step, the most stages of an actor whose weights are whole at once; None: all"""
    reshard_after_forward: ReshardAfterForward = True
    """with zero 3, whether weights are freed between the forward and the backward of a microbatch; except_last: not in
    the last stage, whose backward comes next"""
    tile: Count | Mapping[str, Count] = field(default=1, hash=False)
    """cut linear layers by outputs into so many tiles, whose weights are gathered one after the other with zero 3: a
    number for the MLPs and the head of a GPT or Llama (of your own Layers for all), or a number for each pattern of
    names"""
    offload: Offload = "none"
    """what actors keep away from their devices: optimizer: the weights that it updates and its states, which stay in
    host memory and are updated there; parameters: also the layers' weights, which are read before they are used"""
    offload_folder: str | None = None
    """with offload, a folder on each node, of a fast disk, for files that take the place of host memory"""
    expert_shadows: Steps = 0
    """with mesh.ep, the most experts of a layer that visit all actors at a time, while their tokens stay, where that is
    predicted to be faster (FasterMoE's shadowing); 0: tokens always travel"""
    expert_rounds: Count = 1
    """with mesh.ep or mesh.expert_actors, the rounds in which tokens travel, each round to some of an actor's experts,
    while those of another round compute (FasterMoE's smart schedule); 1: all at once"""
    expert_order: Mapping[str, str] = field(default_factory=dict, hash=False)
    """with mesh.ep or mesh.expert_actors, the experts of a list in the order in which actors divide them, as "0 2 1 3",
    by the list's name, as blocks.0.mlp.experts; job.rebalance() sets it"""
    sequence_parallel: bool = False
    """with mesh.tp, divide norms and dropout too, along the sequence: less memory, the same number of bytes sent"""
    context: Context = "ring"
    """with mesh.cp, how attention reaches all tokens: ring, all_gather, ulysses (by heads), or rsa (full scores)"""
    optim: AnyOptimizer = field(default_factory=AdamW)
    """AdamW, SGD or Muon, with the learning-rate schedule"""
    clip: Positive | None = 1.0
    """largest global gradient norm; None does not clip"""
    ema: Share | None = None
    """decay of an exponential moving average of the weights that learn, such as 0.999, which evaluations, texts and
    exports can be made with (ema=True, --ema); None keeps none"""
    precision: Precision = field(default_factory=Precision)
    """dtypes: of the layers, of the sums of gradients, of the weights that the optimizer has"""
    loss_scale: LossScale = field(default_factory=LossScale)
    """dynamic scaling of the loss, for fp16"""
    nonfinite: Nonfinite = "stop"
    """what becomes of a step whose loss or gradients are not finite, unless the loss is scaled: stop the run, skip the
    step, or rewind to the last checkpoint and leave out the data since"""
    recompute: Recompute = "none"
    """full: keep only the inputs of a stage and run its forward again before its backward; selective: run only the core
    of attention again; or one word per layer, where full keeps the inputs of that layer"""
    split: Split = "even"
    """layers to stages: even, balanced by cost, or the number of layers of each stage"""
    seed: Seed = 0
    """seed of initial weights, data order and dropout"""
    steps: Count = 100
    """number of steps, over which the learning rate decays"""
    eval_every: Steps = 0
    """evaluate after every eval_every steps, but the last; 0: never. At the end raypar train always evaluates, and in
    Python job.evaluate() does"""
    eval_steps: Count = 4
    """steps of an evaluation, each of ``microbatches`` microbatches"""
    early_stop: Steps = 0
    """evaluations in a row without a lower validation loss, after which the training ends; 0: never"""
    folder: str | None = None
    """run folder for everything that the run writes: configuration, metrics, schedule, timeline, log, checkpoints; auto
    is a new dated folder below runs/"""
    save_every: Steps = 0
    """save a checkpoint in the folder after every save_every steps, and at the end; 0: only at the end"""
    keep_last: Count | None = None
    """number of checkpoints to keep, the newest ones; None keeps all"""
    executor: ExecutorName = "compiled"
    """how the driver runs a training step: compiled: one call to each actor, which performs its row; tasks: one Ray
    task for each action, named like it, which Ray's dashboard and timeline show"""
    order: TaskOrder = "row"
    """with executor tasks, what an actor does next: row: the next action of its row; dynamic: of those that are ready
    the first one of its row, so that a value that comes late is not waited for"""
    max_failures: Steps = 0
    """how often the run may go on after an actor has died, hung or failed: from the last snapshot, with another actor
    in its place; 0: a failure ends the run"""
    snapshot_every: Steps = 1
    """with max_failures, actors copy their state in host memory after every snapshot_every steps, which are what a
    failure loses at the most; 0: never, so that the run goes back to its last checkpoint"""
    buddy_every: Steps = 10
    """with max_failures and actors on several nodes, snapshots are copied to another node after every buddy_every
    steps, which are what the loss of a node costs at the most, besides those that a copy takes; 0: never, so that it
    costs all since the last checkpoint"""
    spares: Steps = 0
    """with max_failures, actors that wait with everything imported to take the place of one that fails"""
    min_dp: Count = 1
    """with max_failures, the fewest replicas with which the run goes on while no node has room for those that are lost:
    with the same samples in a step, and until there is room again; mesh.dp: it does not"""
    check_every: Steps | None = None
    """before the update of every check_every-th step, replicas compare digests of their weights, which a flipped bit
    makes unequal; with an asynchronous schedule or flush_every, after a flush in which there is such a step; None:
    step 2 and every 1,000th; 0: only before the first step"""
    recheck_every: Steps = 0
    """in every recheck_every-th step, other replicas compute one microbatch of each replica again, and all that comes
    of it is compared, which a bit that flips while an actor computes makes unequal; 0: never"""
    overflow_every: Steps = 0
    """in every overflow_every-th step, count the activations and gradients that overflow or underflow; 0: never"""
    overflow_format: Format | None = None
    """the number format whose range counts; None: the one that the run computes in, or fp16 if that is fp32, which says
    whether fp16 would do"""
    profile: tuple[Count, Count] | None = None
    """the first and the last step, counted from 1, that torch's profiler records on every actor, as traces in the
    folder, which raypar trace merges; None: none"""
    unit: Word | None = None
    """what throughput counts: tokens (elements of the targets), or your word for samples, such as images; None: tokens
    of a sequence, else samples"""
    track: tuple[Tracker, ...] = ()
    """trackers that get every step: tensorboard (files in the folder), wandb, mlflow, ray (the cluster's dashboard)"""
    compile: Compile = False
    """let torch's compiler make each layer's forward and backward: other bits, some minutes at the start, and on CPUs a
    C++ compiler; graphs: also replay them as CUDA graphs, on GPUs; where it fails, layers are computed as they are, and
    one line says so"""
    threads: Annotated[int, Ge(1), Le(1024)] | None = None
    """CPU threads of an actor; None: as many as it has CPUs (resources.cpus), one at least"""
    resources: Resources = field(default_factory=Resources)
    """what each actor takes of its node, and on which nodes it may be: ``Resources(cpus=4, memory="8GiB")``"""
    device: DeviceChoice = "auto"
    """device of the actors: cpu; cuda: GPUs, shared if there are too few; auto: GPUs if each actor gets its own"""
    shared_gpu: SharedGpu = "staged"
    """with device cuda, how actors of one GPU exchange tensors: staged: through host memory; nccl: over NCCL, as actors
    with a GPU each, for trying such a run on one GPU, not for speed"""
    timeout: Annotated[float, Gt(0), Le(1e6)] = 300.0
    """seconds that an actor may wait for another one before the run fails"""

    def __repr__(self) -> str:
        """Return what is not the default, in a line; with the model, the mesh, the schedule and the steps."""
        return f"Run({', '.join(f'{name}={value}' for name, value in self._in_brief().items())})"

    def _repr_html_(self) -> str:
        """Return the same as a table, for a notebook."""
        return box(notebook_table(self._in_brief().items()), text_block("All else has its default."))

    def _in_brief(self) -> dict[str, str]:
        return changed_settings(self, always=("model", "mesh", "schedule", "steps"))

    @property
    def num_threads(self) -> int:
        """Number of CPU threads with which an actor computes."""
        return self.resources.threads if self.threads is None else self.threads

    @property
    def counts_skips(self) -> bool:
        """Whether steps may be skipped, so that checkpoints hold how many were, and the scale of the loss."""
        return self.loss_scale.is_on(self.precision) or self.nonfinite != "stop"

    @property
    def replica_fault(self) -> str | None:
        """Why layers and losses cannot use ``rp.replicas``, with the fix; None if they can."""
        if self.data_parallel == "parameter_server":
            return "with data_parallel 'parameter_server' replicas do not wait for each other: take all_reduce"
        if self.mesh.is_uneven:
            return "replicas of one stage and of another are not the same (mesh.rank_dp or rank_tp): give dp and tp"
        if self.recheck_every:
            return "other replicas compute a microbatch again without its replica (recheck_every): set it to 0"
        if self.order == "dynamic":
            return "replicas perform their actions in an order of their own (order 'dynamic'): set order to 'row'"
        if self.compile:
            return "compiled layers do not exchange values with other replicas: leave compile out"
        return None
