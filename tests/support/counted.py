"""oneDNN's products as a test sees them, and torch's threads for the time of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from raypar.actors.autograd import torch_private


class Counted:
    """oneDNN's product: how often it was called, and with weights of which shapes."""

    def __init__(self) -> None:
        self.weights: list[tuple[int, ...]] = []
        self.really = torch_private._ONEDNN_LINEAR

    @property
    def calls(self) -> int:
        return len(self.weights)

    def __call__(self, x, weight, *others):
        self.weights.append(tuple(weight.shape))
        return self.really(x, weight, *others)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
