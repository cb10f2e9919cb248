"""A perplexity is that of tokens."""

from __future__ import annotations

import pytest
import torch

import raypar as rp
from raypar.reporting.evaluation import are_tokens

DATA = rp.Batches(lambda *_: (torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64)))


def layers(**more):
    return rp.Layers(lambda: [torch.nn.Linear(2, 4)], loss=torch.nn.functional.cross_entropy, **more)


@pytest.mark.parametrize(
    ("run", "wanted"),
    [
        (rp.Run(unit="samples"), True),
        (rp.Run(model=layers(), data=DATA), False),
        (rp.Run(model=layers(), data=DATA, unit="tokens"), True),
        (rp.Run(model=layers(seq=2)), True),
    ],
)
def test_layers_have_tokens_if_their_sequences_or_their_unit_say_so(run, wanted):
    assert are_tokens(run) == wanted
