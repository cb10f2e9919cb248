"""Own batches that a GPT can't take are told before any actor starts, all at once, each with its fix."""

import pytest
import torch

import raypar as rp

MODEL = rp.GPT(layers=2, hidden=32, heads=2, seq=8, vocab=50)
IDS = torch.arange(16).view(2, 8)


def told(inputs, targets):
    run = rp.Run(model=MODEL, data=rp.Batches(lambda step, microbatch, dp: (inputs, targets)), micro_batch_size=2)
    return rp.faults(run)


def test_what_fits_is_no_fault():
    assert told(IDS, IDS) == []
    assert told(IDS, IDS.where(IDS > 3, -100)) == []
    assert told(IDS[:, :4].int(), IDS[:, :4]) == [], "fewer tokens than model.seq"


@pytest.mark.parametrize(
    ("inputs", "targets", "faults"),
    [
        (IDS, torch.zeros(2).long(), ["data.fn gives targets (2,) for inputs (2, 8): give a label for each token"]),
        (IDS, IDS.float(), ["data.fn gives targets of float32: labels are token ids, cast them with .long()"]),
        (IDS - 1, IDS, ["data.fn gives token ids from -1 to 14, and model.vocab is 50: ids are 0 to 49"]),
        (IDS + 40, IDS, ["token ids from 40 to 55"]),
        (IDS, IDS - 2, ["data.fn gives labels from -2 to 13", "or -100 for a token that does not count"]),
        (IDS.view(4, 2, 2), IDS.view(4, 2, 2), ["data.fn gives inputs (4, 2, 2), and a GPT takes (samples, tokens)"]),
        ((IDS, IDS), IDS, ["data.fn gives 2 inputs and 1 targets, and a GPT takes one of each"]),
    ],
)
def test_what_does_not_fit_is_told_with_its_fix(inputs, targets, faults):
    found = "\n".join(told(inputs, targets))
    assert all(fault in found for fault in faults), found


def test_all_misfits_are_told_at_once():
    assert len(told(IDS - 1, torch.zeros(2))) == 3
