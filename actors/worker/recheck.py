"""Comparison of replicas, to find bit flips: of their weights, and of a microbatch that others compute again."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from torch import Tensor

from raypar.actors.data_parallel.replica_checks import OtherInputsError, UnequalReplicasError, digest, gathered
from raypar.actors.mesh.memberships import memberships
from raypar.actors.tensors import Values
from raypar.actors.worker.build.model_part import ModelPart
from raypar.actors.worker.build.rank_context import RankContext
from raypar.schedules.action import BACKWARDS, Action, Op

_AGAIN = 2  # other replicas that compute it again, if there are as many: with three results, a majority decides
_DATA = "batch"
_INPUTS = "inputs"
_OUTPUTS = "outputs"
_WEIGHTS = "gradients of weights"
Key = tuple[Action, str]
"""the action and the kind of values (inputs or results) of a digest"""
DEFAULT_EVERY = 1000  # steps between two comparisons of weights, if the run does not set them


class Recheck:
    """Compares the results of a microbatch on its replica with those on other replicas, which hold the same weights.

    Before the step, every replica computes the first microbatch of the next replica, and of the one after that, through
    its whole pipeline. In the step it computes its own. Data and dropout depend on nothing but the seed, the step and
    the microbatch, so all results have the same bits.

    Args:
        context: The actor's rank, device and groups.
        row: Its row of the training step.
        parameters: By stage, its parameters by name.

    Attributes:
        row: The actions of the microbatch.
    """

    def __init__(
        self, context: RankContext, row: Sequence[Action], parameters: Mapping[int, Mapping[str, Tensor]]
    ) -> None:
        self._context, self._every = context, context.plan.run.recheck_every
        # The first microbatch, in all its slices: in most schedules every stage's first backward is of it.
        self._slices = frozenset(range(context.plan.programs["train"].slices))
        self.row = tuple(action for action in row if action.microbatch in self._slices)
        self._alone = dict(_alone(row, parameters, self._slices)) if self._every else {}
        self._seen: dict[int, dict[Key, bytes]] = {}

    def begin(self, step: int) -> range:
        """Begin a step, counted from 0.

        Returns:
            Distances (in dp) to the replicas whose microbatch is to be computed again; none in most steps.
        """
        self._seen = {}
        if not self._every or (step + 1) % self._every:
            return range(0)
        return range(1, min(self._context.world.mesh.dp, _AGAIN + 1))

    def watch(self, further: int) -> None:
        """Begin to store digests of the microbatch of the replica at a distance; 0 is this replica, in the step."""
        self._seen[further] = {}

    def watches(self, action: Action) -> bool:
        """Return whether the results of an action are compared."""
        return bool(self._seen) and action.microbatch in self._slices

    def note(self, further: int, action: Action, inputs: Values, outputs: Values, data: Values = ()) -> None:
        """Store digests of the inputs and the results of a forward or backward.

        Args:
            further: See ``watch``.
            action: The action.
            inputs: Its inputs from other actions.
            outputs: Its results.
            data: Its inputs from the batch.
        """
        if not self.watches(action):
            return
        seen = self._seen[further]
        for what, values in ((_DATA, data), (_INPUTS, inputs), (_OUTPUTS, outputs)):
            seen[action, what] = digest({str(number): value for number, value in enumerate(values)})
        if action in self._alone:
            gradients = {name: one.grad for name, one in self._alone[action].items() if one.grad is not None}
            seen[action, _WEIGHTS] = digest(gradients)

    def compare(self, step: int) -> None:
        """Compare the digests of all replicas at this actor's coordinates, before the update of a step.

        Args:
            step: The step, counted from 1.

        Raises:
            UnequalReplicasError: One of them has other results of the same inputs.
            OtherInputsError: One has received other inputs, so another pipeline rank or a message is at fault.
        """
        seen, self._seen = self._seen, {}
        if not seen:
            return
        keys, peers = list(seen[0]), self._peers()
        rows = gathered(
            b"".join(seen[further][key] for further in sorted(seen) for key in keys), self._context.groups["dp"]
        )
        size = len(rows[0]) // (len(keys) * len(seen))
        for at, key in enumerate(keys):
            others = dict[int, bool]()  # by replica with another result, whether it is known to be wrong
            for target in range(len(peers)):
                votes = dict[int, bytes]()
                for further in seen:
                    voter = (target - further) % len(peers)
                    start = size * (further * len(keys) + at)
                    votes[voter] = rows[peers[voter]][start : start + size]
                others |= _minority(votes)
            if others:
                raise self._error(step, key, sorted(others), is_sure=all(others.values()))

    def _peers(self) -> list[int]:
        """Return the ranks, in the group of all replicas, that differ from this actor only in dp, by dp."""
        world, rank = self._context.world, self._context.plan.rank
        members = next(one.members for one in memberships(world, rank) if one.key == "dp")
        here = [at for at, one in enumerate(members) if world.at(one)["cp"] == self._context.cp]
        return sorted(here, key=lambda at: world.at(members[at])["dp"])

    def _error(self, step: int, key: Key, replicas: Sequence[int], *, is_sure: bool) -> Exception:
        world, (action, what) = self._context.world, key
        at = world.at(self._context.plan.rank)
        names = [world.label(world.mesh.rank(**at | {"dp": replica})) for replica in replicas]
        who, others = ", ".join(names), "those of all others" if is_sure else "alike, and nobody knows which are right"
        message = f"in step {step} the {what} of {action} on {who} are not {others} that computed the same microbatch"
        if what == _DATA:
            return UnequalReplicasError(f"{message}: a batch must depend on nothing but step, microbatch and dp")
        if what == _INPUTS:
            return OtherInputsError(f"{message}: a bit has flipped before, or on its way")
        return UnequalReplicasError(
            f"{message}: a bit has flipped in a memory or a core (see that machine's error counters), or a layer of "
            "yours depends on more than its inputs, its weights and torch's generator"
        )


def _minority(votes: Mapping[int, bytes]) -> dict[int, bool]:
    """Return the voters outside of the majority, each with True; without a majority all voters, each with False."""
    ((usual, count),) = Counter(votes.values()).most_common(1)
    if 2 * count > len(votes):
        return {voter: True for voter, vote in votes.items() if vote != usual}
    return dict.fromkeys(votes, False)


def _alone(
    row: Iterable[Action], parameters: Mapping[int, Mapping[str, Tensor]], slices: frozenset[int]
) -> Iterator[tuple[Action, dict[str, Tensor]]]:
    """Yield the backwards after which a stage's gradients are those of the microbatch alone, with their parameters.

    That is so for parameters of no other stage, after the last B or W, if no other microbatch's backward and no
    reduction comes before. Which gradients an I computes may differ between repetitions.
    """
    held = Counter(id(one) for named in parameters.values() for one in named.values())
    begun, complete = defaultdict[int, set[int | None]](set), defaultdict[int, set[int | None]](set)
    for action in row:
        if action.op in (*BACKWARDS, Op.REDUCE_GRAD) and action.stage is not None:
            begun[action.stage].add(action.microbatch)
            if action.op in (Op.B, Op.W):
                complete[action.stage].add(action.microbatch)
            if begun[action.stage] == complete[action.stage] == slices:
                yield action, {name: one for name, one in parameters[action.stage].items() if held[id(one)] == 1}


def is_due(check_every: int | None, steps: range) -> bool:
    """Return whether replicas compare their weights in one of these steps.

    Args:
        check_every: That of the run. None: in step 2, which finds unequal updates, and in every 1,000th.
        steps: The steps, counted from 0.
    """
    if check_every is None:
        return 1 in steps or is_due(DEFAULT_EVERY, steps)
    return bool(check_every) and any((step + 1) % check_every == 0 for step in steps)


def compare_if_due(context: RankContext, part: ModelPart, steps: range, when: str) -> None:
    """Compare weights if that is due in one of some steps, counted from 0; see ``compare_weights``."""
    if is_due(context.plan.run.check_every, steps) and not context.world.servers:  # servers send all the same weights
        compare_weights(context, part, when)


def compare_weights(context: RankContext, part: ModelPart, when: str | None) -> None:
    """Compare the weights that optimizers update, over all replicas that hold the same ones.

    Args:
        context: The actor's rank, device and groups.
        part: Its part of the model.
        when: When in the run, as "in step 3"; None for the initial weights.

    Raises:
        UnequalReplicasError: Another replica has other weights.
    """
    if when is not None and part.weights:  # only shards are always whole, and only hybrid sharding has copies of them
        if context.world.hybrid and context.world.offload != "parameters":
            with part.storage.accessible(list(part.masters.parameters.values())):
                context.compare(("replicate",), partial(_digests, part.masters.parameters), when)
        return
    for owner in range(part.owners.count):
        keys = ("dp", f"ps{owner}") if owner < part.owners.num_dense else ("edp",)
        context.compare(keys, partial(part.digests, owner), when)


def compare_fixed(context: RankContext, part: ModelPart) -> None:
    """Compare the tensors that no optimizer changes, before the first step; see ``compare_weights``."""
    for key, fixed in zip(("dp", "edp"), part.fixed_apart(), strict=True):
        context.compare((key,), partial(_digests, fixed))


def _digests(tensors: Mapping[str, Tensor]) -> list[bytes]:
    """Return one digest of all tensors."""
    return [digest(tensors)]
