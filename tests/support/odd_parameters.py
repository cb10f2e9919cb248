"""A layer with parameters of unusual kinds."""

from __future__ import annotations

import torch
from torch import nn


class OddParameters(nn.Module):
    """Parameters in memory column by column, with gaps, a number, and one without elements."""

    def __init__(self):
        super().__init__()
        self.columns = nn.Parameter(torch.randn(4, 40).t())
        self.gaps = nn.Parameter(torch.randn(40, 8)[:, ::2].t())
        self.number, self.none = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.empty(0, 3))
