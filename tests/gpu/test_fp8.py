"""Products in fp8 on a GPU are those of numbers that are rounded to fp8, which tests of CPUs compare with float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from raypar.actors.layers.fp8 import FP8, multiplies_fp8, rounded

ROWS, IN, OUT = 40, 256, 128
FAR = 1e-2  # fast accumulation keeps fewer bits than fp32, and a result is rounded to bf16


@pytest.fixture
def factors():
    if not multiplies_fp8(torch.device("cuda", 0)):
        pytest.skip("needs a GPU that multiplies fp8")
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, IN), (OUT, IN), (OUT,), (ROWS, OUT)
    return [torch.randn(shape, generator=generator).bfloat16().cuda() for shape in shapes]


def near(found, wanted):
    return (found.double() - wanted).norm() < FAR * wanted.norm()


def test_outputs_and_gradients_of_inputs_are_those_of_rounded_numbers(factors):
    x, weight, bias, rows = factors
    out = F.linear(rounded(x).double(), rounded(weight).double(), bias.double())
    assert near(FP8.linear(x, weight, bias), out)
    assert near(FP8.linear(x.view(2, -1, IN), weight, bias).flatten(0, 1), out)
    with torch.no_grad():
        assert near(FP8.inner(rows, weight), F.linear(rounded(rows).double(), rounded(weight.t()).double()))


def test_an_expert_without_tokens_has_an_output_without_rows(factors):
    x, weight, bias, _ = factors
    assert FP8.linear(x[:0], weight, bias).shape == (0, OUT)
