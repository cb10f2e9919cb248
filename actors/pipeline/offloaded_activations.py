"""Activations that forwards save for their backwards, moved to host memory and back by OFFLOAD and RELOAD."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from raypar.actors.machine.high_water import HighWater

_Key = tuple[int, int]  # the step and the number of a microbatch


class _SavedTensor:
    """A tensor that a graph saves: its layout in its storage, and the tensor itself while that is on the device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.stride, self.offset = tensor.stride(), tensor.storage_offset()

    def restore(self, storage: torch.UntypedStorage) -> None:
        """Set the tensor to its part of a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        self.tensor = empty.set_(storage, self.offset, self.shape, self.stride)


class OffloadedActivations:
    """The activations of a stage, some microbatches of which are in host memory.

    A storage that several tensors of a graph share is moved once. The copies are synchronous. On a CPU, host memory is
    the device's memory, so nothing is copied, but the bytes are counted. Graphs own the tensors that they save: this
    class holds nothing of a microbatch whose graph is freed.

    Args:
        held: Counts the bytes in host memory, of all stages of the actor.
    """

    def __init__(self, held: HighWater) -> None:
        self.held = held
        self._saved: dict[_Key, WeakSet[_SavedTensor]] = {}
        self._away: dict[_Key, list[tuple[torch.UntypedStorage, torch.device, list[_SavedTensor]]]] = {}

    @property
    def num_away(self) -> int:
        """Number of microbatches whose activations are in host memory."""
        return len(self._away)

    def begin(self) -> None:
        """Begin a step: drop the state of an interrupted one. All stages of the actor begin before the first F."""
        self._saved.clear()
        self.held.add(-sum(storage.nbytes() for moved in self._away.values() for storage, _, _ in moved))
        self._away.clear()
        self.held.begin()

    @contextmanager
    def keeping(
        self, step: int, microbatch: int, inputs: Iterable[Tensor], modules: Iterable[nn.Module]
    ) -> Iterator[object]:
        """Return a context that notes the tensors of a microbatch that graphs save in it.

        Args:
            step: The step.
            microbatch: The microbatch.
            inputs: The stage's inputs, which are never moved.
            modules: The stage's layers, whose weights and buffers are never moved.

        Yields:
            The hook that is called with each saved tensor.
        """
        key = step, microbatch
        fixed = [*inputs, *(one for part in modules for one in (*part.parameters(), *part.buffers()))]
        known = {one.untyped_storage().data_ptr() for one in fixed}
        saved = self._saved[key] = WeakSet[_SavedTensor]()

        def pack(tensor: Tensor) -> Tensor | _SavedTensor:
            if tensor.layout is not torch.strided or tensor.untyped_storage().data_ptr() in known:
                return tensor.detach() if tensor.requires_grad and not tensor.is_leaf else tensor
            one = _SavedTensor(tensor)
            saved.add(one)
            return one

        def unpack(one: Tensor | _SavedTensor) -> Tensor:
            if isinstance(one, Tensor):
                return one
            assert one.tensor is not None, "a backward before its RELOAD"
            return one.tensor

        with saved_tensors_hooks(pack, unpack):
            yield pack

    def offload(self, step: int, microbatch: int) -> None:
        """Move the tensors that a microbatch's graph saves to host memory."""
        by_storage: defaultdict[int, list[_SavedTensor]] = defaultdict(list)
        for one in self._saved.pop((step, microbatch), ()):
            if one.tensor is not None:
                by_storage[one.tensor.untyped_storage().data_ptr()].append(one)
        away = self._away[step, microbatch] = []
        for parts in by_storage.values():
            first = parts[0].tensor
            assert first is not None
            storage = first.untyped_storage()
            away.append((storage.cpu(), first.device, parts))
            self.held.add(storage.nbytes())
            for one in parts:
                one.tensor = None

    def reload(self, step: int, microbatch: int) -> None:
        """Move the tensors of a microbatch back to the device."""
        for storage, device, parts in self._away.pop((step, microbatch), ()):
            back = storage if device.type == "cpu" else storage.to(device=device)
            for one in parts:
                one.restore(back)
            self.held.add(-storage.nbytes())
