"""Random schedules, judged by networkx: is the graph of what waits for what free of circles, and how long is it?"""

from dataclasses import replace
from itertools import takewhile

import networkx
from hypothesis import given
from hypothesis import strategies as st

from raypar.schedules import CheckError, Costs, Schedule, check, lower, simulate
from raypar.schedules.action import RECVS, SENDS, WHOLE_STAGE, Action, Op
from raypar.schedules.rules import awaited, needs, partner, provides, rank_of, travels
from tests.support.schedules import legal_schedules


def graph(schedule, costs=None, rendezvous=False):
    """A node an action, an edge from what must be done before; with rendezvous a SEND and its RECV are one node."""
    result, maker = networkx.DiGraph(), {}

    def node(rank, index):
        action = schedule.rows[rank][index]
        return (
            str(partner(action))
            if rendezvous and action.op in RECVS
            else str(action) + "@" * (action.op is Op.STEP) * rank
        )

    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            result.add_node(node(rank, index))
            maker.update(dict.fromkeys(provides(action), (rank, index)))
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            before = [maker[need] for need in needs(action, schedule)] + ([(rank, index - 1)] if index else [])
            for other in before:
                if node(*other) != node(rank, index):
                    weight = costs.of(schedule.rows[other[0]][other[1]]) if costs else 1
                    result.add_edge(node(*other), node(rank, index), weight=weight)
    return result


def accepts(schedule, **options):
    try:
        check(schedule, **options)
    except CheckError:
        return False
    return True


@given(legal_schedules())
def test_legal_schedules_pass_and_both_orders_of_lowering_keep_them_so(schedule):
    check(schedule)
    for capacity in (None, 100):
        check(lower(schedule), send_capacity=capacity)
    for capacity in (None, 0, 1, 2):
        check(lower(schedule, "one_sweep", reduce_grad=True), send_capacity=capacity)


@given(legal_schedules())
def test_just_in_time_receives_right_before_use_unless_the_order_of_sends_asks_for_more(schedule):
    lowered = lower(schedule)
    for rank, row in enumerate(lowered.rows):
        for index, action in enumerate(row):
            if action.op in SENDS:
                maker = next(a for a in reversed(row[:index]) if a.op not in SENDS)
                assert needs(action, lowered)[0] in provides(maker)
            if action.op in RECVS:
                burst = list(takewhile(lambda a: a.op in RECVS, row[index:]))
                source = rank_of(partner(action), lowered)
                from_source = [a for a in burst if rank_of(partner(a), lowered) == source]
                assert from_source[-1] in needs(row[index + len(burst)], lowered), (rank, action)


@given(legal_schedules(), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
def test_makespan_is_the_critical_path(schedule, f, i, w):
    costs = Costs(f=f, b=i + w, i=i, w=w)
    for candidate in (schedule, lower(schedule)):
        paths = graph(candidate, costs)
        for rank, row in enumerate(candidate.rows):
            name = str(row[-1]) + "@" * (row[-1].op is Op.STEP) * rank
            paths.add_edge(name, "end", weight=costs.of(row[-1]))
        assert simulate(candidate, costs).makespan == networkx.dag_longest_path_length(paths)


@given(legal_schedules(), st.randoms(use_true_random=False), st.integers(1, 6))
def test_a_shuffled_schedule_passes_exactly_if_nothing_waits_in_a_circle(schedule, rng, swaps):
    shuffled = shuffle(schedule, rng, swaps)
    assert accepts(shuffled) == networkx.is_directed_acyclic_graph(graph(shuffled))


@given(legal_schedules(), st.randoms(use_true_random=False), st.integers(1, 4), st.sampled_from([None, 0]))
def test_a_shuffled_lowered_schedule_passes_exactly_if_order_and_circles_allow(schedule, rng, swaps, capacity):
    shuffled = lower(shuffle(lower(schedule, step=False), rng, swaps))
    fine = networkx.is_directed_acyclic_graph(graph(shuffled, rendezvous=capacity == 0))
    fine = fine and networkx.is_directed_acyclic_graph(graph(shuffled)) and edges_agree(shuffled)
    assert accepts(shuffled, send_capacity=capacity) == fine


def shuffle(schedule, rng, swaps):
    rows = [list(row) for row in schedule.rows]
    for _ in range(swaps):
        row = rng.choice(rows)
        if len(row) > 1:
            index = rng.randrange(len(row) - 1)
            row[index], row[index + 1] = row[index + 1], row[index]
    return replace(schedule, rows=tuple(map(tuple, rows)))


def edges_agree(schedule):
    sent, received = {}, {}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if action.op in SENDS:
                sent.setdefault((rank, rank_of(partner(action), schedule)), []).append(action)
            elif action.op in RECVS:
                received.setdefault((rank_of(partner(action), schedule), rank), []).append(partner(action))
    return sent == received


@given(legal_schedules())
def test_awaited_and_travels_say_what_needs_says(schedule):
    for candidate in (schedule, lower(schedule, reduce_grad=True)):
        wanted_elsewhere = set()
        for rank, row in enumerate(candidate.rows):
            for action in row:
                elsewhere = [n for n in needs(action, candidate) if rank_of(n, candidate) != rank]
                assert elsewhere == ([] if awaited(action, candidate) is None else [awaited(action, candidate)])
                wanted_elsewhere.update(elsewhere)
        values = {value for row in candidate.rows for action in row for value in provides(action)}
        assert {value for value in values if travels(value, candidate)} == wanted_elsewhere


@given(st.integers(0, 99), st.sampled_from(list(Op)), st.integers(0, 99))
def test_actions_are_spelled_and_read_back(stage, op, microbatch):
    action = Action(None if op is Op.STEP else stage, op, None if op is Op.STEP or op in WHOLE_STAGE else microbatch)
    assert Action.parse(str(action)) == action
    assert Action.parse(f"  {action} ") == action


def test_a_receive_is_pulled_forward_where_values_are_used_in_another_order_than_sent():
    """Rank 1 uses the two values of rank 0 in the other order than rank 0 sends them."""
    schedule = Schedule.of(
        "crossed", [[Action(0, Op.F, 0), Action(0, Op.F, 1)], [Action(1, Op.F, 1), Action(1, Op.F, 0)]]
    )
    assert " ".join(map(str, lower(schedule).rows[1])) == "1RECV_F0 1RECV_F1 1F1 1F0"
