"""Mixing: the data set of each sample of a run, computed from the number of the sample alone.

Samples are divided into blocks. Every block has the same number of samples of each data set, in an order that depends
on the seed and the block. So a data set's share is exact after every block, and there is no state to save.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from raypar.actors.data.examples.packing import Int64s
from raypar.actors.data.text.token_batches import shuffled
from raypar.schedules.float_sum import float_sum

LARGEST = 10_000  # samples of a block, at most; a data set with a smaller share would have none
_TOLERANCE = 1e-3  # relative error of a share


def shares_of(weights: Sequence[float]) -> Int64s:
    """Return each data set's number of samples in a block: the fewest whose shares are within 0.1 % of the weights.

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
        near = np.abs(rounded / some - wanted) <= _TOLERANCE * wanted
        if len(found := np.flatnonzero(near.all(axis=1) & (rounded.sum(axis=1) == some[:, 0]))):
            fewest: Int64s = rounded[found[0]].astype(np.int64)
            return fewest
    whole: Int64s = np.floor(wanted * LARGEST).astype(np.int64)
    whole[np.argsort(whole - wanted * LARGEST, kind="stable")[: LARGEST - int(whole.sum())]] += 1
    return whole


def mixed(samples: Int64s, shares: Int64s, seed: int) -> tuple[Int64s, Int64s]:
    """Return the data set of each sample, and its number in that data set.

    Args:
        samples: Numbers of samples, (n,), at least 0.
        shares: Number of samples of each data set in a block, (n,).
        seed: Seed of the order in a block.

    Returns:
        The data set of each, (n,), and its number among the samples of that data set, (n,). These numbers are 0, 1, ...
        in the order of the samples.
    """
    block, position = np.divmod(samples, int(shares.sum()))
    part, number = np.empty_like(samples), np.empty_like(samples)
    for each in np.unique(block):
        own = block == each
        sets, before = _order(int(each), shares, seed)
        part[own] = sets[position[own]]
        number[own] = each * shares[part[own]] + before[position[own]]
    return part, number


def _order(block: int, shares: Int64s, seed: int) -> tuple[Int64s, Int64s]:
    """Return the data set of each sample of a block, and how many samples of that data set precede it."""
    size, ends = int(shares.sum()), np.cumsum(shares)
    positions = shuffled(np.arange(size), np.full(size, block, np.int64), size, seed)
    sets = np.searchsorted(ends, positions, side="right")
    before = np.empty_like(positions)
    before[np.argsort(sets, kind="stable")] = np.arange(size) - np.repeat(ends - shares, shares)
    return sets, before
