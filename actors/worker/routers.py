"""The routers of a worker's stages: they are balanced after a step, and their losses and loads are reported."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from raypar.actors.errors import NonFiniteError, RouterError
from raypar.actors.expert_parallel.record import Balanced, Routed
from raypar.actors.specs.results import AddedLoss, ExpertLoad, Shadowed, Updated
from raypar.actors.worker.build.model_part import ModelPart
from raypar.actors.worker.build.rank_context import RankContext
from raypar.schedules.action import Action, Op


class Routers:
    """The routers of one actor's stages.

    Args:
        context: The actor's rank, device and groups.
        part: Its part of the model.
    """

    def __init__(self, context: RankContext, part: ModelPart) -> None:
        self._context, self._record = context, part.record
        self._modules: dict[str, Routed] = {}
        self._stages: dict[str, int] = {}
        for number, router in part.routers():
            self._modules[router.name], self._stages[router.name] = router, number
        self._balanced = [one for one in self._modules.values() if isinstance(one, Balanced) and one.is_balanced]

    def begin(self, weight: float) -> None:
        """Begin a step, in which each microbatch's auxiliary losses have this weight, unless ``weigh`` changes it."""
        self._record.begin(weight)

    def weigh(self, weight: float) -> None:
        """Set the weight of a microbatch's auxiliary losses, in rows whose microbatches belong to several steps."""
        self._record.weight = weight

    def copy(self) -> None:
        """Start to copy what the routers have recorded to the host, before the step's other reads."""
        self._record.copy(self._context.device.read_back)

    def balance(self, updated: Updated) -> None:
        """Balance the routers by the tokens of the whole step, over all replicas, after an update that was not skipped.

        One all_reduce on the host for all routers of the actor.

        Raises:
            GroupError: The counts could not be summed.
        """
        if updated.is_skipped or not self._balanced:
            return
        counts = [self._record.asked(router.name, router.num_experts) for router in self._balanced]
        for key in ("dp", "tp"):
            own = [a for a, router in zip(counts, self._balanced, strict=True) if key == "dp" or router.divides_tokens]
            if own and key in self._context.groups:
                whole = torch.cat(own)
                self._context.groups[key].host.all_reduce(whole).wait()
                for part, total in zip(own, whole.split([len(part) for part in own]), strict=True):
                    part.copy_(total)
        with torch.no_grad():
            for router, count in zip(self._balanced, counts, strict=True):
                router.balance(count)

    @contextmanager
    def named(self, step: int) -> Iterator[None]:
        """Return a context for the end of a step, in which an error names the first router with non-finite scores.

        Args:
            step: The step, counted from 0.

        Raises:
            RouterError: The step is not finite, and neither are a router's scores.
        """
        try:
            yield
        except NonFiniteError as error:
            if (found := self._record.not_finite()) is None:
                raise
            name, microbatch = found
            dp, number = self._context.world.mesh.dp, self._stages[name]
            action = Action(number, Op.F, microbatch // dp)
            raise RouterError(
                f"step {step + 1}: the router of {name} gave scores that are not finite in {action} on actor "
                f"{self._context.label}; no weight was changed: look at the batch, lower the "
                "learning rate, clip, or add a z-loss"
            ) from error

    def losses(self) -> tuple[AddedLoss, ...]:
        """Return the auxiliary losses of the step; of a tensor group the first rank reports them."""
        return self._record.losses() if self._context.leads else ()

    def shadows(self) -> tuple[Shadowed, ...]:
        """Return which experts were shadowed in the step."""
        return self._record.shadowed()

    def loads(self) -> tuple[ExpertLoad, ...]:
        """Return the tokens of each expert in the step.

        Of a tensor group the first rank reports them, except of modules whose tokens are divided over the group.
        """
        leads, modules = self._context.leads, self._modules
        return tuple(load for load in self._record.loads() if leads or modules[load.layer].divides_tokens)
