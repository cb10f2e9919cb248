"""Random schedules, judged by networkx: is the graph of what waits for what free of circles, and how long is it?"""

from dataclasses import replace
from itertools import takewhile

import networkx
from hypothesis import given
from hypothesis import strategies as st

from raypar.schedules import CheckError, Costs, Schedule, check, lower, simulate
from raypar.schedules.action import RECVS, SENDS, WHOLE_STAGE, Action, Op
from raypar.schedules.rules import awaited, leaving, needs, partner, provides, rank_of
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
    for row in lowered.rows:
        for index, action in enumerate(row):
            if action.op in SENDS:
                maker = next(a for a in reversed(row[:index]) if a.op not in SENDS)
                assert needs(action, lowered)[0] in provides(maker)
            if action.op in RECVS:
                burst = list(takewhile(lambda a: a.op in RECVS, row[index:]))
                source = rank_of(partner(action), lowered)
                from_source = [a for a in burst if rank_of(partner(a), lowered) == source]
                assert from_source[-1] in needs(row[index + len(burst)], lowered) or skips_back(
                    from_source[-1], lowered
                )


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
def test_awaited_and_leaving_say_what_needs_says(schedule):
    for candidate in (schedule, lower(schedule, reduce_grad=True)):
        taken, left = [], []
        for rank, row in enumerate(candidate.rows):
            for action in row:
                elsewhere = [n for n in needs(action, candidate) if rank_of(n, candidate) != rank]
                values = awaited(action, candidate)
                assert list(dict.fromkeys(made(value) for value in values)) == elsewhere
                taken += values
                left += leaving(action, candidate)
                assert {made(value) for value in leaving(action, candidate)} <= {*provides(action), action}
        assert sorted(map(str, taken)) == sorted(map(str, left)), "each value leaves once, for one action"


def skips_back(recv, lowered):
    """Whether a RECV is of a skip and its rank computes a stage between the two before the one that takes it."""
    between = range(*sorted((recv.stage, recv.peer)))[1:] if recv.peer is not None else ()
    return any(lowered.placement[stage] == lowered.placement[recv.stage] for stage in between)


def made(value):
    return value if value.op in SENDS else value._replace(peer=None)


@given(st.integers(0, 99), st.sampled_from(list(Op)), st.integers(0, 99), st.none() | st.integers(0, 99))
def test_actions_are_spelled_and_read_back(stage, op, microbatch, peer):
    peer = peer if op in SENDS or op in RECVS else None
    number = None if op is Op.STEP or op in WHOLE_STAGE else microbatch
    action = Action(None if op is Op.STEP else stage, op, number, peer)
    assert Action.parse(str(action)) == action
    assert Action.parse(f"  {action} ") == action


def test_a_receive_is_pulled_forward_where_values_are_used_in_another_order_than_sent():
    """Rank 1 uses the two values of rank 0 in the other order than rank 0 sends them."""
    schedule = Schedule.of(
        "crossed", [[Action(0, Op.F, 0), Action(0, Op.F, 1)], [Action(1, Op.F, 1), Action(1, Op.F, 0)]]
    )
    assert " ".join(map(str, lower(schedule).rows[1])) == "1RECV_F0 1RECV_F1 1F1 1F0"
