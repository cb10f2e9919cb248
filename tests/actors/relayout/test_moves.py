"""Moves cover what is wanted exactly once, and no plan sends fewer bytes."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.relayout.moves import TensorMove, moves_between, without
from raypar.actors.sharding import common, volume
from tests.support.relayouts import bytes_between

WHOLE = {"w": [((0, 4), (0, 6))]}
ROWS = [{"w": [((0, 2), (0, 6))]}, {"w": [((2, 4), (0, 6))]}]
COLUMNS = [{"w": [((0, 4), (0, 3))]}, {"w": [((0, 4), (3, 6))]}]
SIZES = {"w": 4, "v": 2}


def cells(box):
    return set(product(*(range(*span) for span in box)))


def test_rows_become_columns_and_half_of_each_stays():
    assert moves_between(ROWS, COLUMNS, SIZES) == [
        TensorMove(0, 0, "w", ((0, 2), (0, 3))),
        TensorMove(1, 0, "w", ((2, 4), (0, 3))),
        TensorMove(1, 1, "w", ((2, 4), (3, 6))),
        TensorMove(0, 1, "w", ((0, 2), (3, 6))),
    ]
    assert bytes_between(moves_between(ROWS, COLUMNS, SIZES), SIZES) == 2 * 6 * 4
    assert bytes_between(moves_between(ROWS, ROWS, SIZES), SIZES) == 0


def test_those_that_have_the_same_give_in_turn_and_the_own_node_is_asked_first():
    two = {"w": WHOLE["w"], "v": [((0, 8),)]}
    moves = moves_between([two, two, {}], [{}, {}, two], SIZES)
    assert {move.source for move in moves} == {0, 1}
    near = moves_between([two, two, {}], [{}, {}, two], SIZES, ["a", "b", "b"])
    assert {move.source for move in near} == {1}
    part = [{"w": WHOLE["w"]}, ROWS[0], {}]
    found = moves_between(part, [{}, {}, WHOLE], SIZES, ["a", "b", "b"])
    assert [(move.source, volume(move.box)) for move in found] == [(1, 12), (0, 12)], "half of it is near"


def test_scalars_and_empty_tensors():
    held = [{"step": [()], "none": [((0, 0), (0, 3))]}, {}]
    moves = moves_between(held, [{}, held[0]], {"step": 4, "none": 4})
    assert moves == [TensorMove(0, 1, "step", ())]
    assert bytes_between(moves, {"step": 4}) == 4


def test_what_nobody_has_is_told():
    with pytest.raises(LookupError, match=r"nobody has 'w' \[\(2, 4\), \(0, 6\)\]"):
        moves_between([ROWS[0], {}], [{}, WHOLE], SIZES)


@st.composite
def boxes(draw, most=3):
    """Some boxes of a tensor (4, 5)."""
    spans = [st.tuples(st.integers(0, n - 1), st.integers(1, n)).map(sorted).map(tuple) for n in (4, 5)]
    found = draw(st.lists(st.tuples(*spans), max_size=most))
    return [box for box in found if volume(box)]


@given(one=boxes(most=1), other=boxes(most=1))
def test_a_box_without_a_part_is_all_its_other_elements(one, other):
    if one and other and (part := common(one[0], other[0])) is not None:
        rest = list(without(one[0], part))
        assert sum(map(volume, rest)) == volume(one[0]) - volume(part)
        assert set().union(*map(cells, rest)) == cells(one[0]) - cells(part)
        assert cells(part) == cells(one[0]) & cells(other[0])


@given(held=st.lists(boxes(), min_size=3, max_size=3), wanted=st.lists(boxes(), min_size=3, max_size=3))
def test_each_element_comes_once_from_one_that_has_it_and_only_what_is_lacking_is_sent(held, wanted):
    """The least by brute force: whatever the plan, an actor gets each element that it lacks from another one."""
    tensors = [[{"w": boxes} for boxes in of_all] for of_all in (held, wanted)]
    has = [set().union(*map(cells, boxes)) for boxes in held]
    try:
        moves = moves_between(*tensors, SIZES)
    except LookupError:
        assert any(not cells(box) <= set().union(*has) for boxes in wanted for box in boxes)
        return
    for move in moves:
        assert cells(move.box) <= has[move.source]
    least = 0
    for actor, boxes in enumerate(wanted):
        for box in dict.fromkeys(boxes):
            least += len(cells(box) - has[actor]) * SIZES["w"]
        asked = sum(map(volume, dict.fromkeys(boxes)))
        assert sum(volume(move.box) for move in moves if move.destination == actor) == asked
    assert bytes_between(moves, SIZES) == least
