"""Bytes that the actors of a Team really hold for backwards and in weights, by the memory that tensors lie in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from weakref import WeakSet

from torch import Tensor

from raypar.actors.machine.high_water import HighWater
from raypar.actors.pipeline.offloaded_activations import OffloadedActivations


class Watched(OffloadedActivations):
    """The activations of a stage, of which it knows all that graphs keep on the device."""

    def __init__(self, held: HighWater) -> None:
        super().__init__(held)
        self._seen: list[WeakSet] = []

    @contextmanager
    def keeping(self, step, microbatch, inputs, modules) -> Iterator[object]:
        with super().keeping(step, microbatch, inputs, modules) as hook:
            self._seen.append(self._saved[step, microbatch])
            yield hook

    def on_device(self) -> Iterator[Tensor]:
        """What graphs keep, inputs of the stage and weights left out."""
        return (one.tensor for kept in self._seen for one in [*kept] if one.tensor is not None)


class Held:
    """What an actor of a Team holds after each action, in bytes.

    Attributes:
        activations: By action, what F keeps for B or I, and what I keeps for W.
        weights: After each action, all versions of the weights.
    """

    def __init__(self, actor) -> None:
        self._member = member = actor.member
        self.activations: dict[str, int] = {}
        self.weights: list[int] = []
        one = HighWater()
        for stage in member._stages.values():
            stage.host = Watched(stage.host.held if stage.host else one)
        for op, perform in [*member._methods.items()]:
            member._methods[op] = self._noted(perform)

    def _noted(self, perform):
        def performed(action):
            perform(action)
            self.activations[str(action)] = num_bytes(self._for_backwards())
            self.weights.append(num_bytes(self._all_weights()))

        return performed

    def _for_backwards(self) -> Iterator[Tensor]:
        for stage in self._member._stages.values():
            yield from stage.host.on_device()
            for inputs, *_ in stage._saved.values():
                yield from (one for one in inputs if one.is_floating_point())  # ids are data
            for deferred in stage._deferred.values():
                yield from (one for use in chain(*deferred._uses.values()) for one in (use.x, use.rows))

    def _all_weights(self) -> Iterator[Tensor]:
        member = self._member
        for number, stage in member._stages.items():
            yield from (one for module in stage.modules for one in module.parameters())
            if member._stream is not None:
                yield from chain(*member._stream._versions[number]._banks.values())


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of tensors; memory that they share counts once."""
    return sum({one.data_ptr(): one.nbytes() for one in (tensor.untyped_storage() for tensor in tensors)}.values())
