"""Mixing: which of several data sets each sample of a run is from. Pure arithmetic on the number of the sample.

Samples are counted in blocks, in each of which every data set has the same number of samples, in an order that the
seed and the block select. So a data set's share is exact behind every block, and no state is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raypar.actors.data.packing import Int64s
from raypar.actors.data.token_batches import shuffled
from raypar.schedules.float_sum import float_sum

LARGEST = 10_000  # samples of a block; a data set of a smaller share than one of these would have none
_EXACT = 1e-3  # how far a share may be from what is asked for, of that


def shares_of(weights: Sequence[float]) -> Int64s:
    """Return how many samples of a block each data set has: the fewest that are within 0.1 % of the weights.

    Args:
        weights: The weights, above 0, of at most ``LARGEST`` data sets.

    Returns:
        The samples, (n,), each at least 1 unless its weight is less than one in ``LARGEST`` of all.
    """
    wanted = np.array(weights, np.float64) / float_sum(weights)
    sizes = np.arange(1, LARGEST + 1)
    for first in range(0, LARGEST, 500):
        some = sizes[first : first + 500, None]
        rounded = np.rint(wanted * some)
        near = np.abs(rounded / some - wanted) <= _EXACT * wanted
        if len(found := np.flatnonzero(near.all(axis=1) & (rounded.sum(axis=1) == some[:, 0]))):
            fewest: Int64s = rounded[found[0]].astype(np.int64)
            return fewest
    whole: Int64s = np.floor(wanted * LARGEST).astype(np.int64)
    whole[np.argsort(whole - wanted * LARGEST, kind="stable")[: LARGEST - int(whole.sum())]] += 1
    return whole


def mixed(samples: Int64s, shares: Int64s, seed: int) -> tuple[Int64s, Int64s]:
    """Say which data set each sample is from, and which sample of that data set it is.

    Args:
        samples: Numbers of samples, (n,), at least 0.
        shares: How many samples of a block each data set has.
        seed: Seed of the order in a block.

    Returns:
        The data set of each, (n,), and its number among the samples of that data set, (n,). The samples of a data set
        have its numbers in order.
    """
    block, place = np.divmod(samples, int(shares.sum()))
    part, number = np.empty_like(samples), np.empty_like(samples)
    for each in np.unique(block):
        own = block == each
        sets, before = _order(int(each), shares, seed)
        part[own] = sets[place[own]]
        number[own] = each * shares[part[own]] + before[place[own]]
    return part, number


def _order(block: int, shares: Int64s, seed: int) -> tuple[Int64s, Int64s]:
    """Return the data set of each sample of a block, and how many of that data set are before it in the block."""
    size, ends = int(shares.sum()), np.cumsum(shares)
    places = shuffled(np.arange(size), np.full(size, block, np.int64), size, seed)
    sets = np.searchsorted(ends, places, side="right")
    before = np.empty_like(places)
    before[np.argsort(sets, kind="stable")] = np.arange(size) - np.repeat(ends - shares, shares)
    return sets, before
