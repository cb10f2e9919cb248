"""The windows in which the sharded weights of a stage are gathered, and a guard against any other use of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, Literal

from torch import Tensor

from raypar.actors.autograd.torch_private import (
    DispatchMode,
    argument_names,
    leaves_of,
    num_writes,
    storage_id,
    written_arguments,
)
from raypar.actors.data_parallel.units import Unit
from raypar.actors.models.tiles.tiled import TiledLinear
from raypar.actors.specs.recompute import Recompute
from raypar.actors.tensors import Values
from raypar.schedules.action import Action, Op

Pass = Literal["forward", "backward", "both"]

_ONLY_WHILE = "with zero 3 the weights of a layer are there only while the layer runs"


class WeightGuard(DispatchMode):
    """Mode in which an op that reads a freed weight, or writes into a whole one, raises ValueError.

    Args:
        units: The units of the weights.
    """

    only_looks = True

    def __init__(self, units: Sequence[Unit]) -> None:
        super().__init__()
        self._units, self._is_off = units, False

    @contextmanager
    def off(self) -> Iterator[None]:
        """Return a context without checks, to gather and free weights."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_off and not getattr(func, "is_view", True):
            values = dict(zip(argument_names(func), args, strict=False)) | kwargs
            written = {name: values.pop(name) for name in written_arguments(func) if name in values}
            for tensor in leaves_of((values, written)):
                if isinstance(tensor, Tensor):
                    self._demand_whole(tensor)
            for tensor in leaves_of(written):
                if isinstance(tensor, Tensor) and (name := self._name_of(tensor)[0]) is not None:
                    raise ValueError(
                        f"{name} is written to, and {_ONLY_WHILE}, so the change would be lost: let the forward "
                        "compute with a changed copy, keep the value in a buffer, or set zero to 2"
                    )
        return func(*args, **kwargs)

    def _demand_whole(self, tensor: Tensor) -> None:
        name, unit = self._name_of(tensor)
        if unit is not None and not unit.is_ready:
            raise ValueError(
                f"{name} is used while it is not there: {_ONLY_WHILE}. Hand what a layer makes to later layers as its "
                "outputs only, and register a weight in every layer that uses it; or keep weights until the backward, "
                "reshard_after_forward=False, or set zero to 2"
            )

    def _name_of(self, tensor: Tensor) -> tuple[str | None, Unit | None]:
        """Return the logical name and the unit of the weight whose memory a tensor has; None if there is none."""
        for unit in self._units:
            if (name := unit.name_of(tensor)) is not None:
                return name, unit
        return None, None


@dataclass(eq=False)
class StageWeights:
    """Gathers and frees the sharded weights of a stage, at the UNSHARD and RESHARD of a schedule.

    A window is the time between ``open`` and ``close``, in which the stage's layers may be used. A window for a single
    pass over the layers streams: each unit is gathered just before the first layer that uses it, while the previous
    layer computes, and freed after the last one. The unit after the next one is prefetched from the disk, if it is
    there. A window for several passes holds all units until it is closed.

    All replicas must gather in the same order. So the order of a window that streams is fixed in advance, and units of
    layers that were skipped are gathered too.

    Attributes:
        units: All units of the stage's parameters.
        uses: For each layer of the stage, the indices of the units that it uses during its whole pass.
        tiles: For each layer, the indices of the units of its tiles, each used for one product; empty without tiles.
        is_guarded: Whether to check the layers' use of weights, because they may use them in unusual ways.
        num_bytes: Bytes of the stage's parameters when they are whole.
    """

    units: Sequence[Unit]
    uses: Sequence[tuple[int, ...]]
    tiles: Sequence[tuple[int, ...]] = ()
    is_guarded: bool = False

    def __post_init__(self) -> None:
        self._guard = WeightGuard(self.units) if self.is_guarded else None
        self._memory = frozenset[int]().union(*(unit.memory for unit in self.units))
        self.num_bytes = sum(unit.num_bytes for unit in self.units)
        self.tiles = self.tiles or ((),) * len(self.uses)
        *self._starts, self._total = accumulate((1 + len(cut) for cut in self.tiles), initial=0)
        self._kind: Pass | None = None
        # Units of each visit of a layer in turn; None if all units are held.
        self._visits: list[tuple[int, ...]] | None = None
        self._at = -1  # the present visit
        self._is_open = False
        self._first_backward = 0  # index of the first visit of the backward
        self._input_writes: dict[int, int] = {}  # number of writes to each input of the running layer, by id

    def open(self, kind: Pass | None) -> None:
        """Open a window and start to gather.

        Args:
            kind: The only pass over the layers in this window, to stream; None for more than one, to hold all units.
        """
        if not self._is_open:
            self._is_open = True
            self._plan(kind)

    def start(self, kind: Pass) -> None:
        """Begin a pass over the layers. A window that was opened for another single pass is planned again."""
        if self._visits is not None and (self._kind != kind or self._at >= 0):
            self._finish()
            self._plan(kind)

    def forward(self, layer: int, inputs: Values) -> None:
        """Prepare for the forward of a layer with some inputs: wait until its weights are whole."""
        self._input_writes = {id(value): num_writes(value) for value in inputs}
        self._enter(self.uses[layer], self._starts[layer])

    def backward(self, layer: int) -> None:
        """Prepare for the backward of a layer: wait until its weights are whole."""
        self._enter(self.uses[layer], self._backward_visit(layer))

    def watch_tiles(self, layer: int, linears: Sequence[TiledLinear]) -> None:
        """Hook the tiled linear layers of a layer, in the order of its tiles, to gather each tile when it is used."""
        first = 0
        for linear in linears:
            linear.before = partial(self._forward_tile, layer, first)
            linear.after = partial(self._watch_tile, layer, first)
            first += sum(1 for _ in linear.children())

    def _forward_tile(self, layer: int, first: int, number: int) -> None:
        planned = self._kind != "backward"  # else the layer is recomputed in its backward
        self._enter_tile(layer, first + number, self._starts[layer] + 1 + first + number if planned else None)

    def _watch_tile(self, layer: int, first: int, number: int, output: Tensor) -> None:
        if output.requires_grad:
            tile = first + number
            offset = len(self.tiles[layer]) - tile
            output.register_hook(lambda gradient: self._enter_tile(layer, tile, self._backward_visit(layer) + offset))

    def _enter_tile(self, layer: int, tile: int, visit: int | None) -> None:
        """Prepare for the product of a tile. ``visit`` is its number in the plan; None if it is not planned."""
        index, cut = self.tiles[layer][tile], self.tiles[layer]
        used = (*self.uses[layer], index)
        if visit is not None or self._visits is None:
            self._enter(used, visit or 0)
            return
        following = self._visits[self._at + 1] if self._at + 1 < len(self._visits) else ()
        self._enter(used, self._at, [one for one in cut if one != index and one not in following])

    def _backward_visit(self, layer: int) -> int:
        """Return the number of the first visit of a layer's backward."""
        return self._first_backward + self._total - self._starts[layer] - 1 - len(self.tiles[layer])

    def watch(self, layer: int, outputs: Values) -> Values:
        """Hook the outputs of a layer to prepare for its backward when the first gradient of an output is computed.

        Call it directly after the layer, while the inputs of ``forward`` still exist. Inputs that the layer returns
        unchanged have no backward in it.

        Returns:
            The outputs; an output in the memory of a weight is copied, because that may be freed before it is read.
        """
        outputs = tuple([value.clone() if storage_id(value) in self._memory else value for value in outputs])
        for output in outputs:
            if output.requires_grad and self._input_writes.get(id(output)) != num_writes(output):
                output.register_hook(lambda gradient: self.backward(layer))
        return outputs

    def guarded(self) -> AbstractContextManager[object]:
        """Return a context in which a layer that reads a freed weight, or writes into one, raises ValueError."""
        return nullcontext() if self._guard is None else self._guard

    def close(self) -> None:
        """Close the window: gather the remaining units of its order, and free all units."""
        if self._is_open:
            self._finish()
            self._is_open = False

    def _plan(self, kind: Pass | None) -> None:
        """Plan the visits of a window, and start to gather the units of the first one."""
        self._kind, self._at = kind, -1
        layers = list(zip(self.uses, self.tiles, strict=True))
        forward = [visit for used, cut in layers for visit in (used, *((*used, one) for one in cut))]
        backward = [visit for used, cut in layers[::-1] for visit in (used, *((*used, one) for one in cut[::-1]))]
        plans: dict[Pass, list[tuple[int, ...]]]
        plans = {"forward": forward, "backward": backward, "both": [*forward, *backward]}
        self._visits = None if kind is None else plans[kind]
        self._first_backward = len(forward) if kind == "both" else 0
        for index in range(len(self.units)) if self._visits is None else self._visits[0] if self._visits else ():
            self.units[index].gather(self)

    def _enter(self, used: Sequence[int], visit: int, unused: Sequence[int] = ()) -> None:
        """Advance to a visit, free the ``unused`` units, and wait until the units that it uses are whole."""
        with nullcontext() if self._guard is None else self._guard.off():
            if self._visits is not None:
                self._advance(self._visits, visit)
            for index in unused:
                self.units[index].free(self)
            for index in used if self._is_open else ():
                self.units[index].gather(self)  # whole already, unless a layer runs once more than planned
                self.units[index].wait()

    def _advance(self, visits: Sequence[tuple[int, ...]], visit: int) -> None:
        """Advance to a visit: free the units that it does not use, and start to gather for it and for the next one."""
        while self._at < visit:
            self._at += 1
            used = visits[self._at]
            for index, unit in enumerate(self.units):
                if index not in used:
                    unit.free(self)
            for index in (*used, *(index for visit in visits[self._at + 1 : self._at + 2] for index in visit)):
                self.units[index].gather(self)
            for index in (index for visit in visits[self._at + 2 : self._at + 3] for index in visit):
                self.units[index].prefetch()

    def _finish(self) -> None:
        if self._visits is not None:
            self._advance(self._visits, len(self._visits) - 1)
        for unit in self.units:
            unit.free(self)


class WeightWindows:
    """The windows of all sharded stages of an actor, in the order of its row.

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
        """Begin a step: close the windows that an interrupted step left open."""
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
    """Return, for each window of a stage in a row, its only pass over the layers; None if it has several."""
    passes: dict[Op, Pass] = dict.fromkeys((Op.B, Op.I), "both" if recompute == "full" else "backward")
    passes[Op.F] = "forward"
    windows: list[list[Pass]] = []
    for at, op, _, _ in row:
        if at == stage and op is Op.UNSHARD:
            windows.append([])
        elif at == stage and op in passes and windows:
            windows[-1].append(passes[op])
    return [found[0] if len(found) == 1 else None for found in windows]
