"""The diagnosis of a failed parity check: repeat a step on the layout and in one process, compare layer by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from raypar.actors.errors import NonFiniteError
from raypar.actors.inspect.activations import LOSS, Spot
from raypar.actors.mesh.mesh import AXES
from raypar.actors.sharding import Sharding
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.parity.case import Case, Piece
from raypar.parity.causes import cause_of
from raypar.parity.compare import norm_of, relative_error, scales_of
from raypar.parity.reference import Watched, watch_plainly
from raypar.schedules.float_sum import float_sum

if TYPE_CHECKING:
    from raypar.job.job import Job


@dataclass(frozen=True)
class Diagnosis:
    """The first tensor that differs, in the order in which a step computes them.

    Attributes:
        place: The tensor, for example "output of blocks.1 in microbatch 0, forward"; "" if nothing differs in the
            compared steps.
        error: The norm of the difference, relative to the tensor's norm.
        cause: The likely cause, as a phrase.
        steps: The steps that were compared, counted from 0. The difference is in the last one.
    """

    place: str
    error: float
    cause: str
    steps: tuple[int, ...]

    def __str__(self) -> str:
        if not self.place:
            steps = " and ".join(str(step + 1) for step in self.steps)
            return f"layer by layer nothing differs in step {steps}: look at the update, and at what a later step does"
        where = f"{self.place}, in step {self.steps[-1] + 1}"
        wrong = f"differs by {self.error:.3g} of its norm" if math.isfinite(self.error) else "is missing or misshapen"
        return f"begins with: {where}: {wrong}\nlikely cause: {self.cause}"


class _Compared(NamedTuple):
    """A logical tensor and the actors' parts of it.

    Attributes:
        name: The tensor's name in messages.
        wanted: The whole tensor of the plain process.
        scale: The norm by which the error is divided.
        backward: Whether the tensor is a gradient.
        pieces: The actors' parts.
        key: The tensor's key among those of the plain process.
        takes: For each piece, the function that takes it from a whole tensor.
    """

    name: str
    wanted: Tensor
    scale: float
    backward: bool
    pieces: list[Piece]
    key: Spot | str
    takes: Sequence[Callable[[Tensor], Tensor]]

    @property
    def error(self) -> float:
        """Compute the relative norm of the difference; if several actors have the same part, their root mean square."""
        if any(piece.ours is None for piece in self.pieces):
            return math.inf
        pairs = [(piece.ours, piece.wanted) for piece in self.pieces if piece.ours is not None]
        squares = float_sum(relative_error(ours, wanted, 1.0) ** 2 for ours, wanted in pairs)
        copies = sum(piece.wanted.numel() for piece in self.pieces) / max(1, self.wanted.numel())
        return math.sqrt(squares / (copies or 1.0)) / (self.scale or 1.0)


def diagnose(job: Job, run: Run, allowed: float, drifted: float, later: int) -> Diagnosis:
    """Repeat step 0 of a run, and step ``later`` if nothing differs in step 0, and find the first tensor that differs.

    Compares the outputs in the order of the layers, then the gradients of these outputs in the order of the backward,
    microbatch by microbatch, then the gradients of the weights. Step 0 is taken without clipping, because one wrong
    gradient would change all clipped ones. Tensors are fetched to the driver until one differs.

    Args:
        job: The job, with at least the actors that the run needs.
        run: The run to repeat.
        allowed: The largest relative difference that counts as right in step 0.
        drifted: The largest relative difference that counts as right in a later step.
        later: The later step.

    Returns:
        The diagnosis.

    Raises:
        Exception: The errors of ``Job.step``, except NonFiniteError in the compared steps.
    """
    steps = tuple(sorted({0, later}))
    for number, step in enumerate(steps):
        job.reset(run if step else replace(run, clip=None))
        found = _first(job, step, drifted if step else allowed)
        if found is not None:
            return Diagnosis(found[0].name, found[0].error, cause_of(found[1]), steps[: number + 1])
    return Diagnosis("", 0.0, "", steps)


def _first(job: Job, step: int, allowed: float) -> tuple[_Compared, Case] | None:
    """Return the first tensor of a step whose error is not within ``allowed``, and its case for ``cause_of``."""
    run = job.run
    for _ in range(step):
        job.step()
    stepper = job.stepper()
    modules = job.watch()
    with suppress(NonFiniteError):
        stepper.finish()
    plain = watch_plainly(run, step, modules)
    for one in chain(_outputs(job, plain), _gradients(job, plain)):
        if not one.error <= allowed:
            return one, _case(run, step, one, plain)
    return None


def _case(run: Run, step: int, one: _Compared, plain: Watched) -> Case:
    """Return the case of a wrong tensor, with the parts of auxiliary losses and the gradients of other experts."""
    sizes: dict[str, int] = {axis: len(run.mesh.groups(axis)[0]) for axis in AXES}
    sizes |= {"ep": run.mesh.ep, "microbatches": run.microbatches}
    vectors = {name: weight for name, weight in plain.weights.items() if weight.dim() == 1}
    auxiliary = list[Tensor]()
    if one.backward and plain.has_auxiliary:
        others = watch_plainly(run, step, _modules(plain), auxiliary=False)
        without = _found(others, one.key)
        part = one.wanted if without is None else one.wanted - without
        auxiliary = [take(part) for take in one.takes]
    of_expert = _any_expert(one.key) if isinstance(one.key, str) else None
    experts = {
        name: [take(gradient) for take in one.takes]
        for name, gradient in plain.gradients.items()
        if gradient is not None and of_expert is not None and name != one.key and _any_expert(name) == of_expert
    }
    return Case(one.pieces, sizes, one.backward, vectors, auxiliary, experts)


def _found(plain: Watched, key: Spot | str) -> Tensor | None:
    return plain.gradients.get(key) if isinstance(key, str) else plain.tensors.get(key)


def _modules(plain: Watched) -> set[str]:
    """Return the watched modules."""
    return {spot.module for spot in plain.tensors} - {LOSS, *plain.layers}


def _any_expert(name: str) -> str | None:
    """Return a parameter's name with its expert's number replaced by "*"; None if it belongs to no expert."""
    any_expert, count = re.subn(r"(?<=\.experts\.)\d+(?=\.)", "*", name)
    return any_expert if count else None


def _outputs(job: Job, plain: Watched) -> Iterator[_Compared]:
    """Yield the layers' outputs and the gradients of these outputs.

    The tensors of one microbatch's forward, or of its backward, are fetched at a time.
    """
    shardings: dict[Spot, dict[int, Sharding]] = {}  # by output and rank, its part
    for (_, backward), same in groupby(plain.tensors, lambda spot: (spot.microbatch, spot.backward)):
        spots = list(same)
        for spot, ours in zip(spots, job.sights(spots), strict=True):
            wanted, output = plain.tensors[spot], spot._replace(backward=False)
            if not backward:
                shardings[spot] = {rank: sight.sharding for rank, sight in ours.items()}
            pieces = [
                _piece(job, rank, ours[rank].tensor if rank in ours else None, sharding.take(wanted))
                for rank, sharding in shardings[output].items()
            ]
            takes = [sharding.take for sharding in shardings[output].values()]
            if pieces:  # no actor keeps the loss if each has only a part of the tokens
                yield _Compared(str(spot), wanted, norm_of(wanted), backward, pieces, spot, takes)


def _gradients(job: Job, plain: Watched) -> Iterator[_Compared]:
    """Yield the gradients of the weights."""
    made = {name: gradient for name, gradient in plain.gradients.items() if gradient is not None}
    scales = scales_of(made, plain.layers)
    for name, wanted in made.items():
        held = job.grads(name)
        pieces = [_piece(job, rank, ours, shard.take(wanted)) for rank, (shard, ours) in held.items()]
        nobody = [Piece("nobody", {}, None, wanted)]
        takes = [shard.take for shard, _ in held.values()]
        yield _Compared(f"gradient of {name}", wanted, scales[name], True, pieces or nobody, name, takes)


def _piece(job: Job, rank: int, ours: Tensor | None, wanted: Tensor) -> Piece:
    """Return the piece of a rank, with its name and its coordinate."""
    world = world_of(job.run)
    at = world.mesh.coordinate(rank) if rank < world.mesh.size else {}  # experts and servers have none
    return Piece(world.label(rank), {str(axis): index for axis, index in at.items()}, ours, wanted)
