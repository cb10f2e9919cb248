"""What an actor reports about a step: losses, norms, times and memory."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from raypar.actors.machine.process_identity import ProcessIdentity
from raypar.actors.specs.types import ProgramName
from raypar.schedules.action import Action
from raypar.schedules.float_sum import float_sum
from raypar.schedules.timeline import Call

Kind = Literal["weights", "gradients", "optimizer", "gathered", "buckets", "versions", "cache", "offloaded", "process"]
"""kind of memory; gathered: weights that are whole temporarily; buckets: gradients on their way to other actors;
versions: older weights that microbatches under way compute with; cache: keys and values of a text that is generated;
offloaded: tensors in host memory or in files, which no other kind counts; process: what the process had before the run
"""
RangeKind = Literal["activations", "gradients", "weight_gradients"]  # the second are those of activations


class Span(NamedTuple):
    """The time that an action took on an actor.

    Attributes:
        action: The action. REDUCE_GRAD with a bucket is the reduction of that bucket, and UNSHARD with one is the
            gather of a unit of weights; both run beside the row.
        start: In seconds of the clock of the driver's machine (``time.perf_counter``).
        end: In the same seconds.
        bytes: Number of bytes moved; 0 if not known.
        bucket: Index of the reduced bucket or gathered unit; None for an action of the row.
        calls: Communication within the action: the starts of collective ops, and the waits for them.
    """

    action: Action
    start: float
    end: float
    bytes: int = 0
    bucket: int | None = None
    calls: tuple[Call, ...] = ()


class Updated(NamedTuple):
    """What an actor knows about an update.

    Attributes:
        grad_norm: Global norm of the gradients before clipping; None if not known.
        lr: Learning rate; None if another actor made the update, or if there was none.
        scale: Scale of the loss in this step; None if it was not scaled.
        is_skipped: Whether no weight has changed, because a number was not finite or the step had no targets.
        unreached: In the first update, parameters that got no gradient though all should.
    """

    grad_norm: float | None = None
    lr: float | None = None
    scale: float | None = None
    is_skipped: bool = False
    unreached: tuple[str, ...] = ()


class RangeCount(NamedTuple):
    """How many values of one tensor of a step a number format cannot hold.

    Attributes:
        layer_index: Index of the layer in the model.
        layer: Its logical name.
        kind: Whether the tensor is an output of the layer, the gradient of one, or the gradient of a parameter.
        microbatch: Number of the microbatch in the whole step, over all replicas; None for the gradient of a parameter.
        part: Which tensor of the layer and which part of it; the same on actors that hold the same part.
        values: Number of its elements.
        over: How many of them overflow.
        under: How many of them underflow.
    """

    layer_index: int
    layer: str
    kind: RangeKind
    microbatch: int | None
    part: tuple[Hashable, ...]
    values: int
    over: int
    under: int


class AddedLoss(NamedTuple):
    """A loss that a module has added to the objective of a step.

    Attributes:
        layer: Logical name of the module.
        kind: Name of the loss.
        value: Mean over the microbatches, with the loss's coefficient.
    """

    layer: str
    kind: str
    value: float


class ExpertLoad(NamedTuple):
    """How many tokens of a step have chosen each expert of a layer.

    Attributes:
        layer: Logical name of the router.
        asked: Choices by expert, those that were dropped included.
        dropped: Choices over the capacity, by expert.
    """

    layer: str
    asked: tuple[int, ...]
    dropped: tuple[int, ...]


class Shadowed(NamedTuple):
    """How often each expert of a list was shadowed in a step, and why.

    Attributes:
        layer: Logical name of the list.
        times: Number of microbatches by expert, over all groups of actors that share experts out.
        without: Predicted seconds of the layer in the step, over the same groups, if no expert were shadowed.
        having: Predicted seconds with the experts that were shadowed.
    """

    layer: str
    times: tuple[int, ...]
    without: float
    having: float


class Copied(NamedTuple):
    """The state of an actor's snapshot copies on another node, after a step.

    Attributes:
        waited: Seconds that the actor has waited for a copy.
        lost: Why it has stopped to send copies; "" if it has not, or sends none.
    """

    waited: float = 0.0
    lost: str = ""


@dataclass(frozen=True)
class StepResult:
    """What one actor reports about one step.

    Attributes:
        losses: Mean loss of each microbatch, in order of microbatches; empty except from the last stage.
        counts: Number of target elements of each microbatch, in the same order.
        metrics: In an evaluation, the user's metrics of each microbatch with targets, in the same order: the sum of
            each, and the number of elements in it.
        printed: Lines that the user's code has printed on the actor since its last result.
        warned: Warnings that the actor has logged since its last result.
        communication: Seconds of ``busy`` in which an action started communication or waited for it.
        grad_norm: Global norm of the gradients before clipping, the same on every actor; None in an evaluation.
        lr: Learning rate of the update; None in an evaluation, and from an actor that updates nothing.
        busy: Seconds of compute, with the communication in it.
        start: When the first action began, in seconds of the clock of the driver's machine; 0 of a parameter server.
        end: When the last action ended, in the same seconds.
        overlap: Share of the gradient reduction that overlapped with compute; None if there was none.
        in_flight: Largest number of microbatches between forward and backward at a time, over all stages of the actor.
        peak_memory: Peak memory during the step, in bytes: of the process on a CPU (0 if the system does not report
            it), of torch's allocations on a GPU.
        samples: Number of samples whose losses the actor reports.
        memory: Bytes by kind, at their most within a step; gathered weights and buckets of gradients only where these
            come and go. Empty if the actor has not taken a training step.
        scale: Scale of the loss; None if it was not scaled.
        is_skipped: Whether the step changed no weight, because a number was not finite or it had no targets.
        unreached: In the first update, parameters that got no gradient though all should.
        ranges: Counts of overflow; empty in a step without them.
        auxiliary: Auxiliary losses of the actor's microbatches, by layer and kind; empty in an evaluation, and except
            from the first rank of a tensor group.
        loads: Tokens of the actor by layer and expert, from the same ranks.
        shadows: Experts that were shadowed, from the first of a group of actors that share experts out.
        copied: The state of the copies of its snapshots.
        updates: With an asynchronous schedule, the actor's update of each step; losses are those of all steps.
        is_validated: Whether these updates were decided by all stages together, so that norms are those of all.
        profile: Why the profile of the step is missing, "" if it was written; None if none was asked for.
    """

    losses: tuple[float, ...] = ()
    counts: tuple[int, ...] = ()
    grad_norm: float | None = None
    lr: float | None = None
    busy: float = 0.0
    start: float = 0.0
    end: float = 0.0
    overlap: float | None = None
    in_flight: int = 0
    peak_memory: int = 0
    samples: int = 0
    memory: Mapping[Kind, int] = field(default_factory=dict)
    scale: float | None = None
    is_skipped: bool = False
    unreached: tuple[str, ...] = ()
    ranges: tuple[RangeCount, ...] = ()
    auxiliary: tuple[AddedLoss, ...] = ()
    loads: tuple[ExpertLoad, ...] = ()
    shadows: tuple[Shadowed, ...] = ()
    copied: Copied = field(default_factory=Copied)
    updates: tuple[Updated, ...] = ()
    is_validated: bool = False
    metrics: tuple[tuple[tuple[float, float], ...], ...] = ()
    printed: tuple[str, ...] = ()
    warned: tuple[str, ...] = ()
    communication: float = 0.0
    profile: str | None = None


class Located(NamedTuple):
    """Where an actor is.

    Attributes:
        machine: The name of its machine.
        process: Its process.
        last_action: The descriptor in it of the file with its last action (``LastAction``); -1 if there is none.
        gpu: What torch calls its GPU, and the GPU's identity; "" on a CPU.
    """

    machine: str
    process: ProcessIdentity
    last_action: int = -1
    gpu: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class Progress:
    """How far an actor is in a step.

    Attributes:
        step: Number of the step.
        done: Number of its actions that are done.
        action: The action under way; None between two.
        idle: Whether it waits for others or for the disk without a deadline.
        program: "evaluate" if the step is a batch of an evaluation.
    """

    step: int
    done: int
    action: Action | None
    idle: bool = False
    program: ProgramName = "train"


def losses_of(results: Sequence[StepResult]) -> tuple[list[float], list[int]]:
    """Collect loss and token count of every microbatch, in the order in which one process would take them.

    That is the first microbatch of each replica, then the second of each, and so on.

    Args:
        results: The actors' results, by rank.

    Returns:
        The losses, and the numbers of target elements.
    """
    last = [result for result in results if result.losses]
    losses = [loss for same in zip(*(result.losses for result in last), strict=True) for loss in same]
    counts = [count for same in zip(*(result.counts for result in last), strict=True) for count in same]
    return losses, counts


def mean_loss(losses: Sequence[float], counts: Sequence[int]) -> float | None:
    """Compute the mean loss over tokens.

    Args:
        losses: Mean loss of each microbatch, in the order of addition.
        counts: Number of tokens of each microbatch.

    Returns:
        The mean; None if there are no tokens.
    """
    most = max(counts)
    if not most:
        return None
    # Weights are shares of the largest count, so that equal counts give exactly sum(losses) / len(losses).
    shares = [count / most for count in counts]
    return float_sum(share * loss for share, loss in zip(shares, losses, strict=True)) / float_sum(shares)
