"""Layers that do not fit each other or the data are told before any actor starts, with the user's line."""

import inspect
import re
import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import raypar as rp
from raypar.actors.models.skeleton import Skeleton
from raypar.config.trial.layers import layer_faults
from raypar.job.start.before_launch import look_ahead
from raypar.job.start.launchable import TrialRun, check_launch
from raypar.job.start.resume import Prepared, prepared


def batch(step, microbatch, dp):
    return torch.randn(3, 4), torch.randn(3, 2)


def misfitting():
    return [nn.Linear(4, 6), nn.Sequential(nn.Tanh(), nn.Linear(5, 2))]


class Square(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, size))

    def forward(self, x):
        return x @ self.weight


class Looks(nn.Module):
    """Looks at values, which shapes have not."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        return x * self.weight if x.sum().item() < 1e9 else x[x > 0]


class Refuses(nn.Module):
    def forward(self, x):
        raise RuntimeError("never today")


class Selects(nn.Module):
    """Takes no zeros: it makes its shape from values."""

    def forward(self, x):
        return x[x != 0].view(3, 4)


class Demands(nn.Module):
    """Refuses what is no data, in the words of shapes."""

    def forward(self, x):
        if not x.abs().sum() > 0:
            raise ValueError("all features are zero")
        return x


class Slopes(nn.Module):
    """Uses a gradient in its forward."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad((x * self.weight).square().sum(), x, create_graph=True)[0]


class Parts(nn.Module):
    def forward(self, x, sizes):
        return torch.stack([part.mean(0) for part in x.split(sizes.tolist())])


class Ema:
    """A loss that remembers."""

    def __init__(self):
        self.mean = None

    def __call__(self, out, target):
        loss = nn.functional.mse_loss(out, target)
        self.mean = loss.detach()
        return loss


def faults_of(fn, loss=nn.functional.mse_loss, data=batch, **changes):
    run = rp.Run(model=rp.Layers(fn, loss), data=rp.Batches(data), **changes)
    return layer_faults(run, Skeleton(run.model, run.seed))


def test_lazy_layers_are_told_with_the_fix_and_those_that_have_their_sizes_are_taken():
    def lazy():
        return [nn.LazyLinear(6), nn.Sequential(nn.Tanh(), nn.LazyLinear(2))]

    def known():
        lazy = nn.LazyLinear(2)
        lazy(torch.zeros(3, 4))
        return [lazy]

    run = rp.Run(model=rp.Layers(lazy, nn.functional.mse_loss), data=rp.Batches(batch))
    told = (
        "a LazyLinear, which learns its sizes from its first batch, and actors divide the weights before: give Linear"
    )
    assert rp.faults(run) == [f"model.fn: {path} is {told} with its sizes" for path in ("layers.0", "layers.1.1")]
    assert rp.faults(replace(run, model=rp.Layers(known, nn.functional.mse_loss))) == []


def test_a_layer_that_does_not_fit_is_told_with_the_line_that_made_it():
    (fault,) = faults_of(misfitting)
    line = inspect.getsourcelines(misfitting)[1] + 1
    assert fault.startswith("model: layers.1 can't take what layers.0 makes, (3, 6): mat1 and mat2 shapes cannot be")
    assert fault.endswith(f"({__file__}, line {line})")


def test_a_mask_that_is_none_is_told():
    class Masked(nn.Module):
        def forward(self, x):
            q = x[:, None, None].expand(-1, 2, 3, -1)
            return rp.flex_attention(q, q, q, lambda b, h, q, k: (h > 0) & (q >= k))[:, 0, 0]

    (fault,) = faults_of(lambda: [Masked()])
    assert fault.startswith("model: layers.0: the mask depends on the head, and with tensor parallelism each actor")


def test_a_launch_refuses_it_before_anything_starts():
    run = rp.Run(model=rp.Layers(misfitting, nn.functional.mse_loss), data=rp.Batches(batch))
    with pytest.raises(rp.ConfigError, match=r"layers\.1 can't take what layers\.0 makes"):
        rp.launch(run)


def test_a_line_of_the_user_s_own_forward_is_told():
    (fault,) = faults_of(lambda: [Square(5)])
    line = inspect.getsourcelines(Square.forward)[1] + 1
    assert fault.startswith("model: layers.0 can't take what data.fn gives, (3, 4): ")
    assert fault.endswith(f"({__file__}, line {line})")


def test_a_loss_that_does_not_fit_is_told():
    (fault,) = faults_of(lambda: [nn.Linear(4, 5)])
    assert fault.startswith("model.loss can't take what layers.0 makes, (3, 5), and the targets, (3, 2): The size of")


def test_targets_and_losses_that_shapes_alone_do_not_show_are_tried():
    def labels(count, most):
        return lambda step, microbatch, dp: (torch.randn(7, 4), torch.arange(count) % most)

    def of(data, loss):
        model = rp.Layers(lambda: [nn.Linear(4, 3)], loss)
        return layer_faults(rp.Run(model=model, data=rp.Batches(data)), Skeleton(model, 0))

    assert of(labels(7, 3), nn.functional.cross_entropy) == []
    (lengths,) = of(labels(5, 3), nn.functional.cross_entropy)
    assert "makes, (7, 3), and the targets, (5,): Expected input batch_size (7) to match" in lengths
    outside = of(labels(7, 4), nn.functional.cross_entropy)[0]
    assert outside.endswith(
        "Target 3 is out of bounds. Classes count from 0, so give fewer, or a last layer of more outputs."
    )
    (vector,) = of(labels(7, 3), nn.CrossEntropyLoss(reduction="none"))
    assert "the loss must be one floating number, it is (7,): return the mean over the microbatch" in vector


@pytest.mark.parametrize(
    "fn",
    [
        lambda: [nn.Linear(4, 2)],
        lambda: [Looks(), nn.Linear(4, 2)],
        lambda: [Looks(), nn.Linear(5, 2)],  # behind what can't be tried nothing is known
        lambda: [nn.Linear(4, 2), Refuses()],  # the user's own error: it comes from the actor, as it is
        lambda: [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout()), Square(4), nn.Linear(4, 2)],
    ],
)
def test_what_fits_or_is_not_known_passes(fn):
    before = torch.random.get_rng_state()
    assert faults_of(fn) == []
    assert torch.equal(torch.random.get_rng_state(), before)


class Both(nn.Linear):
    def forward(self, x):
        return super().forward(x), {"seen": 1}


CROSS = nn.functional.cross_entropy
NUMBERS = torch.randn(5, 4), torch.zeros(5, dtype=torch.long)


@pytest.mark.parametrize(
    ("data", "loss", "first", "says"),
    [
        (
            (NUMBERS[0], torch.zeros(5)),
            CROSS,
            nn.Linear,
            "got Float; cast the targets: classes are int64, with .long()",
        ),
        ((NUMBERS[0].double(), NUMBERS[1]), CROSS, nn.Linear, "; float64 meets float32: cast one of them"),
        (NUMBERS, CROSS, Both, "model: layers.0 returned tuple with Tensor and dict: return a tensor or a tuple"),
        (NUMBERS, lambda out, to: CROSS(out, to).detach(), nn.Linear, "model.loss returns a loss without a gradient"),
        ((NUMBERS[0][:0], NUMBERS[1][:0]), CROSS, nn.Linear, "no samples in its first batch, inputs of (0, 4)"),
    ],
    ids=["dtype of targets", "dtype of inputs", "outputs", "gradient", "empty"],
)
def test_dtypes_outputs_gradients_and_empty_batches_are_told(data, loss, first, says):
    model = rp.Layers(lambda: [first(4, 8), nn.Linear(8, 3)], loss)
    (fault,) = rp.faults(rp.Run(model=model, data=rp.Batches(lambda *_: data), mesh=rp.Mesh(pp=2)))
    assert says in fault


class Two(nn.Module):
    def forward(self, x):
        return x, x * 2


class Pair(nn.Module):
    """Takes what an nn.Sequential would give it."""

    def forward(self, pair):
        return sum(pair)


class Both(nn.Module):
    def forward(self, x, y):
        return x + y


def of_two(output, target):
    one, other = output
    return nn.functional.mse_loss(one + other, target)


@pytest.mark.parametrize(
    ("fn", "loss", "fault"),
    [
        (
            lambda: [Two(), Pair(), nn.Linear(4, 2)],
            nn.functional.mse_loss,
            r"layers\.1 can't take .*Pair\.forward\(\) takes 2",
        ),
        (
            lambda: [nn.Linear(4, 2), Both()],
            nn.functional.mse_loss,
            r"layers\.1 can't take .*Both\.forward\(\) missing 1",
        ),
        (lambda: [Two(), Both(), nn.Linear(4, 2)], nn.functional.mse_loss, None),
        (lambda: [nn.Linear(4, 2), Two()], of_two, None),
    ],
)
def test_a_tuple_is_an_argument_each_for_the_next_layer_and_one_for_the_loss(fn, loss, fault):
    found = rp.faults(rp.Run(model=rp.Layers(fn, loss), data=rp.Batches(batch), micro_batch_size=3, device="cpu"))
    if fault is None:
        assert found == []
    else:
        assert re.search(fault, found[0]) and "gets each tensor as an argument of its own" in found[0], found


def test_ids_are_whole_numbers():
    data = rp.Batches(lambda *_: (torch.rand(2, 8), torch.zeros(2, 8).long()))
    model = rp.GPT(layers=2, hidden=16, heads=2, seq=8, vocab=11)
    assert rp.faults(rp.Run(model=model, data=data)) == [
        "data.fn returns float32 as token ids: make them int64, with .long()"
    ]


@pytest.mark.parametrize("kind", [Selects, Demands, Slopes])
def test_a_layer_that_takes_data_and_no_zeros_passes(kind):
    assert faults_of(lambda: [kind(), nn.Linear(4, 2)]) == []
    assert faults_of(lambda: [nn.Linear(4, 4), kind(), nn.Linear(4, 2)]) == []


@pytest.mark.parametrize("kind", [Selects, Slopes])
def test_such_a_layer_that_does_not_fit_is_told(kind):
    (fault,) = faults_of(lambda: [nn.Linear(4, 5), kind(), nn.Linear(4, 2)])
    assert fault.startswith("model: layers.1 can't take what layers.0 makes, (3, 5): ")


def test_lengths_in_the_data_are_lengths():
    def ragged(step, microbatch, dp):
        return (torch.randn(6, 4), torch.tensor([1, 2, 3])), torch.tensor([2, 1])

    def parted(out, target):
        return sum(part.mean() for part in out.split(target.tolist()))

    assert faults_of(lambda: [Parts(), nn.Linear(4, 2)], loss=parted, data=ragged) == []


def test_what_the_loss_remembers_of_the_trial_reaches_no_actor():
    loss, shapes = Ema(), []

    def fn():
        return [Notes(), nn.Linear(4, 2)]

    class Notes(nn.Module):
        def forward(self, x):
            shapes.append(x)
            return x

    run = rp.Run(model=rp.Layers(fn, loss), data=rp.Batches(batch))
    trial = TrialRun.of(run)
    look_ahead(Prepared(run, check_launch(run, trial=trial), trial, None))
    assert (loss.mean, shapes) == (None, [])


def test_a_launch_builds_the_layers_once(tmp_path):
    built = tmp_path / "built"

    def fn():
        with built.open("a") as file:
            file.write("x")
        return [nn.Linear(4, 8), nn.Dropout(0.1), nn.Linear(8, 2)]

    run = rp.Run(model=rp.Layers(fn, nn.functional.mse_loss, count=len), data=rp.Batches(batch), mesh=rp.Mesh(pp=2))
    look_ahead(prepared(run, None))
    assert built.read_text() == "x"
    assert rp.faults(run) == []
    assert built.read_text() == "xx"


def test_layers_that_cant_be_copied_are_built_again_for_the_trial():
    class Locked(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.lock = threading.Lock()

        def forward(self, x):
            with self.lock:
                return super().forward(x)

    assert faults_of(lambda: [Locked()]) == []
    (fault,) = faults_of(lambda: [Locked(), nn.Linear(3, 1)])
    assert fault.startswith("model: layers.1 can't take what layers.0 makes")


def test_the_skeleton_stays_without_weights():
    run = rp.Run(model=rp.Layers(misfitting, nn.functional.mse_loss), data=rp.Batches(batch))
    skeleton = Skeleton(run.model, run.seed)
    assert layer_faults(run, skeleton)
    assert all(weight.is_meta for weight in skeleton.weights.values())


def test_a_batch_function_that_fails_or_half_precision_is_not_tried():
    def fails(step, microbatch, dp):
        raise FileNotFoundError("only where the actors are")

    assert faults_of(misfitting, data=fails) == []
    assert faults_of(misfitting, precision=rp.Precision("bf16")) == []


def test_wide_layers_take_no_time():
    start = time.perf_counter()
    wide = lambda: [nn.Linear(4, 1 << 14), nn.Linear(1 << 14, 1 << 14), nn.Linear(1 << 14, 2)]  # noqa: E731
    assert faults_of(wide) == []
    assert time.perf_counter() - start < 5, "shapes have no elements"


@pytest.mark.parametrize(
    ("first", "fault"),
    [
        (lambda: nn.Linear(8, 8), "layers.0 can't take what the text gives, (2, 8): "),
        (lambda: nn.Embedding(100, 8), "Ids count from 0: give the embedding a row for each."),
    ],
)
def test_own_layers_are_tried_on_text(tmp_path, first, fault):
    file = tmp_path / "text.txt"
    file.write_text("a text of plain words, and of some more of them. ü" * 50)
    layers = rp.Layers(lambda: [first(), nn.Linear(8, 256)], loss=lambda x, y: x.float().mean(), seq=8, vocab=256)
    run = rp.Run(model=layers, data=rp.Text(str(file)), microbatches=1)
    (found,) = rp.faults(run)
    assert fault in found


class Twofold(nn.Module):
    def forward(self, x):
        return x, x


class Adds(nn.Module):
    def forward(self, x, *skipped):
        return x + sum(one for one in skipped)


class First(nn.Module):
    def forward(self, x, *rest):
        return x


def test_a_skip_of_several_tensors_is_told():
    run = rp.Run(
        model=rp.Layers(lambda: [Twofold(), First(), Adds()], nn.functional.mse_loss, skips=((0, 2),)),
        data=rp.Batches(lambda *_: (torch.zeros(3, 4), torch.zeros(3, 4))),
    )
    (fault,) = rp.faults(run)
    assert fault.startswith("model: layers.0 returns 2 tensors, and model.skips give its output to a later layer")


def by_repeated_input(output, target):
    x, _ = target
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return slope.square().mean()


class Keeps(nn.Module):
    """Returns its input beside what it makes of it, and wants a gradient of it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 1)

    def forward(self, x):
        x = x.detach().requires_grad_()
        return x, self.inner(x)


class After(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(1, 1)

    def forward(self, x, y):
        return x, self.inner(y).tanh()


def by_kept_input(output, target):
    x, y = output
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return (slope - target).square().mean()


def test_a_derivative_by_what_another_graph_has_is_told():
    def repeated(*_):
        x = torch.ones(3, 4, requires_grad=True)
        return x, (x, torch.zeros(3, 4))

    def plain(*_):
        return torch.ones(3, 4), torch.zeros(3, 4)

    def faults(fn, loss, data, pp):
        mesh = rp.Mesh(pp=pp)
        return rp.faults(rp.Run(model=rp.Layers(fn, loss), data=rp.Batches(data), mesh=mesh, microbatches=2))

    (fault,) = faults(lambda: [nn.Linear(4, 1)], by_repeated_input, repeated, 1)
    assert "takes a derivative by a tensor that its output was not made of" in fault
    assert "inputs and targets are asked for apart" in fault
    assert faults(lambda: [Keeps(), After()], by_kept_input, plain, 1) == []
    (fault,) = faults(lambda: [Keeps(), After()], by_kept_input, plain, 2)
    assert "what a layer of another stage has made" in fault
    assert "give these layers to one stage with split" in fault


class Gathers(nn.Module):
    """As contrastive losses do it: alone, where torch.distributed is not there."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 2)

    def forward(self, x):
        made = self.inner(x)
        if torch.distributed.is_initialized():
            made = torch.cat(torch.distributed.nn.all_gather(made))
        return made


def gathering_loss(output, target):
    if dist.is_available() and dist.is_initialized():
        raise AssertionError("never here")
    return nn.functional.mse_loss(output, target)


@pytest.mark.parametrize(
    ("fn", "loss"), [(lambda: [Gathers()], nn.functional.mse_loss), (lambda: [nn.Linear(4, 2)], gathering_loss)]
)
def test_what_would_gather_of_all_replicas_is_told_where_there_are_several(fn, loss):
    run = rp.Run(model=rp.Layers(fn, loss), data=rp.Batches(batch), mesh=rp.Mesh(dp=2), microbatches=1)
    (fault,) = rp.faults(run)
    assert fault.startswith(f"torch.distributed is not initialized on actors, and {__file__}, line ")
    assert "set mesh.dp to 1" in fault
    assert rp.faults(replace(run, mesh=rp.Mesh(), microbatches=2)) == []
