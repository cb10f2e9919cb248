"""An actor finds the shares that have elements of its parts of tensors, and no others."""

from __future__ import annotations

import pickle
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from raypar.actors.checkpoint.logical import Logical, Stored
from raypar.actors.checkpoint.snapshot_address import SnapshotOwner
from raypar.actors.relayout.share_index import ShareIndex, StoredBoxes, contents_of


def share(rank):
    return SnapshotOwner(3, rank)


def cells(box):
    return set(product(*(range(*span) for span in box)))


@st.composite
def boxes(draw, most=4):
    """Some boxes of a tensor (4, 5)."""
    spans = [st.tuples(st.integers(0, n - 1), st.integers(1, n)).map(sorted).map(tuple) for n in (4, 5)]
    box = st.tuples(*spans).filter(lambda box: all(start < stop for start, stop in box))
    return tuple(draw(st.lists(box, max_size=most, unique=True)))


@given(st.lists(boxes(), min_size=1, max_size=5), boxes())
def test_shares_with_elements_in_common_are_found_as_by_looking_at_every_element(stored, wanted):
    index = ShareIndex({share(rank): {"w": StoredBoxes((4, 5), its)} for rank, its in enumerate(stored)})
    needed = [rank for rank, its in enumerate(stored) if any(cells(a) & cells(b) for a in its for b in wanted)]
    if needed:
        assert pickle.loads(pickle.dumps(index)).needed({"w": wanted}) == [share(rank) for rank in needed]


def test_scalars_tensors_without_elements_and_several_tensors():
    index = ShareIndex(
        {
            share(0): {"w": StoredBoxes((4,), (((0, 2),),)), "none": StoredBoxes((0,), (((0, 0),),))},
            share(1): {"w": StoredBoxes((4,), (((2, 4),),)), "step": StoredBoxes((), ((),))},
            share(2): {},
        }
    )
    assert index.shapes == {"w": (4,), "none": (0,), "step": ()}
    assert index.needed({}) == []
    assert index.needed({"step": [()]}) == [share(1)]
    assert index.needed({"none": [((0, 0),)]}) == [share(0)], "it says that the tensor is there"
    assert index.needed({"w": [((1, 3),)]}) == [share(0), share(1)]
    assert index.needed({"w": [((3, 4),)], "none": [((0, 0),)]}) == [share(0), share(1)]


def test_what_a_share_has_is_read_from_the_slices_that_it_stores():
    slices = (Stored("0", "w", (2, 0), (2, 5)), Stored("0", "w.tile", (0, 1), (1, 4)))
    found = contents_of({"w": Logical("F32", (4, 5), slices), "step": Logical("F32", (), (Stored("0", "s", (), ()),))})
    assert found == {
        "w": StoredBoxes((4, 5), (((2, 4), (0, 5)), ((0, 1), (1, 5)))),
        "step": StoredBoxes((), ((),)),
    }
