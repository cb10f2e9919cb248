"""Users' modules divided by a plan compute what one plain process computes: on threads, without Ray."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from raypar.actors.collective.autograd import copy_to
from raypar.actors.errors import ActionError
from raypar.actors.models.own.user_plan import plan_faults
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.actors.tensor_parallel.sequence import SharedCopy
from raypar.config.run import check_run
from raypar.errors import ConfigError
from raypar.parity.verify import train_plainly
from tests.support.local_groups import local_groups
from tests.support.own_layers import cross_entropy, mse, own_generator, team_of
from tests.support.snapshots import loaded, read
from tests.support.team import Team
from tests.support.tensor_teams import agrees


class Mixer(nn.Module):
    """MLP-Mixer (Tolstikhin et al. 2021, section 2): an MLP over tokens, one over channels: (B, S, D) -> (B, S, D)."""

    def __init__(self, s=5, d=8, tokens=8, channels=12, p=0.0):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(d), nn.LayerNorm(d)])
        self.mlps = nn.ModuleList([
            nn.Sequential(nn.Linear(n, width), nn.GELU(), nn.Dropout(p), nn.Linear(width, n))
            for n, width in ((s, tokens), (d, channels))
        ])  # fmt: skip

    def forward(self, x_BSD):
        x_BSD = x_BSD + self.mlps[0](self.norms[0](x_BSD).mT).mT
        return x_BSD + self.mlps[1](self.norms[1](x_BSD))


MIXER = {
    "layers.*.mlps.*.0": "column",
    "layers.*.mlps.*.2": "dropout",
    "layers.*.mlps.*.3": "row",
    "layers.4": "column_gather_output",
}


def mixer(**sizes):
    return lambda: [nn.Sequential(nn.Linear(3, 8)), *(Mixer(**sizes) for _ in range(3)), nn.Linear(8, 4)]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("tp", "pp", "dp", "zero"), [(2, 1, 1, 0), (4, 1, 1, 0), (2, 2, 1, 0), (2, 2, 2, 0), (2, 1, 2, 1)]
)
def test_every_layout_computes_what_one_process_does(tp, pp, dp, zero):
    agrees(team_of(mixer(), MIXER, tp, pp, dp, zero=zero))


def deep():
    """Two layers in turn that are divided by outputs, and one that takes a part of a whole input."""
    layers = [nn.Linear(3, 8), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.Linear(8, 6), nn.Tanh()]
    return [nn.Sequential(*layers), nn.Linear(6, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 4))]


DEEP = {
    "layers.0.1": "column",
    "layers.0.3": "column_gather_input",
    "layers.0.4": "row",
    "layers.1": "row_split_input",
    "layers.2.1": "row_split_input",
}


@pytest.mark.sampled
@pytest.mark.parametrize(("tp", "pp", "dp"), [(2, 1, 1), (2, 2, 1), (2, 1, 2)])
def test_neighbours_that_are_divided_differently_have_their_input_redistributed(tp, pp, dp):
    agrees(team_of(deep, DEEP, tp, pp, dp))


def test_activations_are_gathered_and_their_gradients_reduce_scattered():
    """For layers.0.3. The two that take their part of a whole input send nothing, and gather its gradient."""
    team = team_of(deep, DEEP, m=1)
    team.step(0)
    sent, rows = team.ledger("tp")[0], 2 * 5
    assert sent["reduce_scatter"] == (1, rows * 6 * 4)
    assert sent["all_gather"] == (3, rows * (6 + 3 + 4) * 4)


def test_an_input_that_is_gathered_or_split_is_of_equal_parts():
    faults = wrong(DEEP, tp=5, fn=deep)
    told = "mesh.tp 5 does not divide layers.0.3's in_features 12, of which an actor gets a part: let what makes them"
    assert any(fault.startswith(told) for fault in faults), faults
    assert any("layers.1's in_features 6, and its input is split into equal parts" in fault for fault in faults)


def test_a_kind_for_an_input_that_is_otherwise_is_refused():
    whole = {"layers.0.1": "column_gather_input", "layers.0.3": "row"}
    assert "is 'column_gather_input' in the plan, but its input is whole on every actor" in failed(deep, whole)


def test_dropout_of_a_part_is_a_part_of_dropout():
    """Every member draws the whole mask. Threads share torch's generator, so one of them is asked."""
    team = team_of(mixer(p=0.4), MIXER)
    layer = team.all[1].stages[0].modules[1].mlps[1][2]
    torch.manual_seed(3)
    part = layer(torch.ones(2, 8, 6))
    torch.manual_seed(3)
    assert torch.equal(part, nn.functional.dropout(torch.ones(2, 8, 12), 0.4)[..., 6:])


@pytest.mark.parametrize("recompute", ["full", ("none", "full", "full", "none", "full")], ids=str)
def test_recomputing_changes_no_bit(recompute):
    weights = []
    for word in ("none", recompute):
        team = team_of(mixer(), MIXER, pp=2, recompute=word)
        team.step(0)
        weights.append(team.weights())
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


class Attention(nn.Module):
    """As users write it: heads by -1, q, k and v of one input, a norm of each head's queries, a frozen scale."""

    def __init__(self, d=16, width=4):
        super().__init__()
        self.width = width
        self.q, self.k, self.v = (nn.Linear(d, d, bias=False) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(width), nn.Linear(d, d)
        self.out.bias.requires_grad_(False)
        self.register_buffer("scale", torch.linspace(1, 2, d).sqrt())

    def forward(self, x_BSD):
        q, k, v = (one(x_BSD).unflatten(-1, (-1, self.width)).transpose(1, 2) for one in (self.q, self.k, self.v))
        core = nn.functional.scaled_dot_product_attention(self.norm(q), k, v)
        return x_BSD + self.scale * self.out(input=core.transpose(1, 2).flatten(-2))


ATTENTION = {"layers.*.[qkv]": "column", "layers.*.norm": "shared", "layers.*.out": "row"}


def tokens(step, microbatch, dp):
    generator = torch.Generator().manual_seed(100 * step + microbatch + 1000 * dp)
    ids = torch.randint(11, (2, 5), generator=generator)
    return ids, ids.roll(1)


def decoder():
    """Tied over layers; the embedding's row for padding gets gradients as a head's only."""
    embedding, head = nn.Embedding(12, 16, padding_idx=7), nn.Linear(16, 12, bias=False)
    head.weight = embedding.weight
    return [embedding, Attention(), Attention(), head]


DECODER = {"layers.0": "embedding", **ATTENTION, "layers.3": "column_gather_output"}


@pytest.mark.sampled
@pytest.mark.parametrize(("tp", "pp", "dp", "zero"), [(2, 1, 1, 0), (4, 2, 1, 0), (2, 2, 2, 1)])
def test_attention_with_tied_embeddings(tp, pp, dp, zero):
    agrees(team_of(decoder, DECODER, tp, pp, dp, loss=cross_entropy, data=tokens, zero=zero))


class Tied(nn.Module):
    """A weight, a module and a list that stand twice in one layer."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight
        self.up = nn.Linear(8, 6)
        self.again, self.down = self.up, nn.Linear(6, 8)
        self.unseen = [self.up]

    def forward(self, ids_BS):
        x_BSD = self.embed(ids_BS)
        for up in (self.up, self.again, *self.unseen):
            x_BSD = x_BSD + self.down(up(x_BSD).tanh())
        return self.head(x_BSD)


def test_what_stands_twice_in_a_layer_stays_one():
    plan = {"layers.0.embed": "embedding", "layers.0.up": "column", "layers.0.down": "row"}
    team = team_of(lambda: [Tied()], plan | {"layers.0.head": "column"}, loss=cross_entropy, data=tokens, m=1)
    layer = team.all[1].stages[0].modules[0]
    assert layer.embed.weight is layer.head.weight
    assert layer.up is layer.again is layer.unseen[0]
    agrees(team_of(tied, plan | {"layers.0.head": "column_gather_output"}, loss=cross_entropy, data=twelve))


def tied():
    layer = Tied()
    layer.embed, layer.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
    layer.head.weight = layer.embed.weight
    return [layer]


def twelve(step, microbatch, dp):
    return tokens(step, microbatch, dp)


def test_what_users_have_put_on_a_module_stays():
    seen = []

    def fn():
        up = nn.Linear(3, 6)
        up.name = "mine"
        up.register_buffer("calls", torch.zeros(1))
        up.register_forward_hook(lambda module, inputs, output: seen.append((module.calls.add_(1), output.shape)))
        return [nn.Sequential(up, nn.Linear(6, 4))]

    team = team_of(fn, {"layers.0.0": "column", "layers.0.1": "row"})
    team.step(0)
    assert [actor.stages[0].modules[0][0].name for actor in team.all] == ["mine", "mine"]
    assert [(float(calls), shape) for calls, shape in seen] == [(2.0, (2, 5, 3))] * 4


def shared_layers():
    """A layer that stands twice, and a part that two layers share."""
    first, second = Mixer(), Mixer()
    second.mlps[0] = first.mlps[0]
    return [nn.Linear(3, 8), first, second, first]


@pytest.mark.parametrize("pp", [1, 2])
def test_layers_that_share_modules(pp):
    plan = {"layers.*.mlps.*.0": "column", "layers.*.mlps.*.3": "row"}
    agrees(team_of(shared_layers, plan, pp=pp, loss=lambda out, t: mse(out[..., :4], t)))


def test_shares_may_be_uneven_and_values_may_be_divided_between_stages():
    """Seven features on four members, over a boundary of stages."""

    def fn():
        return [nn.Linear(3, 7), nn.Sequential(nn.Tanh(), nn.Linear(7, 4))]

    agrees(team_of(fn, {"layers.0": "column", "layers.1.1": "row"}, tp=4, pp=2))


def looks(w):
    return bool((w > 0).any())


def without_meta():
    layers = decoder()
    looks(layers[1].q.weight)
    return layers


def drawn():
    layers = decoder()
    own_generator(layers[2].q.weight)
    return layers


HELD = decoder()


@pytest.mark.parametrize("fn", [decoder, without_meta, drawn, lambda: HELD], ids=["meta", "real", "generator", "made"])
def test_weights_have_the_bits_of_the_whole_model(fn):
    team = team_of(fn, DECODER, tp=4, loss=cross_entropy, data=tokens)
    found, wanted = team.weights(), train_plainly(replace(team.run, steps=0)).weights
    assert found.keys() == wanted.keys()
    assert all(torch.equal(weight, wanted[name]) for name, weight in found.items())
    for actor in team.all:
        *_, attention, head = actor.stages[0].modules
        assert torch.equal(attention.scale, torch.linspace(1, 2, 16).sqrt())
        assert not attention.out.bias.requires_grad
        assert (attention.q.weight.shape, head.weight.shape, head.out_features) == ((4, 16), (3, 16), 3)
        assert attention.q.weight.untyped_storage().nbytes() == 4 * 4 * 16, "nothing of the others' stays"
        assert team.run.model.plan == DECODER


def test_a_step_sends_what_the_textbook_says():
    """An attention: one all_reduce forward and one backward, q, k and v together; of b*s*h elements. The embedding's
    forward, and the head's backward and gathered logits; the norm's, and what is shared, once a step."""
    tp, m, attentions, wide, vocab = 4, 3, 2, 2 * 5 * 16 * 4, 12
    team = team_of(decoder, DECODER, tp, m=m, loss=cross_entropy, data=tokens)
    team.step(0)
    ring, squares = 2 * (tp - 1), 2 * 21 + 2 * attentions  # two sums, and those that members compare: norms'
    shared = attentions * 2 * 4 * 4
    sums = m * (2 * attentions + 2), m * (2 * attentions + 2) * wide
    gathered = m, m * (tp - 1) * 2 * 5 * (vocab // tp) * 4
    assert (
        team.ledger("tp")
        == [{"all_reduce": (sums[0] + 2, ring * (sums[1] + shared + squares * 8) // tp), "all_gather": gathered}] * tp
    )


@pytest.mark.sampled
@pytest.mark.parametrize(("here", "there"), [(1, 2), (2, 1), (2, 4)])
def test_another_number_of_parts_reads_what_was_written(here, there, tmp_path):
    first, second = (team_of(decoder, DECODER, tp, loss=cross_entropy, data=tokens) for tp in (here, there))
    first.step(0)
    written = read(first, tmp_path / "a")
    read(loaded(second, tmp_path / "a", written[1]), tmp_path / "b")
    again = read(second, tmp_path / "b")
    assert written[0].keys() == again[0].keys()
    assert all(torch.equal(tensor, again[0][name]) for name, tensor in written[0].items())


# --- what is entered ---


def test_layers_that_are_given_the_same_tensor_enter_once():
    (group,) = local_groups("tp", 1)
    entrance = SharedCopy(lambda x: copy_to(x, group))
    x = torch.ones(3, requires_grad=True)
    assert entrance(x) is entrance(x)
    with torch.no_grad():
        assert (without := entrance(x)).grad_fn is None
    assert entrance(x) is not without, "history is not lost"
    y = x * 2
    before = entrance(y)
    y.add_(1)
    assert entrance(y) is not before, "it was written into"
    assert torch.equal(entrance(y), y)
    z = torch.ones(3)
    first = entrance(z)
    assert entrance(z.requires_grad_()) is not first


# --- what is wrong ---


def wrong(plan, tp=2, fn=decoder, **changes):
    run = Run(model=Layers(fn, cross_entropy, plan=plan), data=Batches(tokens))
    with pytest.raises(ConfigError) as caught:
        check_run(replace(run, mesh=replace(run.mesh, tp=tp), **changes))
    return list(caught.value.faults)


def odd():
    plain = decoder()[1:3]
    extra = nn.Linear(8, 8)
    extra.gain = nn.Parameter(torch.ones(8))
    return [*plain, extra, nn.Embedding(8, 8, scale_grad_by_freq=True), nn.Linear(8, 3), nn.Dropout(0.1)]


@pytest.mark.parametrize(
    ("fn", "plan"),
    [
        (lambda: [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)], {"layers.0": "column_gather_output"}),
        (lambda: [nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))],
         {"layers.1.0": "column", "layers.1.2": "row"}),
        (decoder, {"layers.1.q": "column_gather_output"}),
        (lambda: [nn.Sequential(nn.Conv1d(1, 1, 1), nn.Flatten()), nn.Linear(8, 3)], {"layers.1": "row_split_input"}),
        (lambda: [nn.Embedding(8, 3), nn.Linear(3, 5)], {"layers.0": "embedding"}),
    ],
)  # fmt: skip
def test_a_plan_to_give_is_one_that_can_be_given(fn, plan):
    (fault,) = [fault for fault in wrong({}, fn=fn) if fault.startswith("mesh.tp")]
    assert f"give Layers(plan={json.dumps(plan)}), say, or set it to 1" in fault
    run = Run(model=Layers(fn, cross_entropy, plan=plan), data=Batches(tokens))
    assert not [*plan_faults(plan, Skeleton(run.model, 0).layers, 2)]


def test_layers_that_no_plan_divides_are_told_so():
    (fault,) = wrong({}, fn=lambda: [nn.Conv1d(1, 1, 1), nn.Linear(3, 3)])
    assert fault.endswith(
        "a plan divides modules of type nn.Linear and nn.Embedding, and none of yours by 2: set it to 1"
    )


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({}, 'mesh.tp is 2, but raypar does not know how to divide your own layers: give Layers(plan={"layers.'),
        ({"layers.0.q": "colum"}, "model.plan: 'layers.0.q' is 'colum', which is no kind: use 'column'"),
        (
            {"layers.0.q": "x"},
            "is 'x', which is no kind: use 'column' or 'row' or 'column_gather",
        ),
        ({"layers.*.attn.q": "column"}, "'layers.*.attn.q' names no module: use 'layers.*.q'"),
        ({"layers.9.q": "column"}, "'layers.9.q' names no module: use 'layers.*.q'"),
        (
            {"layers.*": "column"},
            "'layers.*' is 'column', but layers.0 is a Attention: name an nn.Linear, inside of it",
        ),
        ({"layers.0.q": "embedding"}, "layers.0.q is a Linear: name an nn.Embedding"),
        ({"layers.0.q": "dropout"}, "layers.0.q is a Linear: name an nn.Dropout"),
        ({"layers.2": "column"}, "layers.2 has the parameter 'gain': leave it out of the plan"),
        ({"layers.3": "embedding"}, "layers.3 has scale_grad_by_freq, which counts ids that other actors have"),
        (
            {"layers.0": "shared", "layers.0.q": "column"},
            "layers.0 is 'shared', but layers.0.q in it is 'column'",
        ),
        ({"layers.*.q": "column", "layers.0.[qk]": "row"}, "'layers.0.[qk]' names layers.0.q, which another pattern"),
        (
            {"layers.4": "column_gather_output"},
            "mesh.tp 2 does not divide layers.4's out_features 3, and its outputs",
        ),
    ],
)
def test_a_wrong_plan_is_named_with_its_fix(plan, says):
    assert any(says in fault for fault in wrong(plan, fn=odd)), wrong(plan, fn=odd)


def test_all_faults_at_once():
    plan = {"layers.0": "embeding", "layers.*.[qkv]": "column", "layers.*.o": "row"}
    faults = wrong(plan, tp=32, sequence_parallel=True)
    assert len(faults) == 9
    told = "sequence_parallel is True, but raypar does not know where the sequence of own layers is"
    assert f"{told}: set sequence_parallel to False, or take a GPT or Llama" in faults
    assert (
        "mesh.tp is 32, but layers.1.q has out_features 16: set it to 16 at most, or leave it out of the plan" in faults
    )


def test_dropout_of_uneven_parts_is_refused():
    assert wrong(MIXER, tp=4, fn=mixer(channels=14))[0] == (
        "mesh.tp 4 does not divide layers.1.mlps.1.0's out_features 14, and the plan has dropout of equal parts: "
        "use 12 or 16, or leave it out of the plan"
    )


@pytest.mark.parametrize(
    ("plan", "how"),
    [
        ({"layers.0": "embedding"}, "divided along dim 0 and not divided"),
        ({"layers.0": "embedding", "layers.3": "row"}, "divided along dim 0 and divided along dim 1"),
        ({"layers.0": "shared"}, "shared and not divided"),
        ({"layers.0": "split1"}, "shared and not divided"),
    ],
)
def test_both_ends_of_a_tied_weight_are_divided_alike(plan, how):
    assert wrong(plan) == [
        f"model.plan: layers.0.weight and layers.3.weight are one weight, but it is {how}: divide both alike, an "
        "embedding by ids and a linear layer by columns, say"
    ]


def test_a_plan_is_looked_at_before_anything_is_divided():
    """A run is written with tp=1 first."""
    (fault,) = wrong({"layers.*.up": "column"}, tp=1)
    assert fault.startswith("model.plan: 'layers.*.up' names no module: use 'layers.*.out'")


def failed(fn, plan, **changes):
    team = team_of(fn, plan, **{"loss": lambda out, t: mse(out[..., :4], t)} | changes)
    errors = team.each(lambda actor: actor.train(0))
    assert all(isinstance(error, ActionError) for error in errors)
    return str(next(error for error in errors if not error.secondary))


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"layers.1.0": "column"}, "0F0 failed: RuntimeError: mat1 and mat2 shapes"),
        ({"layers.1.0": "column"}, "of what a column linear layer makes, an actor has only a part: view it with -1"),
        ({"layers.1.2": "row"}, "layers.1.2 of 6 inputs has 3 of them here and is given 6"),
        (
            {"layers.1.0": "column", "layers.1.2": "row"},
            "STEP failed: ValueError: the gradient of layers.1.1.weight",
        ),
    ],
)
def test_a_plan_that_forgets_something_is_noticed(plan, says):
    def fn():
        return [nn.Linear(3, 8), nn.Sequential(nn.Linear(8, 6), nn.PReLU(), nn.Linear(6, 8))]

    assert says in failed(fn, plan)


class Dropping(nn.Module):
    """Dropout before, inside and behind an MLP, which stands beside a residual."""

    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.before, self.inside, self.behind = nn.Dropout(0.1), nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x):
        hidden = torch.relu_(self.up(self.before(self.norm(x))))
        return x + self.behind(self.down(self.inside(hidden)))


UP_DOWN = {"layers.1.up": "column", "layers.1.down": "row"}


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({}, "layers.1.inside is a dropout whose input is divided over tp, and every actor would use the same mask"),
        (
            {"layers.1.inside": "dropout", "layers.1.behind": "dropout"},
            "layers.1.behind is 'dropout' in the plan, but its input is whole on every actor of tp: leave",
        ),
        (
            {"layers.1.inside": "dropout", "layers.1.norm": "shared"},
            "layers.1.norm is 'shared' in the plan, but its input is whole on every actor of tp: leave it out",
        ),
    ],
)
def test_a_plan_that_names_what_is_whole_or_forgets_what_is_not_is_noticed(plan, says):
    def fn():
        return [nn.Linear(3, 8), Dropping()]

    assert says in failed(fn, UP_DOWN | plan, recompute="none")
    assert says in failed(fn, UP_DOWN | plan, recompute="full")


def test_a_model_that_ends_in_a_part_is_noticed():
    def fn():
        return [nn.Linear(3, 8), nn.Sequential(nn.Tanh(), nn.Linear(8, 8))]

    says = "the loss is computed from outputs that are divided over tp: end the model with a module that the plan"
    assert says in failed(fn, {"layers.1.1": "column"}, loss=lambda out, t: out.pow(2).mean())


def test_dropout_of_wholes_and_parts_in_one_layer():
    """Threads share a generator, so that without dropout weights agree, and with it nobody complains of the plan."""

    def fn():
        return [nn.Linear(3, 8), Dropping()]

    team = team_of(fn, UP_DOWN | {"layers.1.inside": "dropout"}, loss=lambda out, t: mse(out[..., :4], t))
    stage = team.all[0].stages[0]
    assert type(stage.modules[1].inside) is not nn.Dropout
    assert type(stage.modules[1].before) is type(stage.modules[1].behind) is nn.Dropout
    errors = team.each(lambda actor: actor.train(0))
    assert not any("dropout" in str(error) for error in errors if isinstance(error, Exception))


# --- what only the user's own code could tell ---

BOTH = {"layers.*.up": "column", "layers.*.down": "row"}


class Pair(nn.Module):
    """Two linear layers, to the first of which something has been done."""

    def __init__(self, change):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        change(self)

    def forward(self, x):
        return self.down(self.up(x).tanh())


def hooked(pair):
    pair.up.weight.register_hook(lambda gradient: gradient / 2)


def hooked_backward(pair):
    pair.up.register_full_backward_hook(lambda *_: None)


def compiled(pair):
    pair.up = torch.compile(nn.Linear(4, 6))


HOOKS = "has hooks on gradients, of which each actor would see a part: leave it out of the plan, or the hooks"
COMPILED = "is inside of what torch.compile made, which keeps the whole module: compile nothing that the plan names"


@pytest.mark.parametrize(
    ("change", "name", "says"),
    [(hooked, "up", HOOKS), (hooked_backward, "up", HOOKS), (compiled, "up._orig_mod", COMPILED)],
)
def test_what_would_be_lost_or_see_a_part_is_refused(change, name, says):
    plan = {f"layers.*.{name}": "column", "layers.*.down": "row"}
    (fault,) = wrong(plan, fn=lambda: [Pair(change)])
    assert fault == f"model.plan: 'layers.*.{name}' is 'column', but layers.0.{name} {says}"


def test_a_module_of_several_layers_is_named_in_all_of_them():
    def fn():
        one, other = Pair(lambda _: None), Pair(lambda _: None)
        other.up = one.up
        return [one, other]

    (fault,) = wrong({"layers.0.up": "column", "layers.*.down": "row"}, fn=fn)
    assert fault == "model.plan: layers.0.up is 'column', and it is layers.1.up, too: name it there as well"


def in_a_closure(pair):
    up = pair.up
    pair.call = lambda x: up(x)


def in_a_nested_list(pair):
    pair.nested = [[pair.up]]


def reads_values(pair):
    """The model can't be built without its weights."""
    in_a_closure(pair)
    pair.scale = float(pair.up.weight.sum())


@pytest.mark.parametrize("change", [in_a_closure, in_a_nested_list, reads_values])
def test_a_reference_that_can_not_be_replaced_is_told(change):
    with pytest.raises(ValueError, match="refers to one of its own modules or weights through a closure"):
        Team(lambda: [Pair(change)], 1, 1, tp=2, model=Layers(lambda: [Pair(change)], mse, plan=BOTH))


def softmaxed(pair):
    pair.up.register_forward_hook(lambda module, inputs, output: output.softmax(-1))


def test_a_users_hook_sees_what_was_gathered():
    plan = {"layers.*.up": "column_gather_output"}
    teams = [
        Team(lambda: [Pair(softmaxed)], 1, 2, tp=tp, model=Layers(lambda: [Pair(softmaxed)], mse, plan=plan))
        for tp in (1, 2)
    ]
    one, two = (team.step(0)[0].losses for team in teams)
    assert two == pytest.approx(one, rel=1e-6)
