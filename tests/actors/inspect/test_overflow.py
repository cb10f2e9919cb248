"""The watch for overflow: exact counts on every layout, none twice, and no number of the run changed."""

from collections import Counter

import pytest
import torch
from torch import nn

from raypar.actors.inspect.overflow import OverflowWatch
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.model import GPT
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import format_watched
from tests.support.team import Team, linears

FP16 = torch.finfo(torch.float16)


def plainly(value):
    over = sum(not abs(each) <= FP16.max for each in value.flatten().tolist())
    under = sum(0 < abs(each) < FP16.smallest_normal for each in value.flatten().tolist())
    return over, under


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_counts_are_exact(dtype):
    edges = [0.0, -0.0, FP16.max, 65505.0, -70000.0, FP16.smallest_normal, 6e-5, -6e-8, float("nan"), float("-inf")]
    value = torch.cat([torch.tensor(edges), torch.logspace(-12, 12, 4001)]).to(dtype).repeat(2, 1).t()
    expected = [plainly(value), plainly(value[:1])]
    watch = OverflowWatch(1, "fp16", ["a"], {}, {}, {})
    watch.begin(0, train=True)
    watch.watch(0, 0, (value, value[:1], value.long()))
    value.zero_()  # as the next layer may do
    assert [count[-2:] for count in watch.read()] == expected
    assert watch.read() == ()


def test_counts_of_many_elements_are_exact():
    value = torch.zeros((1 << 22) + 3)
    value[-1], value[0] = 1e-6, float("inf")
    watch = OverflowWatch(1, "fp16", ["a"], {}, {}, {})
    watch.begin(0, train=True)
    watch.watch(0, 0, (value,))
    (count,) = watch.read()
    assert count[-3:] == (2**22 + 3, 1, 1)


def counted(results):
    """Figures by layer, kind and microbatch; equal parts on several actors count once."""
    parts = {each[:5]: each for result in results for each in result.ranges}
    found = {}
    for each in parts.values():
        found.setdefault(each[1:4], Counter()).update(values=each.values, over=each.over, under=each.under)
    return found


def figures(**changes):
    with_watch = {"overflow_every": 1, "steps": 2} | changes
    return counted(Team(linears(), **with_watch).step())


@pytest.mark.sampled
@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "gpipe"},
        {"pp": 1},
        {"backward": "split"},
        {"recompute": "full"},
        {"recompute": ("none", "full", "full", "none")},
        {"pp": 2, "schedule": "interleaved"},
    ],
)
def test_every_layout_of_one_replica_counts_the_same(changes):
    plain = figures(pp=1, schedule="naive")
    assert len(plain) == 4 * 4 * 2 + 4  # layers x microbatches x (outputs, gradients) + layers
    assert figures(**changes) == plain


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_replicas_count_each_weight_once(zero):
    found = figures(pp=1, dp=2, m=2, zero=zero)
    assert {microbatch for _, _, microbatch in found} == {None, 0, 1, 2, 3}
    weights = {layer: count["values"] for (layer, kind, _), count in found.items() if kind == "weight_gradients"}
    assert list(weights.values()) == [20] * 4


def gpt(mesh, **changes):
    model = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=258)
    return Run(model=model, mesh=mesh, microbatches=2, steps=1, timeout=10.0, overflow_every=1, **changes)


@pytest.mark.parametrize("changes", [{}, {"sequence_parallel": True}])
def test_parts_of_a_divided_tensor_are_added(changes):
    plain = counted(Team.of(gpt(Mesh())).step())
    found = counted(Team.of(gpt(Mesh(tp=2), **changes)).step())
    assert found.keys() == plain.keys()
    for key, figure in found.items():
        if key[1] != "weight_gradients" or not changes:  # of a sum over members, each addend counts
            assert figure["values"] == plain[key]["values"], key


def test_context_parallel_parts_are_added():
    plain, found = (counted(Team.of(gpt(mesh)).step()) for mesh in (Mesh(), Mesh(cp=2)))
    assert {key: each["values"] for key, each in found.items()} == {key: each["values"] for key, each in plain.items()}


def test_only_every_kth_training_step_counts_and_no_number_changes():
    off, on = Team(linears()), Team(linears(), overflow_every=2)
    off.step(), on.step()
    for step in (1, 2):
        plain, watched = off.step(step), on.step(step)
        assert [bool(result.ranges) for result in watched] == [step == 2] * 2
        assert [result.losses for result in watched] == [result.losses for result in plain]
    assert not any(result.ranges for result in on.step(0, "evaluate"))
    plain, watched = off.weights(), on.weights()
    assert all(torch.equal(plain[name], watched[name]) for name in plain)


class Large(nn.Module):
    """Outputs that fp16 cannot hold, in one place of four."""

    def __init__(self):
        super().__init__()
        self.size = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return torch.cat([x[:, :3] * self.size[:3], (x[:, 3:] * 0 + self.size[3:]) * 1e5], 1)


class Back(nn.Module):
    """Makes them small again, so that the loss is finite."""

    def __init__(self):
        super().__init__()
        self.size = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.size * 1e-5


def test_the_layer_that_overflows_is_named_while_the_loss_is_finite():
    team = Team(lambda: [nn.Linear(4, 4), Large(), Back()], pp=1, overflow_every=1)
    (result,) = team.step()
    assert all(loss < 1 for loss in result.losses)
    over = {(layer, kind) for (layer, kind, _), count in counted([result]).items() if count["over"]}
    (layer,) = {layer for layer, _ in over}
    assert layer.endswith("1")
    shares = [each.over / each.values for each in result.ranges if each.over]
    assert shares == [0.25] * 4


def test_a_format_is_chosen_or_that_of_the_computation():
    assert format_watched(None) == "fp16"
    assert format_watched(None, "bf16") == "bf16"
    assert format_watched("fp32") == "fp32"
