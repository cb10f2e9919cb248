"""When the sharded weights of a stage are whole: in a window, layer by layer or all at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from torch import Tensor

from raypar.actors.data_parallel.units import Unit
from raypar.actors.specs.recompute import Recompute
from raypar.schedules.action import Action, Op

Pass = Literal["forward", "backward", "both"]


class StageWeights:
    """Opens and closes the sharded weights of a stage, as the UNSHARD and RESHARD of a schedule tell.

    Between ``open`` and ``close``, a window, the stage's layers may be used. A window for a single pass over the layers
    streams: each unit is gathered just before the first layer that uses it, while the layer before computes, and freed
    behind the last one. The unit behind the next one is read from the disk, if it is there. A window for more holds all
    units until it is closed.

    All replicas must gather in the same order. So in a window that streams the order is fixed in advance, and units of
    layers that were skipped are gathered too.

    Args:
        units: All units of the stage's parameters.
        uses: For each layer of the stage, the indices of the units that it uses.

    Attributes:
        num_bytes: Bytes of the stage's parameters when they are whole.
    """

    def __init__(self, units: Sequence[Unit], uses: Sequence[Sequence[int]]) -> None:
        self.units = units
        self.num_bytes = sum(unit.num_bytes for unit in units)
        self._uses = [tuple(used) for used in uses]
        self._kind: Pass | None = None
        self._visits: list[tuple[int, ...]] | None = None  # units of each visit of a layer in turn; None: all are held
        self._at = -1  # the visit under way
        self._is_open = False
        self._first_backward = 0  # index of the first visit of the backward

    def open(self, kind: Pass | None) -> None:
        """Open a window and start to gather.

        Args:
            kind: The only pass over the layers in this window, to stream; None for more than one, to hold all units.
        """
        if not self._is_open:
            self._is_open = True
            self._plan(kind)

    def start(self, kind: Pass) -> None:
        """Begin a pass over the layers. A window that was opened for another single pass is planned anew."""
        if self._visits is not None and (self._kind != kind or self._at >= 0):
            self._finish()
            self._plan(kind)

    def forward(self, layer: int) -> None:
        """Prepare for the forward of a layer: wait until its weights are whole."""
        self._enter(layer, layer)

    def backward(self, layer: int) -> None:
        """Prepare for the backward of a layer: wait until its weights are whole."""
        self._enter(layer, self._first_backward + len(self._uses) - 1 - layer)

    def watch(self, layer: int, outputs: Sequence[Tensor]) -> None:
        """Prepare for the backward of a layer as soon as the gradient of one of its outputs is there."""
        for output in outputs:
            if output.requires_grad:
                output.register_hook(lambda gradient: self.backward(layer))

    def close(self) -> None:
        """Close the window: gather what is left of its order, and free everything."""
        if self._is_open:
            self._finish()
            self._is_open = False

    def _plan(self, kind: Pass | None) -> None:
        """Plan the visits of a window, and start to gather what comes first."""
        self._kind, self._at = kind, -1
        forward, backward = self._uses, self._uses[::-1]
        plans: dict[Pass, list[tuple[int, ...]]]
        plans = {"forward": forward, "backward": backward, "both": [*forward, *backward]}
        self._visits = None if kind is None else plans[kind]
        self._first_backward = len(forward) if kind == "both" else 0
        for index in range(len(self.units)) if self._visits is None else self._visits[0] if self._visits else ():
            self.units[index].gather(self)

    def _enter(self, layer: int, visit: int) -> None:
        if self._visits is not None:
            self._go_on(self._visits, visit)
        for index in self._uses[layer] if self._is_open else ():
            self.units[index].gather(self)  # whole, unless a layer is run once more than planned
            self.units[index].wait()

    def _go_on(self, visits: Sequence[tuple[int, ...]], visit: int) -> None:
        """Go on to a visit: free what it does not use, and start to gather for it and for the next one."""
        while self._at < visit:
            self._at += 1
            used = visits[self._at]
            for index, unit in enumerate(self.units):
                if index not in used:
                    unit.free(self)
            for index in (*used, *(index for visit in visits[self._at + 1 : self._at + 2] for index in visit)):
                self.units[index].gather(self)
            for index in (index for visit in visits[self._at + 2 : self._at + 3] for index in visit):
                self.units[index].expect()

    def _finish(self) -> None:
        if self._visits is not None:
            self._go_on(self._visits, len(self._visits) - 1)
        for unit in self.units:
            unit.free(self)


class Windows:
    """The windows of all sharded stages of an actor, as a row opens and closes them.

    Args:
        weights: The sharded weights of each stage, by its number; empty if none are sharded.
        row: The row of the actor's pipeline rank.
        recompute: The run's recomputation; with "full", a backward runs the whole forward again.
    """

    def __init__(self, weights: Mapping[int, StageWeights], row: Sequence[Action], recompute: Recompute) -> None:
        self._weights = weights
        self._kinds = {stage: _kinds_of(stage, row, recompute) for stage in weights}
        self._left: dict[int, Iterator[Pass | None]] = {}

    def begin(self) -> None:
        """Begin a step: close the windows that an interrupted step has left open."""
        for stage, weights in self._weights.items():
            weights.close()
            self._left[stage] = iter(self._kinds[stage])

    def open(self, stage: int) -> int:
        """Open the next window of a stage, and return the bytes of its weights; 0 if they are not sharded."""
        if stage not in self._weights:
            return 0
        self._weights[stage].open(next(self._left[stage], None))
        return self._weights[stage].num_bytes

    def close(self, stage: int) -> None:
        """Close the window of a stage."""
        if stage in self._weights:
            self._weights[stage].close()


def _kinds_of(stage: int, row: Sequence[Action], recompute: Recompute) -> list[Pass | None]:
    """Return what each window of a stage in a row is for: the only pass over the layers in it; None for several."""
    passes: dict[Op, Pass] = dict.fromkeys((Op.B, Op.I), "both" if recompute == "full" else "backward")
    passes[Op.F] = "forward"
    windows: list[list[Pass]] = []
    for at, op, _ in row:
        if at == stage and op is Op.UNSHARD:
            windows.append([])
        elif at == stage and op in passes and windows:
            windows[-1].append(passes[op])
    return [found[0] if len(found) == 1 else None for found in windows]
