"""The rules that can be checked within one row: completeness, placement, order, memory, whole weights and the
closing STEP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import islice

from raypar.schedules.action import MOVES, RECVS, SENDS, Action, Op
from raypar.schedules.checking.errors import Fault
from raypar.schedules.rules import (
    HOLDS,
    MAKES_GRADIENTS,
    MAKES_INPUT_GRADIENTS,
    USES_WEIGHTS,
    crosses,
    needs,
    why_none_moves,
)
from raypar.schedules.schedule import Schedule
from raypar.schedules.written_rows import MOST_LISTED

# One bit for each op that a stage performs once for a microbatch; a full backward B sets the bits of both halves.
_ONCE = (Op.F, Op.I, Op.W, Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B, Op.OFFLOAD, Op.RELOAD)
_BIT = {op: 1 << position for position, op in enumerate(_ONCE)}
_BITS = {**_BIT, Op.B: _BIT[Op.I] | _BIT[Op.W]}
_BITS_OF_ONE = len(_BIT)
_MOVED = _BIT[Op.OFFLOAD] | _BIT[Op.RELOAD]  # optional for a microbatch
_UPDATES = frozenset({Op.STEP, Op.USE, Op.VALIDATE})

_Done = defaultdict[int, int]  # by microbatch, the bits of the ops that a stage has done
# For a stage and op: what the stage has done, the bits of the op, whether the row should have it, and for each need of
# it: what the need's stage has done, the difference of the two microbatches, and the need's bits.
_Kind = tuple[_Done | None, int, bool, tuple[tuple[_Done | None, int, int], ...]]


class RowCheck:
    """The check of one row. It stores one number for each stage and microbatch of the row, and nothing of other rows.

    Args:
        schedule: The schedule.
        rank: The row's rank.
        max_in_flight: The most activations that the rank may hold, or None for no limit.
        sharded: Whether weights are gathered, in this row or in another one.

    Attributes:
        faults: The faults found.
        reduced: The stages that have a REDUCE_GRAD in the row.
    """

    def __init__(self, schedule: Schedule, rank: int, max_in_flight: int | None, *, sharded: bool) -> None:
        self.faults: list[Fault] = []
        self.reduced: set[int] = set()
        self._schedule, self._rank = schedule, rank
        self._bound = None if schedule.forward_only else max_in_flight
        self._expected = {stage: _expected(stage, schedule) for stage in schedule.stages_of(rank)}
        self._own = {stage: schedule.microbatches_of(rank, stage) for stage in self._expected}
        self._done: dict[int, _Done] = {stage: defaultdict(int) for stage in self._expected}
        self._kinds: dict[tuple[int | None, Op, int | None, int], _Kind] = {}  # by stage, op, peer and slice
        self._weights = dict.fromkeys(self._expected, 0)
        self._unreduced = dict.fromkeys(self._expected, 0)  # weight gradients since the last REDUCE_GRAD
        self._last_reduced: dict[int, int] = {}  # by stage: the position of its last REDUCE_GRAD
        self._sharded = sharded
        self._whole: dict[int, int] = {}  # by stage that is whole: the position of its UNSHARD
        self._unfreed = set[int]()  # positions of UNSHARDs that were reported as never freed
        self._num_steps = 0
        self._held = 0

    def run(self) -> RowCheck:
        """Check every action of the row, then look for missing ones."""
        for index, action in enumerate(self._schedule.rows[self._rank]):
            if self._num_steps and (action.op in SENDS or action.op in RECVS):
                sentence = f"{action} comes after the STEP, in which every rank waits for all others: put it before"
                self._fault(index, "step", sentence)
            if action.op in _UPDATES and action.stage is not None:
                self._version(index, action, action.stage)
            elif action.microbatch is not None:
                self._perform(index, action)
            elif action.op is Op.STEP:
                self._step(index)
            else:
                self._whole_stage(index, action)
        self._demand_freed("the end of the row")
        for stage in self._expected:
            self._missing(stage)
        for stage, index in self._last_reduced.items():
            if late := self._unreduced[stage]:
                sentence = f"{stage}REDUCE_GRAD comes before {late} weight gradients (B or W) of its stage"
                self._fault(index, "reduce", f"{sentence}: put it after them, or a second one")
        closes = self._schedule.lowered and not self._schedule.forward_only and not self._schedule.stream
        if closes and not self._num_steps:
            self._fault(None, "step", "the row has no STEP: lower the schedule, it closes every row with one")
        return self

    def _perform(self, index: int, action: Action) -> None:
        """Check an action of one microbatch: placement, completeness, pairing and order."""
        stage, op, microbatch, peer = action
        key = stage, op, peer, (microbatch or 0) % self._schedule.slices
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = self._kind(action)
        done, bits, is_expected, provided = kind
        if done is None or stage is None or microbatch is None:
            self._misplaced(index, action)
            return
        if not 0 <= microbatch < self._schedule.num_microbatches:
            sentence = f"{action}: the step has {self._schedule.num_microbatches} microbatches only"
            self._fault(index, "complete", sentence)
            return
        if microbatch not in self._own[stage]:
            turn = self._schedule.label(self._schedule.row_of(stage, microbatch))
            self._fault(index, "placement", f"{action} is of another replica's turn: put it on {turn}")
            return
        before = done[microbatch]
        if before & bits:
            self._fault(index, "complete", f"{action} is done a second time")
        elif not is_expected:
            self._fault(index, "pairing", f"{action} has no counterpart: nothing crosses to another rank there")
        for number, (provider, shift, wanted) in enumerate(provided):
            if provider is not None and not provider[microbatch + shift] & wanted:
                need = needs(action, self._schedule)[number]
                self._fault(index, "order", f"{action} needs {need}, which is not done before it")
        if before & _BIT[Op.OFFLOAD] or op in MOVES:
            self._moved(index, action, before)
        if self._sharded and op in USES_WEIGHTS and stage not in self._whole:
            sentence = f"{action} needs the weights of stage {stage}, which are sharded here"
            self._fault(index, "weights", f"{sentence}: put {stage}UNSHARD before it")
        done[microbatch] = before | bits
        if op in MAKES_GRADIENTS:
            self._weights[stage] += 1
            self._unreduced[stage] += 1
        if op in HOLDS:
            self._hold(index, action)

    def _moved(self, index: int, action: Action, before: int) -> None:
        """Check an action whose activations are in host memory, or that moves them there or back.

        Args:
            index: The action's position in the row.
            action: The action.
            before: The bits of the ops that its stage has done for its microbatch.
        """
        stage, op, microbatch, _ = action
        if op is Op.OFFLOAD and (kind := why_none_moves(self._schedule)):
            self._fault(index, "host", f"{action}, but the schedule is {kind}: take it out")
        elif op is Op.OFFLOAD and before & _BITS[Op.B]:
            self._fault(index, "host", f"{action} comes after the backward of its microbatch: put it before that")
        elif op in MAKES_INPUT_GRADIENTS and not before & _BIT[Op.RELOAD]:
            sentence = f"{action} needs what {stage}OFFLOAD{microbatch} has moved to host memory"
            self._fault(index, "host", f"{sentence}: put {stage}RELOAD{microbatch} before it")

    def _kind(self, action: Action) -> _Kind:
        """Compute the facts that all microbatches of a stage and op share, or the same slice of all."""
        done = None if action.stage is None else self._done.get(action.stage)
        if done is None or action.stage is None:
            return None, 0, False, ()
        bits, provided = self._bits(action), []
        for need in needs(action, self._schedule):
            assert need.stage is not None
            shift = (need.microbatch or 0) - (action.microbatch or 0)
            is_here = need.stage in self._done and not crosses(need.stage, action.stage, self._schedule)
            provided.append((self._done[need.stage] if is_here else None, shift, self._bits(need)))
        return done, bits, not bits & ~(self._expected[action.stage] | _MOVED), tuple(provided)

    def _bits(self, action: Action) -> int:
        """Return the bits of an action of a stage; each skip's messages have separate bits, after all others."""
        return _BITS[action.op] if action.peer is None else _BITS[action.op] << _BITS_OF_ONE * (action.peer + 1)

    def _hold(self, index: int, action: Action) -> None:
        """Count the activations held, and report the first excess."""
        self._held += HOLDS[action.op]
        if self._bound is not None and self._held > self._bound:
            self._fault(index, "in flight", f"{action} makes it {self._held} activations, the bound is {self._bound}")
            self._bound = None

    def _step(self, index: int) -> None:
        """Check a STEP."""
        self._num_steps += 1
        if self._schedule.forward_only:
            self._fault(index, "step", "STEP in an evaluation, which has no gradients: take it out")
        elif self._num_steps > 1:
            self._fault(index, "step", "STEP is done a second time")
        else:
            late = sum(map(len, self._own.values())) - sum(self._weights.values())
            if late > 0:
                self._fault(index, "step", f"STEP comes before {late} weight gradients (B or W) of its rank")
        self._demand_freed("the STEP, which updates the shards")

    def _version(self, index: int, action: Action, stage: int) -> None:
        """Check the position of one stage's update or USE; ``version_rule_faults`` checks their numbers."""
        if stage not in self._expected:
            self._misplaced(index, action)
        elif not self._schedule.stream:
            sentence = f"{action} in a synchronous schedule, which has one version of its weights: take it out"
            self._fault(index, "versions", sentence)
        elif action.op is Op.STEP:
            self._demand_freed(f"{action}, which updates the shards", {stage})

    def _whole_stage(self, index: int, action: Action) -> None:
        """Check an action of a whole stage."""
        stage, op, _, _ = action
        if stage is None or stage not in self._expected:
            self._misplaced(index, action)
        elif op is Op.UNSHARD:
            self._whole.setdefault(stage, index)
        elif op is Op.RESHARD:
            if self._whole.pop(stage, None) is None:
                sentence = f"{action} frees weights that are not whole"
                self._fault(index, "weights", f"{sentence}: take it out, or put {stage}UNSHARD before it")
        else:
            self._reduce(index, stage, action)

    def _reduce(self, index: int, stage: int, action: Action) -> None:
        """Check a REDUCE_GRAD."""
        self.reduced.add(stage)
        if self._num_steps:
            self._fault(index, "step", f"{action} comes after the STEP, which needs what it reduces: put it before")
        if not self._unreduced[stage]:
            since = f" since the one at action {self._last_reduced[stage]}" if stage in self._last_reduced else ""
            sentence = f"{action} has no weight gradient (B or W) of its stage to reduce{since}"
            self._fault(index, "reduce", f"{sentence}: take it out, or put it after one")
        self._unreduced[stage] = 0
        self._last_reduced[stage] = index

    def _demand_freed(self, when: str, stages: Collection[int] | None = None) -> None:
        """Report the stages, of these or of all, whose weights are still whole, each window once."""
        for stage, index in self._whole.items():
            if (stages is None or stage in stages) and index not in self._unfreed:
                sentence = f"stage {stage} is still whole at {when}: put {stage}RESHARD after its last F, B or I"
                self._fault(index, "weights", sentence)
                self._unfreed.add(index)

    def _missing(self, stage: int) -> None:
        """Report the missing actions of a stage, for the first MOST_LISTED microbatches."""
        done, expected, own = self._done[stage], self._expected[stage], self._own[stage]
        num_missing = len(own) - sum(bits & ~_MOVED == expected for bits in done.values())
        if num_missing <= 0:
            return
        lacking = (mb for mb in own if expected & ~done.get(mb, 0))
        by_kind: defaultdict[int, list[int]] = defaultdict(list)
        for microbatch in islice(lacking, MOST_LISTED):
            by_kind[expected & ~done.get(microbatch, 0)].append(microbatch)
        for kind, microbatches in by_kind.items():
            which = ", ".join(map(str, microbatches))
            more = f" ({num_missing} microbatches of this stage lack something)" if num_missing > MOST_LISTED else ""
            self._fault(None, "complete", f"stage {stage} has no {_spell(kind)} of microbatch {which}{more}")

    def _misplaced(self, index: int, action: Action) -> None:
        placement = self._schedule.placement
        if action.stage is not None and action.stage < len(placement):
            sentence = f"{action} belongs on rank {placement[action.stage]}, which holds stage {action.stage}"
        else:
            sentence = f"{action}: the schedule has {len(placement)} stages only"
        self._fault(index, "placement", sentence)

    def _fault(self, index: int | None, rule: str, sentence: str) -> None:
        self.faults.append(Fault(self._rank, index, rule, sentence))


def _expected(stage: int, schedule: Schedule) -> int:
    """Return the bits that each microbatch of a stage must have when the row is done."""
    bits = _BIT[Op.F] if schedule.forward_only else _BIT[Op.F] | _BITS[Op.B]
    if schedule.lowered:
        backward = 0 if schedule.forward_only else ~0
        if stage > 0 and crosses(stage, stage - 1, schedule):
            bits |= _BIT[Op.RECV_F] | (backward & _BIT[Op.SEND_B])
        if stage + 1 < schedule.num_stages and crosses(stage, stage + 1, schedule):
            bits |= _BIT[Op.SEND_F] | (backward & _BIT[Op.RECV_B])
        for source, target in schedule.skips:
            if stage in (source, target) and crosses(source, target, schedule):
                ops = (Op.SEND_F, Op.RECV_B) if stage == source else (Op.RECV_F, Op.SEND_B)
                other = target if stage == source else source
                bits |= (_BIT[ops[0]] | (backward & _BIT[ops[1]])) << _BITS_OF_ONE * (other + 1)
    return bits


def _spell(kind: int) -> str:
    """Name the ops of some bits: both halves of a backward as B, and a skip's message with its other end."""
    ops = [op for op, bit in _BIT.items() if kind & bit]
    if Op.I in ops and Op.W in ops:
        ops = [Op.B if op is Op.I else op for op in ops if op is not Op.W]
    names, peer = [op.value for op in ops], 0
    while kind := kind >> _BITS_OF_ONE:
        names += [
            f"{op.value} to {peer}" if op in SENDS else f"{op.value} from {peer}" for op in _BIT if kind & _BIT[op]
        ]
        peer += 1
    return " and ".join(names)
