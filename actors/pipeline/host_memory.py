"""What forwards keep for their backwards, moved to host memory and back by the actions OFFLOAD and RELOAD."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from raypar.actors.data_parallel.high_water import HighWater

_Key = tuple[int, int]  # the step and the number of a microbatch


class _Kept:
    """A tensor that a graph keeps: where it lies in its storage, and the storage while that is on the device."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor.detach()
        self.dtype, self.shape = tensor.dtype, tensor.shape
        self.stride, self.offset = tensor.stride(), tensor.storage_offset()

    def lie_in(self, storage: torch.UntypedStorage) -> None:
        """Be a part of a storage again."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        self.tensor = empty.set_(storage, self.offset, self.shape, self.stride)


class HostMemory:
    """The activations of a stage, of which those of some microbatches are in host memory.

    What several tensors of a graph share is moved once. The copies are synchronous. On a CPU host memory is the
    device's, so that nothing is copied; the bytes are counted all the same. Graphs own what they keep: of a microbatch
    whose graph is gone nothing is left here.

    Args:
        held: Counts the bytes that are in host memory, of all stages of the actor.
    """

    def __init__(self, held: HighWater) -> None:
        self.held = held
        self._kept: dict[_Key, WeakSet[_Kept]] = {}
        self._away: dict[_Key, list[tuple[torch.UntypedStorage, torch.device, list[_Kept]]]] = {}

    @property
    def num_away(self) -> int:
        """The number of microbatches whose activations are in host memory."""
        return len(self._away)

    def begin(self) -> None:
        """Begin a step: drop what an interrupted one left behind. All stages of the actor begin before the first F."""
        self._kept.clear()
        self.held.add(-sum(storage.nbytes() for moved in self._away.values() for storage, _, _ in moved))
        self._away.clear()
        self.held.begin()

    @contextmanager
    def keeping(
        self, step: int, microbatch: int, inputs: Iterable[Tensor], modules: Iterable[nn.Module]
    ) -> Iterator[object]:
        """Note what graphs that are recorded within keep of a microbatch.

        Args:
            step: The step.
            microbatch: The microbatch.
            inputs: What the stage takes, which stays on the device whatever is moved.
            modules: Its layers, whose weights and buffers stay there too.

        Yields:
            The hook that sees what is saved.
        """
        key = step, microbatch
        stays = [*inputs, *(one for part in modules for one in (*part.parameters(), *part.buffers()))]
        known = {one.untyped_storage().data_ptr() for one in stays}
        kept = self._kept[key] = WeakSet[_Kept]()

        def pack(tensor: Tensor) -> Tensor | _Kept:
            if tensor.layout is not torch.strided or tensor.untyped_storage().data_ptr() in known:
                return tensor.detach() if tensor.requires_grad and not tensor.is_leaf else tensor
            one = _Kept(tensor)
            kept.add(one)
            return one

        def unpack(one: Tensor | _Kept) -> Tensor:
            if isinstance(one, Tensor):
                return one
            assert one.tensor is not None, "a backward before its RELOAD"
            return one.tensor

        with saved_tensors_hooks(pack, unpack):
            yield pack

    def offload(self, step: int, microbatch: int) -> None:
        """Move what a microbatch's graph keeps to host memory."""
        together: defaultdict[int, list[_Kept]] = defaultdict(list)
        for one in self._kept.pop((step, microbatch), ()):
            if one.tensor is not None:
                together[one.tensor.untyped_storage().data_ptr()].append(one)
        away = self._away[step, microbatch] = []
        for parts in together.values():
            first = parts[0].tensor
            assert first is not None
            storage = first.untyped_storage()
            away.append((storage.cpu(), first.device, parts))
            self.held.add(storage.nbytes())
            for one in parts:
                one.tensor = None

    def reload(self, step: int, microbatch: int) -> None:
        """Bring back what was moved of a microbatch."""
        for storage, device, parts in self._away.pop((step, microbatch), ()):
            back = storage if device.type == "cpu" else storage.to(device=device)
            for one in parts:
                one.lie_in(back)
            self.held.add(-storage.nbytes())
