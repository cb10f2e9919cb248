"""The stepper over actors that are threads: every order, swap, rewind, what it shows, and recordings.

Threads share one random generator, so no dropout here: test_stepping.py has it, on real actors.
"""

from __future__ import annotations

import os
import random
import signal
import time
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import raypar as rp
from raypar.actors.errors import NonFiniteError
from raypar.cluster import interrupts
from raypar.errors import JobError
from raypar.schedules.action import BACKWARDS, COMPUTE, STEP, Action, Op
from raypar.schedules.catalog import build
from raypar.schedules.rules import provides, rank_of
from raypar.schedules.schedule import Schedule, ScheduleError
from raypar.schedules.step_board import MoveError
from tests.support.schedules import halved
from tests.support.team import Team, linears
from tests.support.thread_jobs import Hands


def normed():
    return [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh()) for _ in range(4)]


TIED = rp.GPT(layers=2, hidden=8, heads=2, seq=6, vocab=16, tied=True, dropout=0.0)


def tokens(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp)
    ids = torch.randint(0, 16, (2, 7), generator=generator)
    return ids[:, :-1], ids[:, 1:]


TEAMS = {
    "gpipe": lambda: Team(normed, 2, 3, "gpipe", backward="whole"),
    "1f1b": lambda: Team(linears(), 3, 4, "1f1b", recompute="full"),
    "split": lambda: Team(linears(), 2, 3, "gpipe", backward="split", dp=2),
    "interleaved": lambda: Team(linears(), 2, 4, "interleaved", optim=rp.AdamW(lr=0.1), clip=0.5),
    "replicas": lambda: Team(linears(), 2, 2, "1f1b", dp=2, zero=0),
    "halves": lambda: Team(linears(), 2, 3, halved("1f1b", 2, 3), dp=2),
    "zero": lambda: Team(linears(), 2, 2, "gpipe", dp=2, zero=1, optim=rp.AdamW(lr=0.1)),
    "servers": lambda: Team(linears(), 2, 2, "1f1b", dp=2, data_parallel="parameter_server"),
    "tensor": lambda: Team(None, 2, 2, "1f1b", model=TIED, data=tokens, tp=2, dp=2, zero=1, optim=rp.AdamW(lr=0.1)),
    "tied": lambda: Team(None, 2, 3, "1f1b", model=TIED, data=tokens, optim=rp.AdamW(lr=0.1)),
}


@pytest.fixture
def hands():
    """A team that takes steps by hand, by name."""
    return lambda name: Hands(TEAMS[name]())


def state(team):
    """Everything that a step changes for good: weights, what the optimizers keep, and buffers."""
    found = {
        f"{rank}/{name}": value for rank, actor in enumerate(team.all) for name, value in actor.parameters().items()
    }
    for rank, actor in enumerate(team.all):
        found |= {f"{rank}/{name}/{kept}": value for name, kept, value in actor.member.state.update.state() if kept}
    for rank, actor in enumerate(team.workers):
        found |= {f"{rank}/{name}": value for name, value in actor.member.state.buffers()}
    return {name: value.clone() for name, value in found.items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def in_order(done):
    """Whether both halves of each stage's backwards came in the order of their microbatches; B is both at once."""
    halves = {}
    for stage, op, microbatch, _ in (half for action in done if action.op in BACKWARDS for half in provides(action)):
        halves.setdefault((stage, op), []).append(microbatch)
    return all(order == sorted(order) for order in halves.values())


def first_like(picked, left):
    """Of the backwards that are left of a stage, and share a half with this one, the first."""
    ops = {half.op for half in provides(picked)}
    alike = [a for a in left if a.op in BACKWARDS and a.stage == picked.stage and ops & {h.op for h in provides(a)}]
    return min(alike, key=lambda action: action.microbatch)


COMPILED: dict = {}


def compiled(name):
    """Loss, gradients and state of a compiled step, once for all orders."""
    if name not in COMPILED:
        team = TEAMS[name]()
        results = team.step(0)
        losses = [loss for result in results for loss in result.losses]
        COMPILED[name] = losses, team.gradients(), state(team)
    return COMPILED[name]


@cache
def compiled_twice(name):
    """Loss and state of the second of two compiled steps, once for all rewinds."""
    team = TEAMS[name]()
    results = [team.step(number) for number in range(2)][-1]
    return sum(sum(r.losses) for r in results) / sum(len(r.losses) for r in results), state(team)


@pytest.mark.sampled
@pytest.mark.parametrize("name", TEAMS)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), orderly=st.booleans())
def test_any_order_of_ready_moves_has_the_gradients_of_a_compiled_step(name, seed, orderly):
    hands, draw = Hands(TEAMS[name]()), random.Random(seed)
    stepper = hands.stepper()
    while ready := stepper.ready():
        picked = draw.choice(ready)
        if orderly and picked.op in BACKWARDS:  # of the stage's backwards that are left the first one, once it is ready
            picked = first_like(picked, stepper.left)
            if picked not in ready:
                continue
        stepper.do(picked)
    assert stepper.done[-1] == STEP
    stepper.finish()
    _, gradients, after = compiled(name)
    found = hands.team.gradients()
    assert found.keys() == gradients.keys()
    if in_order(stepper.done) and name != "gpipe":  # BatchNorm's statistics depend on the order of forwards
        assert same(found, gradients)
        assert same(state(hands.team), after)
    for key, gradient in gradients.items():
        assert (found[key] - gradient).norm() <= 1e-6 * gradient.norm() + 1e-12, key


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("name", TEAMS)
@pytest.mark.parametrize("at", [0, 5, -2, -1, 1000])  # -1: all but STEP; then buckets are on their way
def test_rewind_puts_everything_back_and_finish_has_the_same_bits(hands, name, at):
    hands = hands(name)
    for _ in range(2):  # the second step begins with an optimizer that has kept something
        before, stepper = state(hands.team), hands.stepper()
        stepper.run(at if at >= 0 else len(stepper._board.left) + at)
        if at == 1000:
            assert not same(state(hands.team), before), "the STEP changes something"
        stepper.rewind()
        assert stepper.done == ()
        assert same(state(hands.team), before)
        report = stepper.finish()
    loss, after = compiled_twice(name)
    assert report.loss == pytest.approx(loss)
    assert same(state(hands.team), after)


def test_a_step_that_is_given_up_leaves_no_trace(hands):
    hands = hands("zero")
    before, stepper = state(hands.team), hands.stepper()
    stepper.run(9)
    stepper.abort()
    assert same(state(hands.team), before)
    for call in (stepper.next, stepper.finish, stepper.rewind, lambda: stepper.do("0F0"), stepper.state, stepper.abort):
        with pytest.raises(JobError, match="given up"):
            call()
    frames = []
    for _ in range(2):
        with pytest.raises(JobError) as told:
            stepper.next()
        frames.append(len(told.traceback))
    assert frames[0] == frames[1], "an error brings no frames of the calls before"
    assert not stepper.ready()
    assert "given up" in repr(stepper)
    hands.stepper().finish()
    assert same(state(hands.team), compiled("zero")[2])


@pytest.mark.sampled
@pytest.mark.parametrize("at", [0, 1, 4, 7, 9])
def test_a_schedule_is_swapped_in_mid_step(hands, at):
    hands = hands("interleaved")
    stepper = hands.stepper()
    stepper.run(at)
    rows = hands.lowered("interleaved").rows
    edited = Schedule.of("late", [[a for op in (Op.F, Op.B) for a in row if a.op is op] for row in rows])
    stepper.swap(edited)
    assert "late" in repr(stepper)
    assert len(stepper.done) >= at
    assert stepper.finish().loss == pytest.approx(sum(compiled("interleaved")[0]) / 4, rel=1e-12)
    assert same(state(hands.team), compiled("interleaved")[2])


def test_a_schedule_that_cannot_take_over_is_refused_and_nothing_changes(hands):
    stepper = hands("1f1b").stepper()
    stepper.run_to("2F1")
    before, done = stepper.schedule, stepper.done
    sound = build("gpipe", 3, 4)
    short = Schedule.of("short", [row[:-1] for row in sound.rows])
    twisted = Schedule.of("twisted", [sound.rows[0], sound.rows[1], sound.rows[2][::-1]])
    moved = Schedule.of("moved", [sound.rows[1], sound.rows[0], sound.rows[2]])
    for wrong in (short, twisted, moved, build("gpipe", 3, 5), build("gpipe", 2, 4), "1f2b", None, 5):
        with pytest.raises((ScheduleError, rp.ConfigError)):
            stepper.swap(wrong)
        assert stepper.schedule is before
        assert stepper.done == done
    stepper.finish()


def test_what_is_not_ready_is_answered_with_why(hands):
    stepper = hands("gpipe").stepper()
    with pytest.raises(MoveError, match=r"(?s)0B0 waits for 0F0, which is ready.*1SEND_B0"):
        stepper.do("0B0")
    with pytest.raises(MoveError, match=r"no action 9B0: did you mean"):
        stepper.do("9B0")
    with pytest.raises(MoveError, match="not an action"):
        stepper.do("hello")
    with pytest.raises(MoveError, match="STEP waits for"):
        stepper.do("STEP")
    assert stepper.why("0B0").causes == (Action.parse("0F0"),)
    stepper.do("0F1")
    with pytest.raises(MoveError, match="0F1 is done; ready: 0F0, 0SEND_F1, 0F2"):
        stepper.do("0F1")
    assert repr(stepper.why("0F1")) == "0F1 is done"
    assert "ready: do" in repr(stepper.why("1RECV_F1"))
    stepper.finish()


def test_peek_shows_outputs_losses_and_gradients(hands):
    hands = hands("gpipe")
    stepper = hands.stepper()
    with pytest.raises(MoveError, match="not done"):
        stepper.peek("0F0")
    stepper.run_to("0B0")
    output = stepper.peek("0F1")
    assert output.tensor.shape == (3, 4)
    assert output.norm == pytest.approx(float(output.tensor.double().norm()))
    assert (output.looks[0].low, output.looks[0].high) == (float(output.tensor.min()), float(output.tensor.max()))
    for other in ("0SEND_F1", "1RECV_F1"):
        assert torch.equal(stepper.peek(other).tensor, output.tensor)
    assert [float(stepper.peek(f"1F{mb}").tensor) for mb in range(3)] == compiled("gpipe")[0]
    assert torch.equal(stepper.peek("1B0").tensor, stepper.peek("0RECV_B0").tensor)
    with pytest.raises(MoveError, match=r'hands no gradient on.*job.grad\(name\).*, or peek\("\w+"\)'):
        stepper.peek("0B0")
    with pytest.raises(MoveError, match=r"STEP updates weights.*job.param\(name\) has a weight"):
        stepper.peek("STEP")
    with pytest.raises(MoveError, match="no dp=1: the mesh has 1"):
        stepper.peek("0F0", dp=1)
    assert "float32[3, 4]" in repr(output)
    stepper.finish()
    with pytest.raises(JobError, match="finished"):
        stepper.peek("0F0")


def test_state_says_what_actors_hold(hands):
    hands = hands("1f1b")
    stepper = hands.stepper()
    stepper.run_to("1F0")
    first, second, third = stepper.state()
    assert first.now["weights"] == 4 * sum(p.numel() for p in hands.team.all[0].parameters().values())
    assert (first.now["gradients"], first.now["optimizer"]) == (0, 0)
    assert first.in_flight[0][0] == 0
    assert second.in_flight == {1: (0,)}
    assert second.values == {Action.parse("1F0"): 48}
    assert third.in_flight == {2: ()}
    head, row = repr(stepper.state()).splitlines()[::2]
    assert "1F0 (<0.001)" in row
    html = stepper.state()._repr_html_()
    assert html.startswith('<div style="max-width: 100%; overflow-x: auto"><table class="raypar-table">')
    assert ">&lt;0.001</td>" in html and ">gradients</th>" in html
    assert head.split()[:3] == ["MiB", "weights", "gradients"]
    assert row.split()[1:4] == ["<0.001", "0", "0"], "what is there never reads as 0"
    stepper.finish()


@pytest.mark.sampled
@pytest.mark.parametrize(("zero", "backward"), [(0, "whole"), (0, "split"), (3, "whole"), (3, "split")])
def test_the_pointer_stands_in_the_row_of_the_rank_that_moves_next(zero, backward):
    hands = Hands(Team(linears(), 2, 3, "1f1b", dp=2, zero=zero, backward=backward))
    stepper, seen = hands.stepper(), set()
    while stepper.left:
        upcoming = stepper.left[0]
        seen.add(upcoming.op)
        rank = 0 if upcoming.stage is None else rank_of(upcoming, stepper.schedule)
        grid = repr(stepper).splitlines()[1:3]
        left = [action for action in stepper.left if action.op in COMPUTE and rank_of(action, stepper.schedule) == rank]
        pointed = [row for row in grid if ">" in row]
        assert pointed == ([grid[rank]] if left else []), upcoming
        if left:
            named = grid[rank].partition(">")[2].split()[0].strip("()")
            assert named.upper() == str(left[0])[1:], upcoming
        stepper.next()
    assert {Op.REDUCE_GRAD, Op.STEP} <= seen
    assert (Op.UNSHARD in seen) == (zero == 3)
    if zero == 3:
        with pytest.raises(MoveError, match=r"0UNSHARD gathers the weights of its stage.*job.param\(name\)"):
            stepper.peek("0UNSHARD")
    stepper.finish()


def test_it_stops_where_it_is_told_to(hands):
    hands = hands("gpipe")
    stepper = hands.stepper()
    seen = []
    stepper.break_on(lambda look: seen.append(look) or look.action == Action.parse("1F1"))
    taken = stepper.run()
    assert taken[-1] == Action.parse("1F1")
    assert "stopped after 1F1 of pp=1" in repr(taken)
    assert not any(look.tensors for look in seen), "figures only"
    assert stepper.run_to("1F2")[-1] == Action.parse("1F2")
    stepper.break_on(lambda look: look.norm > 0)
    assert len(stepper.run()) == 1
    assert repr(stepper).startswith("stopped after ")
    stepper.finish()
    assert repr(stepper).startswith("step 1, ")


def test_a_step_that_is_not_finite_is_found_where_it_begins():
    team = Team(lambda: [nn.Linear(4, 4), Exploding()], 2, 3, "gpipe")
    stepper = Hands(team).stepper()
    stepper.break_on(lambda seen: not seen.finite)
    assert stepper.run()[-1] == Action.parse("1F0")
    assert "NOT FINITE" in repr(stepper)
    with pytest.raises(NonFiniteError):
        stepper.finish()
    assert not stepper.midway


class Exploding(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, x):
        return super().forward(x) * float("inf")


@pytest.mark.sampled
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "replicas", "halves", "tied"])
def test_a_recorded_stage_is_played_alone_bit_by_bit(hands, tmp_path, name, stage):
    hands = hands(name)
    hands.stepper().finish()
    stepper = hands.stepper()
    dp = hands.team.run.mesh.dp - 1
    stepper.record(tmp_path / "stage.rec", stage, dp)
    stepper.run(5)
    stepper.rewind()
    stepper.finish()
    model = hands.team.run.model
    calls = []
    rng = torch.random.get_rng_state()
    replayed = rp.replay(
        tmp_path / "stage.rec", None if name == "tied" else model, on=lambda action, stage: calls.append(action)
    )
    assert replayed.ok, replayed
    assert torch.equal(torch.random.get_rng_state(), rng), "the session's random numbers are left alone"
    microbatches = hands.team.run.microbatches
    assert len(calls) == 2 * microbatches == len(replayed.recorded.actions)
    assert any(p.grad is not None for p in replayed.stage.parameters().values())
    assert "bitwise equal" in repr(replayed)


def test_a_part_of_a_stage_is_not_recorded(hands, tmp_path):
    stepper = hands("tensor").stepper()
    with pytest.raises(rp.ConfigError, match=r"mesh\.tp=2 divides a stage over actors") as caught:
        stepper.record(tmp_path / "rec", 0)
    assert len(caught.value.faults) == 1
    stepper.finish()


def test_a_replay_that_differs_says_where(hands, tmp_path):
    hands = hands("gpipe")
    stepper = hands.stepper()
    stepper.record(tmp_path / "stage.rec", 1)
    stepper.finish()
    other = rp.Layers(normed, lambda output, target: (output - target).abs().mean())
    replayed = rp.replay(tmp_path / "stage.rec", other)
    assert not replayed.ok
    assert "F0/outputs/0" in replayed.differences
    assert "B0/outputs/0" in repr(replayed)


def test_what_can_not_be_recorded_or_played_is_said(hands, tmp_path):
    stepper = hands("gpipe").stepper()
    with pytest.raises(rp.ConfigError) as error:
        stepper.record(tmp_path / "no" / "a b", 7, dp=3)
    assert len(error.value.faults) == 4
    stepper.next()
    with pytest.raises(MoveError, match=r"rewind\(\) first"):
        stepper.record(tmp_path / "rec", 0)
    stepper.record(tmp_path / "rec", 1)
    stepper.finish()
    with pytest.raises(rp.ConfigError, match="your own modules"):
        rp.replay(tmp_path / "rec")
    with pytest.raises(rp.ConfigError, match="in the model"):
        rp.replay(tmp_path / "rec", rp.Layers(lambda: [nn.Linear(3, 3) for _ in range(4)], lambda o, t: o.sum()))
    whole = (tmp_path / "rec").read_bytes()
    (tmp_path / "torn").write_bytes(whole[:200])
    (tmp_path / "foreign").write_bytes(b"hello")
    for name in ("torn", "foreign", "absent", "."):
        with pytest.raises(rp.ConfigError):
            rp.replay(tmp_path / name)


def test_rows_can_be_swapped_in_as_they_are_written(hands):
    stepper = hands("gpipe").stepper()
    stepper.run(3)
    rows = [[f"{rank}{op}{mb}" for op in "FB" for mb in range(3)] for rank in range(2)]
    stepper.swap(rows)
    assert "gpipe then edited" in repr(stepper)
    with pytest.raises(ScheduleError, match="not an action"):
        stepper.swap([["0F0", "hello"], ["1F0"]])
    stepper.finish()


def test_pauses_between_moves_are_not_the_steps(hands):
    stepper = hands("gpipe").stepper()
    stepper.next()
    time.sleep(0.3)
    assert stepper.finish().step_ms < 300


@pytest.mark.parametrize("undo", ["rewind", "abort"])
def test_ctrl_c_while_a_step_is_taken_back(hands, undo, monkeypatch):
    monkeypatch.setattr(interrupts, "_latest", {})  # no press of another test is this one's
    hands = hands("gpipe")
    stepper = hands.stepper()
    stepper.run(8)
    told = hands.calls.all

    def interrupted(method, *args, what):
        answers = told(method, *args, what=what)
        os.kill(os.getpid(), signal.SIGINT)
        return answers

    hands.calls.all = interrupted
    try:
        with pytest.raises(KeyboardInterrupt):
            getattr(stepper, undo)()
    finally:
        hands.calls.all = told
    assert stepper.midway == (undo == "rewind")
    if undo == "rewind":
        assert stepper.done == ()
        stepper.finish()
        assert same(state(hands.team), compiled("gpipe")[2])


def test_a_predicate_that_asks_for_what_there_is_not_is_refused_with_the_nearest(hands):
    stepper = hands("gpipe").stepper()
    other = "text"
    with pytest.raises(MoveError, match=r"^break_on: what was seen has no 'finit': did you mean finite\?$"):
        stepper.break_on(lambda seen: not seen.finit)
    with pytest.raises(MoveError, match=r"(?s)'nrm': did you mean norm.*'zzz': it has action, "):
        stepper.break_on(lambda seen: seen.nrm > 3 or seen.zzz())
    for fits in (lambda seen: seen.norm > 1e9, lambda seen: other.upper() == "NO" and seen.looks[0].x, bool, None):
        stepper.break_on(fits)
    stepper.break_on(lambda seen: seen.memory < 0)
    stepper.finish()


def test_what_is_no_predicate_is_refused_at_once(hands):
    stepper = hands("gpipe").stepper()
    with pytest.raises(ValueError, match="it must be a function"):
        stepper.break_on("seen.norm")
    stepper.finish()
