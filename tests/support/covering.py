"""Covering arrays: rows of values of many features, in which each two values of two features are together in one."""

from __future__ import annotations

import heapq
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, count
from typing import Any

Row = dict[str, Any]
Numbers = dict[str, int]  # of a row, by feature the number of its value
_FEW = 200  # new pairs of a row, which more are looked for
Pair = tuple[tuple[str, int], tuple[str, int]]  # two features, in their order, each with the number of a value


class Covering:
    """A covering array that is drawn row by row, from a seed.

    Not all rows are allowed. For each pair a row is looked for that has it and is allowed, beginning with the first
    values of all other features, and changing those that the faults name. A pair without such a row is refused.

    Args:
        features: By name, the values, of which the first is the usual one. A name is a path such as ``model.window``;
            faults name fields by the last part of it.
        faults: What is wrong with a row; nothing if it is allowed.
        needs: Called with a feature and a row, returns the other feature whose value leaves no place for it, so that it
            has to keep its first value; None where it has a place.
        seed: Of the random choices.
        checks: How many rows are looked at for a pair at most.

    Attributes:
        covered: The pairs that the rows drawn so far have.
        refused: By pair, the faults of the row with it that has the fewest.
        unwritable: Pairs of features that have no place in one row.
    """

    def __init__(
        self,
        features: Mapping[str, Sequence[Any]],
        faults: Callable[[Row], Sequence[str]],
        needs: Callable[[str, Row], str | None] = lambda name, row: None,
        seed: int = 0,
        checks: int = 60,
    ) -> None:
        self.features = {name: list(values) for name, values in features.items()}
        self.covered: set[Pair] = set()
        self.refused: dict[Pair, list[str]] = {}
        self.unwritable: set[Pair] = set()
        self._faults, self._needs, self._random, self._checks = faults, needs, random.Random(seed), checks
        self._names = list(self.features)
        self._words = {name: re.compile(rf"(?<![\w]){re.escape(name.split('.')[-1])}(?!\w)") for name in self._names}

    @cached_property
    def pairs(self) -> list[Pair]:
        """All pairs, in the order of the features."""
        numbers = {name: range(len(values)) for name, values in self.features.items()}
        return [
            ((one, i), (other, j))
            for one, other in combinations(self._names, 2)
            for i in numbers[one]
            for j in numbers[other]
        ]

    def rows(self) -> Iterator[Row]:
        """Draw rows until each pair is covered or refused."""
        order = list(self.pairs)
        self._random.shuffle(order)
        while order:
            pair = order.pop()
            if pair in self.covered or (begun := self._allowed(pair)) is None:
                continue
            yield self._taken(self._filled(begun, pair))

    def value(self, pair: Pair) -> Row:
        """Return the features of a pair with their values."""
        return {name: self.features[name][number] for name, number in pair}

    def named(self, fault: str) -> list[str]:
        """Return the features whose field a fault names."""
        return [name for name, word in self._words.items() if word.search(fault)]

    def _values(self, numbers: Mapping[str, int]) -> Row:
        return {name: self.features[name][number] for name, number in numbers.items()}

    def _allowed(self, pair: Pair) -> Numbers | None:
        """Return a row with a pair, with the first values where that is allowed; None if the pair is refused."""
        kept, serial, seen, reasons = dict(pair), count(), set[tuple[int, ...]](), list[Sequence[str]]()
        queue: list[tuple[int, int, Numbers, list[list[str]]]] = []

        def is_allowed(row: Numbers, changes: int) -> bool:
            seen.add(tuple(row.values()))
            choices = [[other] for _, other in self._misplaced(row)]
            if not choices:
                faults = self._faults(self._values(row))
                reasons.append(faults)
                choices = [self.named(fault) for fault in faults]
            choices = [[name for name in names if name not in kept] for names in choices]
            heapq.heappush(queue, (len(choices) + changes, next(serial), row, choices))
            return not choices

        if is_allowed(first := dict.fromkeys(self._names, 0) | kept, 0):
            return first
        while queue and len(seen) < self._checks:
            weight, _, row, choices = heapq.heappop(queue)
            for name in min(choices, key=len):  # a fault that names nothing else can't be mended
                for number in range(len(self.features[name])):
                    other = row | {name: number}
                    if tuple(other.values()) not in seen and is_allowed(other, weight - len(choices) + 1):
                        return other
        if reasons:
            self.refused[pair] = list(min(reasons, key=len))
        else:
            self.unwritable.add(pair)
        return None

    def _misplaced(self, row: Mapping[str, int]) -> Iterator[tuple[str, str]]:
        """Yield the features with other than their first values that have no place, each with what it needs."""
        values = self._values(row)
        for name, number in row.items():
            if number and (other := self._needs(name, values)) is not None:
                yield name, other

    def _filled(self, begun: Numbers, pair: Pair) -> Numbers:
        """Return an allowed row that has many more pairs which are not covered yet."""
        free = [name for name in self._names if begun[name] == 0 and name not in dict(pair)]
        self._random.shuffle(free)
        row = {name: number for name, number in begun.items() if name not in free}
        for name in free:
            row[name] = self._best(name, row)
        row = {name: row[name] for name in self._names}
        while misplaced := {name for name, _ in self._misplaced(row) if name in free}:
            row |= dict.fromkeys(misplaced, 0)
        while faults := self._demanded(row):
            changed = {name for name in free if row[name]}
            named = [[name for name in self.named(fault) if name in changed] for fault in faults]
            for names in [names for names in named if names] or [sorted(changed)]:
                row[self._random.choice(names)] = 0
        if self._gain(row) < _FEW:
            self._improve(row, free)
        return row

    def _demanded(self, row: Numbers) -> Sequence[str]:
        """Return what is wrong with a row, features without a place first."""
        misplaced = [f"{name} and {other}" for name, other in self._misplaced(row)]
        return misplaced or self._faults(self._values(row))

    def _improve(self, row: Numbers, free: Sequence[str]) -> None:
        """Change single features of an allowed row as long as that covers more."""
        for name in free:
            others = {other: number for other, number in row.items() if other != name}
            best, before = self._best(name, others), row[name]
            if best != before and self._new(name, best, others) > self._new(name, before, others):
                row[name] = best
                if self._demanded(row):
                    row[name] = before

    def _gain(self, row: Numbers) -> int:
        return sum(pair not in self.covered for pair in combinations(row.items(), 2))

    def _new(self, name: str, number: int, others: Mapping[str, int]) -> int:
        """Return how many pairs a value adds to those of other features."""
        return sum(self._pair(name, number, other, at) not in self.covered for other, at in others.items())

    def _best(self, name: str, row: Mapping[str, int]) -> int:
        """Return the value of a feature that adds most pairs to those of a row, none of which is refused."""
        gains = []
        for number in range(len(self.features[name])):
            fits = not number or not any(self._pair(name, number, *other) in self.refused for other in row.items())
            gains.append((fits, self._new(name, number, row), self._random.random()))
        return max(range(len(gains)), key=gains.__getitem__)

    @cached_property
    def _place(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self._names)}

    def _pair(self, one: str, i: int, other: str, j: int) -> Pair:
        return ((one, i), (other, j)) if self._place[one] < self._place[other] else ((other, j), (one, i))

    def _taken(self, row: Mapping[str, int]) -> Row:
        """Count the pairs of a row as covered."""
        self.covered.update(combinations(row.items(), 2))
        return self._values(row)
