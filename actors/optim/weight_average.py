"""The exponential moving average of the weights that an actor updates."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from raypar.actors.checkpoint.snapshot import AVERAGE, Read
from raypar.actors.optim.masters import Masters
from raypar.actors.optim.optimizer import laid_out
from raypar.actors.tensors import nbytes


class WeightAverage:
    """Keeps a + (1 - decay) (w - a) of every master w, from its value after the first update on.

    Args:
        decay: Share of the average that an update leaves.
        masters: The weights that this actor updates.

    Attributes:
        is_used: Whether the masters have the averages' values at present, and the averages theirs.

    Raises:
        OffloadError: There is no room for the averages where masters are kept away from the device.

    Source: Polyak & Juditsky 1992, "Acceleration of stochastic approximation by averaging"; the numbers are those of
    torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn(decay).
    """

    def __init__(self, decay: float, masters: Masters) -> None:
        self._decay, self._masters, self._averages = decay, masters, dict[str, Tensor]()
        self.is_used = False
        if masters.home.is_apart:
            masters.home.reserve(map(nbytes, masters.parameters.values()))

    @torch.no_grad()
    def update(self) -> None:
        """Take in the masters as an update has left them."""
        home = self._masters.home
        for name, master in self._masters.parameters.items():
            if name not in self._averages:
                self._averages[name] = home.copied(master)
                continue
            average = self._averages[name]
            with home.at_hand([master]), home.at_hand([average], writes=True):
                average.lerp_(master.detach(), 1 - self._decay)

    @torch.no_grad()
    def use(self, *, use: bool) -> None:
        """Let the masters have the averages' values, or again their own; before the first update both are the same."""
        if use == self.is_used:
            return
        self.is_used, home = use, self._masters.home
        for name, average in self._averages.items():
            master = self._masters.parameters[name]
            with home.at_hand([master, average], writes=True):
                before = master.detach().clone()
                master.copy_(average)
                average.copy_(before)
        self._masters.publish()

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the averages as a part of the optimizer's state: (logical name, key, tensor)."""
        yield from ((name, AVERAGE, average) for name, average in self._averages.items())

    def load(self, read: Read) -> None:
        """Load saved averages. Of a weight without one the next update makes it. The masters are loaded elsewhere.

        Args:
            read: Returns the saved tensor for (logical name, state key), or None.
        """
        self.is_used, home, before = False, self._masters.home, self._averages
        self._averages = {}
        for name, master in self._masters.parameters.items():
            if (value := read(name, AVERAGE)) is not None:
                value = laid_out(value, master)
                self._averages[name] = home.moved(value, before.get(name)) if home.is_apart else value
