"""One microbatch of a step, computed again by other replicas, to find a bit that flips while an actor computes.

Comparison of the weights of replicas, which must have the same bits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from raypar.actors.data_parallel.replica_checks import OtherInputsError, UnequalReplicasError, digest, gathered
from raypar.actors.mesh.memberships import memberships
from raypar.actors.tensors import Values
from raypar.actors.worker.build.model_part import ModelPart
from raypar.actors.worker.build.rank_context import RankContext
from raypar.schedules.action import BACKWARDS, Action, Op

_AGAIN = 2  # replicas that compute it again, if there are so many others: of three, two decide


_DATA = "batch"
_INPUTS = "inputs"
_OUTPUTS = "outputs"
_WEIGHTS = "gradients of weights"


Key = tuple[Action, str]


DEFAULT_EVERY = 1000  # steps between two comparisons, if the run does not say


"""what a digest is of: what an action took, or what it made"""


class Recheck:
    """Compares what a microbatch gives on its own replica with what it gives on others, which hold the same weights.

    Before the step, every replica computes the first microbatch of the next replica, and of the one after that, through
    its whole pipeline. In the step it computes its own. Data and dropout depend on nothing but the seed, the step and
    the microbatch, so all that comes of it has the same bits.

    Args:
        seat: The actor's seat.
        row: Its row of the training step.
        parameters: By stage, its parameters by name.

    Attributes:
        row: The actions of the microbatch.
    """

    def __init__(
        self, seat: RankContext, row: Sequence[Action], parameters: Mapping[int, Mapping[str, Tensor]]
    ) -> None:
        self._seat, self._every = seat, seat.plan.run.recheck_every
        # The first microbatch, in all its slices: in most schedules every stage's first backward is of it.
        self._slices = frozenset(range(seat.plan.programs["train"].slices))
        self.row = tuple(action for action in row if action.microbatch in self._slices)
        self._alone = dict(_alone(row, parameters, self._slices)) if self._every else {}
        self._seen: dict[int, dict[Key, bytes]] = {}

    def begin(self, step: int) -> range:
        """Begin a step, counted from 0.

        Returns:
            How many replicas further those are whose microbatch is to be computed again; none in most steps.
        """
        self._seen = {}
        if not self._every or (step + 1) % self._every:
            return range(0)
        return range(1, min(self._seat.world.mesh.dp, _AGAIN + 1))

    def watch(self, further: int) -> None:
        """Keep digests of the microbatch of the replica that is so many further; of the own one, in the step, for 0."""
        self._seen[further] = {}

    def watches(self, action: Action) -> bool:
        """Return whether what an action makes is compared."""
        return bool(self._seen) and action.microbatch in self._slices

    def note(self, further: int, action: Action, inputs: Values, outputs: Values, data: Values = ()) -> None:
        """Note what a forward or backward took and made.

        Args:
            further: See ``watch``.
            action: The action.
            inputs: What it took from another action.
            outputs: What it made.
            data: What it took from the batch.
        """
        if not self.watches(action):
            return
        seen = self._seen[further]
        for what, values in ((_DATA, data), (_INPUTS, inputs), (_OUTPUTS, outputs)):
            seen[action, what] = digest({str(number): value for number, value in enumerate(values)})
        if action in self._alone:
            made = {name: one.grad for name, one in self._alone[action].items() if one.grad is not None}
            seen[action, _WEIGHTS] = digest(made)

    def compare(self, step: int) -> None:
        """Compare the digests of all replicas at this actor's coordinates, before the update of a step.

        Args:
            step: The step, counted from 1.

        Raises:
            UnequalReplicasError: One of them has made something else from the same inputs.
            OtherInputsError: One has got other inputs, which is due to another pipeline rank, or to the way from it.
        """
        seen, self._seen = self._seen, {}
        if not seen:
            return
        keys, peers = list(seen[0]), self._peers()
        rows = gathered(
            b"".join(seen[further][key] for further in sorted(seen) for key in keys), self._seat.groups["dp"]
        )
        size = len(rows[0]) // (len(keys) * len(seen))
        for at, key in enumerate(keys):
            others = dict[int, bool]()  # by replica that has something else, whether it is known to be wrong
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
        """Return where in the group of all replicas those are that differ from this actor on dp only, by dp."""
        world, rank = self._seat.world, self._seat.plan.rank
        members = next(one.members for one in memberships(world, rank) if one.key == "dp")
        here = [at for at, one in enumerate(members) if world.at(one)["cp"] == self._seat.cp]
        return sorted(here, key=lambda at: world.at(members[at])["dp"])

    def _error(self, step: int, key: Key, replicas: Sequence[int], *, is_sure: bool) -> Exception:
        world, (action, what) = self._seat.world, key
        at = world.at(self._seat.plan.rank)
        names = [world.label(world.mesh.rank(**at | {"dp": replica})) for replica in replicas]
        who, others = ", ".join(names), "those of all others" if is_sure else "alike, and nobody knows which are right"
        told = f"in step {step} the {what} of {action} on {who} are not {others} that computed the same microbatch"
        if what == _DATA:
            return UnequalReplicasError(f"{told}: a batch must depend on nothing but step, microbatch and dp")
        if what == _INPUTS:
            return OtherInputsError(f"{told}: a bit has flipped before, or on its way")
        return UnequalReplicasError(
            f"{told}: a bit has flipped in a memory or a core (see that machine's error counters), or a layer of yours "
            "depends on more than its inputs, its weights and torch's generator"
        )


def _minority(votes: Mapping[int, bytes]) -> dict[int, bool]:
    """Return who votes otherwise than most, each with True; without a majority all, each with False."""
    ((usual, count),) = Counter(votes.values()).most_common(1)
    if 2 * count > len(votes):
        return {voter: True for voter, vote in votes.items() if vote != usual}
    return dict.fromkeys(votes, False)


def _alone(
    row: Iterable[Action], parameters: Mapping[int, Mapping[str, Tensor]], slices: frozenset[int]
) -> Iterator[tuple[Action, dict[str, Tensor]]]:
    """Yield the backwards after which gradients of a stage are those of the microbatch, with their parameters.

    Those are the parameters of no other stage, and no other microbatch's backward comes before, nor a reduction. They
    are complete after the last B or W; which of them an I makes may differ from one time to the next.
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
        check_every: That of the run. None: in step 2, which finds updates that are not the same, and in every 1,000th.
        steps: The steps, counted from 0.
    """
    if check_every is None:
        return 1 in steps or is_due(DEFAULT_EVERY, steps)
    return bool(check_every) and any((step + 1) % check_every == 0 for step in steps)


def compare_if_due(seat: RankContext, part: ModelPart, steps: range, when: str) -> None:
    """Compare weights if that is due in one of some steps, counted from 0; see ``compare_weights``."""
    if is_due(seat.plan.run.check_every, steps) and not seat.world.servers:  # servers send all the same weights
        compare_weights(seat, part, when)


def compare_weights(seat: RankContext, part: ModelPart, when: str | None) -> None:
    """Compare the weights that optimizers update, over all replicas of an actor that hold the same.

    Args:
        seat: The actor's seat.
        part: Its part of the model.
        when: When in the run, as "in step 3"; None: before the first step, as the weights were made.

    Raises:
        UnequalReplicasError: Another replica has other weights.
    """
    if when is not None and part.weights:  # only shards are always there, and only hybrid sharding has copies of them
        if seat.world.hybrid and seat.world.offload != "parameters":
            with part.home.accessible(list(part.masters.parameters.values())):
                seat.compare(("replicate",), [digest(part.masters.parameters)], when)
        return
    for owner in range(part.owners.count):
        keys = ("dp", f"ps{owner}") if owner < part.owners.num_dense else ("edp",)
        seat.compare(keys, part.digests(owner), when)


def compare_fixed(seat: RankContext, part: ModelPart) -> None:
    """Compare what no optimizer changes, before the first step. Arguments and errors: see ``compare_weights``."""
    for key, fixed in zip(("dp", "edp"), part.fixed_apart(), strict=True):
        if key in seat.groups:
            seat.compare((key,), [digest(fixed)])
