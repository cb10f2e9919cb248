"""The exponential moving average of the weights that an actor updates."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from raypar.actors.autograd.torch_private import lerp_each
from raypar.actors.checkpoint.snapshot import AVERAGE, Read
from raypar.actors.optim.masters import Masters
from raypar.actors.optim.optimizer import laid_out
from raypar.actors.tensors import nbytes


class WeightAverage:
    """Keeps a + (1 - decay) (w - a) of every master w, from its value after the first update on.

    Args:
        decay: Weight of the old average in an update.
        masters: The weights that this actor updates.

    Attributes:
        is_used: Whether the values of the masters and of the averages are swapped now.

    Raises:
        OffloadError: The storage off the device has no space for the averages.

    Source: Polyak & Juditsky 1992, "Acceleration of stochastic approximation by averaging"; the numbers are those of
    torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay).
    """

    def __init__(self, decay: float, masters: Masters) -> None:
        self._decay, self._masters, self._averages = decay, masters, dict[str, Tensor]()
        self.is_used = False
        if masters.storage.is_off_device:
            masters.storage.reserve(map(nbytes, masters.parameters.values()))

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages by the masters, after an update of these."""
        storage, masters = self._masters.storage, self._masters.parameters
        averaged = list(self._averages)
        for name, master in masters.items():
            if name not in self._averages:
                self._averages[name] = storage.copied(master)
        for names in [[name] for name in averaged] if storage.is_off_device else [averaged]:
            own, averages = [masters[name].detach() for name in names], [self._averages[name] for name in names]
            with storage.accessible(own), storage.accessible(averages, writes=True):
                lerp_each(averages, own, 1 - self._decay)

    @torch.no_grad()
    def use(self, *, use: bool) -> None:
        """Swap the values of masters and averages, or swap them back; they are equal before the first update."""
        if use == self.is_used:
            return
        self.is_used, storage = use, self._masters.storage
        for name, average in self._averages.items():
            master = self._masters.parameters[name]
            with storage.accessible([master, average], writes=True):
                before = master.detach().clone()
                master.copy_(average)
                average.copy_(before)
        self._masters.publish()

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the averages as a part of the optimizer's state: (logical name, key, tensor)."""
        yield from ((name, AVERAGE, average) for name, average in self._averages.items())

    def load(self, read: Read) -> None:
        """Load saved averages. The next update creates missing ones. The masters are loaded elsewhere.

        Args:
            read: Returns the saved tensor for (logical name, state key), or None.
        """
        self.is_used, storage, before = False, self._masters.storage, self._averages
        self._averages = {}
        for name, master in self._masters.parameters.items():
            if (value := read(name, AVERAGE)) is not None:
                value = laid_out(value, master)
                self._averages[name] = storage.moved(value, before.get(name)) if storage.is_off_device else value
