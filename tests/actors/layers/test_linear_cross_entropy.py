"""A cross-entropy from slices of the vocabulary is that of whole logits: values, gradients, memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raypar.actors.layers.linear import ONEDNN, TORCH, anywhere
from raypar.actors.layers.linear_cross_entropy import LossSpec, Vocabulary, linear_cross_entropy
from raypar.actors.specs.model import vocabulary_slice
from raypar.actors.tensor_parallel.cross_entropy import vocabulary_part
from raypar.actors.tensor_parallel.linear import shard_of
from raypar.actors.tensors import bent
from tests.support.logical import together

TOKENS, HIDDEN, VOCAB, IGNORED = 60, 16, 2000, -100
#: Relative errors of gradients: of whole logits in the same dtype they are as large.
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def spec_of(width, vocab=VOCAB, cap=None, products=TORCH, memory=anywhere):
    return LossSpec(Vocabulary(vocab), width, IGNORED, cap, products, memory)


def drawn(dtype=torch.float64, tokens=TOKENS, vocab=VOCAB):
    """Inputs, weights and labels, of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(vocab, (tokens,), generator=generator)
    labels[::7] = IGNORED
    return x.requires_grad_(), weight.requires_grad_(), labels


def of_whole_logits(x, weight, labels, cap):
    return F.cross_entropy(bent(x @ weight.t(), cap), labels, ignore_index=IGNORED, reduction="none")


def error(found, wanted):
    return float((found.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("cap", [None, 5.0])
@pytest.mark.parametrize("width", [2000, 600, 64])
def test_values_and_gradients_are_near_those_of_float64(dtype, cap, width):
    x, weight, labels = drawn(dtype)
    exact = [value.detach().double().requires_grad_() for value in (x, weight)]
    wanted = of_whole_logits(*exact, labels, cap)
    losses = linear_cross_entropy(x, weight, labels, spec_of(width, cap=cap))
    assert losses.dtype == (dtype if dtype == torch.float64 else torch.float32)
    assert error(losses.detach(), wanted.detach()) < BOUNDS[dtype]
    assert not losses[::7].any()
    scales = torch.linspace(0.5, 2, TOKENS)
    (losses * scales).sum().backward()
    (wanted * scales).sum().backward()
    for value, other in zip((x, weight), exact, strict=True):
        assert value.grad.dtype == dtype
        assert error(value.grad, other.grad) < (2 if cap else 1) * BOUNDS[dtype]


def test_only_wanted_gradients_are_computed_and_in_the_given_memory():
    x, weight, labels = drawn(torch.float32)
    memory = torch.empty(VOCAB, HIDDEN)
    linear_cross_entropy(x, weight, labels, spec_of(128, memory=lambda _: memory)).sum().backward()
    assert weight.grad.data_ptr() == memory.data_ptr()
    frozen, again = weight.detach(), x.detach().requires_grad_()
    linear_cross_entropy(again, frozen, labels, spec_of(128)).sum().backward()
    assert torch.equal(again.grad, x.grad)
    alone = weight.detach().requires_grad_()
    linear_cross_entropy(x.detach(), alone, labels, spec_of(128, products=ONEDNN)).sum().backward()
    torch.testing.assert_close(alone.grad, memory)


@pytest.mark.parametrize("label", [VOCAB, -1])
def test_a_label_outside_of_the_vocabulary_is_refused(label):
    x, weight, labels = drawn()
    labels[3] = label
    with pytest.raises(RuntimeError, match=r"a label is out of bounds: give 0 to 1999, or -100 to leave it out"):
        linear_cross_entropy(x, weight, labels, spec_of(128))


@pytest.mark.parametrize("size", [2, 3])
def test_members_with_parts_of_the_vocabulary_compute_the_same(size):
    """Each has other rows of the weight, and its gradient of the input is an addend."""
    x, weight, labels = drawn(vocab=39)

    def work(group, rows):
        spec = spec_of(4)._replace(vocabulary=vocabulary_part(shard_of((39, HIDDEN), 0, group), group))
        return linear_cross_entropy(x.detach(), rows, labels, spec)

    wanted = of_whole_logits(x.detach(), weight, labels, None)
    found = together(work, size, (0,), None, weight)
    torch.testing.assert_close(found, wanted)
    (of_found,), (of_wanted,) = (torch.autograd.grad(losses.sum(), weight) for losses in (found, wanted))
    torch.testing.assert_close(of_found, of_wanted)


class Largest(TorchDispatchMode):
    """Notes the most elements of a tensor that an op returns."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if isinstance(out, Tensor):
            self.most = max(self.most, out.numel())
        return out


def test_no_tensor_has_more_elements_than_a_slice():
    x, weight, labels = drawn(torch.float32, tokens=400)
    with Largest() as seen:
        linear_cross_entropy(x, weight, labels, spec_of(100)).sum().backward()
    assert seen.most == 400 * 100 > weight.numel()


def test_the_width_of_slices_depends_on_tokens_and_vocabulary_alone():
    assert vocabulary_slice(1024, 50_257) is None, "few logits are computed whole"
    assert vocabulary_slice(8192, 128_256) == 8192
    assert vocabulary_slice(3000, 128_256) % 128 == 0
    assert vocabulary_slice(1 << 24, 128_256) == 128
    assert all((vocabulary_slice(tokens, 128_256) or 0) * tokens <= 1 << 26 for tokens in range(1, 9000, 13))
