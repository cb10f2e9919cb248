"""Before a launch: a warning where microbatches would be weighted by other numbers than a loss averages over."""

from __future__ import annotations

import logging
import re
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import raypar as rp
from raypar.actors.models.skeleton import Skeleton
from raypar.config.trial.loss import warn_of_loss

CLASSES = 5
COUNTS = 8, 3, 1, 5


def drawn(microbatch):
    generator = torch.Generator().manual_seed(microbatch)
    x = torch.randn(8, 4, generator=generator)
    return x, torch.randint(1, CLASSES, (8,), generator=generator), torch.randn(8, CLASSES, generator=generator)


def labelled(ignored):
    def fn(step, microbatch, dp):
        x, labels, _ = drawn(microbatch)
        labels[COUNTS[microbatch] :] = ignored
        return x, labels

    return fn


def part_labelled(counts):
    """Labels first, of which so many are there in each microbatch, and a value for every sample."""

    def fn(step, microbatch, dp):
        x, labels, values = drawn(microbatch)
        labels[counts[microbatch] :] = -100
        return x, (labels, values)

    return fn


def both(output, target):
    labels, values = target
    present = F.cross_entropy(output, labels, reduction="sum") / (labels != -100).sum().clamp(min=1)
    return present + F.mse_loss(output, values)


def whole_numbers(step, microbatch, dp):
    """Integers to regress, of which -100 is one."""
    x, labels, _ = drawn(microbatch)
    labels[:microbatch] = -100
    return x, labels


def regression(output, target):
    return F.mse_loss(output[:, 0], target.float())


def contrastive(output, target):
    """Each sample against all others of the microbatch."""
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def said(fn, loss, caplog, count=None, **settings):
    """What is logged of a run on these batches, by level."""
    model = rp.Layers(lambda: [nn.Linear(4, CLASSES)], loss=loss, count=count)
    run = rp.Run(model=model, data=rp.Batches(fn), microbatches=4, micro_batch_size=8, device="cpu", **settings)
    with caplog.at_level(logging.INFO, "raypar"):
        warn_of_loss(run, Skeleton(model, 0))
    return [(record.levelname, record.getMessage()) for record in caplog.records]


def zeros_left_out(target):
    return int((target != 0).sum())


UNLIKE = {
    "another number is ignored": (
        labelled(0),
        partial(F.cross_entropy, ignore_index=0),
        "the first 0.727.* it 0.500.* 8 and 8",
    ),
    "values of -100": (whole_numbers, regression, "the first 0.500.* it 0.533.* 8 and 7"),
    "labels of some samples": (
        part_labelled((8, 5, 8, 8)),
        both,
        "8 and 40 elements .* 5 and 40 .* first target alone",
    ),
    "labels in one of two": (part_labelled((8, 0, 8, 0)), both, "8 and 40 elements .* 0 and 40 .* first target alone"),
    "no labels at all": (part_labelled((0, 0, 0, 0)), both, "no target of a microbatch counts, so its loss, as .*"),
    "a sum": (
        labelled(-100),
        partial(F.cross_entropy, reduction="sum"),
        "is the sum of theirs.* 8 and 3: return a mean",
    ),
    "a sum over samples": (
        labelled(-100),
        lambda output, target: F.cross_entropy(output, target, reduction="sum") / 8,
        "is the sum of theirs.* 8 and 3: return a mean",
    ),
    "probabilities": (labelled(0), lambda p, y: F.binary_cross_entropy(p[:, 0][y > 0], y[y > 0] / CLASSES), "0.727"),
}


@pytest.mark.parametrize("what", UNLIKE)
def test_what_a_loss_does_not_weigh_as_raypar_counts_is_warned_of(what, caplog):
    fn, loss, wanted = UNLIKE[what]
    ((level, message),) = said(fn, loss, caplog)
    assert level == "WARNING"
    assert "count=" in message
    assert re.search(wanted, message), message


def test_losses_over_many_elements_differ_enough_to_compare(caplog):
    """Of 4,000 elements each, drawn alike, two microbatches would have the same loss but for a few per cent."""

    def fn(step, microbatch, dp):
        labels = torch.randint(1, CLASSES, (4000,), generator=torch.Generator().manual_seed(microbatch))
        labels[500 * COUNTS[microbatch] :] = 0
        return torch.zeros(4000, 4), labels

    ((level, message),) = said(fn, partial(F.cross_entropy, ignore_index=0), caplog)
    assert level == "WARNING" and "the first 0.727" in message, message


@pytest.mark.parametrize(
    ("count", "fault"),
    [
        (lambda target: 0.5, r"model.count fails with the target of the first batch: .*returns 0.5"),
        (lambda target: None, r"returns None"),
        (lambda target: -1, r"returns -1"),
        (lambda target: target["labels"], r"model.count fails with the target .*: .*indices|too many|Index"),
    ],
)
def test_a_count_that_fails_is_found_before_a_launch(count, fault):
    model = rp.Layers(lambda: [nn.Linear(4, CLASSES)], loss=F.cross_entropy, count=count)
    (found,) = rp.faults(rp.Run(model=model, data=rp.Batches(labelled(-100)), micro_batch_size=8, device="cpu"))
    assert re.search(fault, found), found
    assert found.endswith("fn(target) returns of how many elements the loss is the mean, as an int")


ALIKE = {
    "classes": (labelled(-100), F.cross_entropy, None),
    "a count of its own": (labelled(0), partial(F.cross_entropy, ignore_index=0), zeros_left_out),
    "a sum, of which each weighs the same": (
        labelled(-100),
        partial(F.cross_entropy, reduction="sum"),
        lambda target: 1,
    ),
    "two targets, counted": (part_labelled((8, 5, 8, 8)), both, lambda target: 8),
    "one number": (lambda *at: (drawn(at[1])[0], drawn(at[1])[2]), F.mse_loss, None),
    "smoothed": (labelled(-100), partial(F.cross_entropy, label_smoothing=0.1), None),
    "batches of other sizes": (
        lambda step, microbatch, dp: (torch.randn(3 + microbatch, 4), torch.randint(0, CLASSES, (3 + microbatch,))),
        F.cross_entropy,
        None,
    ),
    "a sample against the others": (lambda *at: drawn(at[1])[:2], contrastive, None),
}


@pytest.mark.parametrize("what", ALIKE)
def test_what_is_weighted_right_or_is_no_mean_is_not(what, caplog):
    fn, loss, count = ALIKE[what]
    assert not said(fn, loss, caplog, count)


def test_what_can_not_be_joined_is_said(caplog):
    """A graph's samples are not along the first dimension of all that it is made of."""

    def fn(step, microbatch, dp):
        return torch.randn(8, 4), torch.randn(8, 2 + microbatch)

    ((level, message),) = said(fn, lambda output, target: (output.mean() - target.mean()).square(), caplog)
    assert level == "INFO"
    assert "not tried: two microbatches can't be joined" in message


def test_a_loss_that_fails_is_left_to_others(caplog):
    ((level, message),) = said(labelled(0), lambda output, target: output.no_such, caplog)
    assert level == "INFO"
    assert "no_such" in message
