"""Random initial values are drawn once by the actors that hold parts of them, and have the bits of one process."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial

import pytest
import torch
from torch import nn

from raypar.actors.data_parallel.cut_layout import ReplicaCut
from raypar.actors.errors import ActionError
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.build import build_model
from raypar.actors.models.init.deferred_init import Recording
from raypar.actors.models.transformer import TransformerModel
from raypar.actors.sharding import Pieces, Shard, Sharding
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import GPT, Layers
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.run import Run
from raypar.actors.worker.build.initial_values import Holders, SharedDraws
from raypar.job.start.actor_plans import plans_of
from tests.support import team as team_support
from tests.support.local_groups import FailingGroup, LocalHub, local_groups
from tests.support.team import Team, batch, mse
from tests.support.threads import threads

SMALL = GPT(layers=4, hidden=16, heads=2, seq=8, vocab=256)
TIED = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256, tied=True)
EXPERTS = GPT(layers=2, hidden=16, heads=2, seq=8, vocab=256, moe=MoE(experts=4, top_k=2))


@pytest.fixture
def drawn(monkeypatch):
    """Count the values of each shape that all threads draw, in a model or when a recording is replayed."""
    found, lock = Counter(), threading.Lock()

    def count(shape):
        with lock:
            found[tuple(shape)] += 1

    def in_place(self, name, whole, seed, inner=TransformerModel._drawn):
        count(whole.shape)
        return inner(self, name, whole, seed)

    def replay(self, storages, seed, inner=Recording._replay):
        needed = set(storages)
        for call in reversed(self._calls):
            if call.writes & needed:
                needed |= call.reads
                for shape in [one.shape for one in call.outputs] if call.draws else []:
                    count(shape)
        return inner(self, storages, seed)

    monkeypatch.setattr(TransformerModel, "_drawn", in_place)
    monkeypatch.setattr(Recording, "_replay", replay)
    return found


def values(counts):
    return sum(count * torch.Size(shape).numel() for shape, count in counts.items())


def own_layer():
    """A layer with an orthogonal weight, weights and biases, one that depends on another, and a random buffer."""
    made = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 4))
    made.turned = nn.Parameter(torch.empty(6, 6))
    nn.init.orthogonal_(made.turned)
    made.copied = nn.Parameter(made[2].weight.detach() * 2)
    made.register_buffer("noise", torch.randn(7))
    return made


OWN = Layers(lambda: [own_layer() for _ in range(4)], mse)
RUNS = {
    "2 replicas": (SMALL, Mesh(dp=2)),
    "3 replicas": (SMALL, Mesh(dp=3)),
    "4 replicas": (SMALL, Mesh(dp=4)),
    "pipeline": (SMALL, Mesh(pp=2, dp=2)),
    "context": (SMALL, Mesh(dp=2, cp=2)),
    "tensor": (SMALL, Mesh(tp=2)),
    "tensor and replicas": (SMALL, Mesh(dp=2, tp=2)),
    "grid": (SMALL, Mesh(tp="2d:2x2")),
    "hybrid": (SMALL, Mesh(dp=4, shard=2)),
    "tied": (TIED, Mesh(dp=2)),
    "experts": (EXPERTS, Mesh(dp=2, ep=2)),
    "experts with replicas": (EXPERTS, Mesh(dp=4, ep=2)),
    "experts with tensor ranks": (EXPERTS, Mesh(dp=2, tp=2, ep=2)),
    "folded experts": (EXPERTS, Mesh(dp=2, tp=2, ep=2, etp=1)),
    "own layers": (OWN, Mesh(dp=3)),
    "own layers in a pipeline": (OWN, Mesh(pp=2, dp=2)),
}


def run_of(model, mesh, **changes):
    fields = {"microbatches": 4, "steps": 2} | ({"data": Batches(batch, batch)} if model is OWN else {})
    return Run(model=model, mesh=mesh, **(fields | changes))


def initial(run):
    """All parameters and buffers of a run's model as one process makes them, by name."""
    model = build_model(run.model, run.seed)
    layers = model.materialize(range(len(model.names)), run.seed)
    pairs = zip(model.names, layers, strict=True)
    return {f"{name}.{inner}": p for name, one in pairs for inner, p in [*one.named_parameters(), *one.named_buffers()]}


def demand_initial(team, expected, replica=0):
    for name, weight in team.weights(replica).items():
        assert torch.equal(weight, expected[name]), name
    for actor in team.workers:
        for name, tensor in actor.member.parts.part.fixed().items():
            assert torch.equal(tensor, expected[name]), name


def cases():
    for kind, (_, mesh) in RUNS.items():
        for zero in (1, 2, 3) if mesh.shards > 1 else (0,):
            yield pytest.param(kind, zero, id=f"{kind}-{zero}")


@pytest.mark.parametrize(("kind", "zero"), list(cases()))
def test_values_are_drawn_once_and_are_those_of_one_process(drawn, kind, zero):
    run = run_of(*RUNS[kind], zero=zero)
    expected = initial(run)
    alone = values(drawn)
    if run.model is TIED:
        alone -= 256 * 16  # one process draws the values of both uses
    drawn.clear()
    team = Team.of(run)
    assert values(drawn) <= 1.01 * alone
    demand_initial(team, expected)


def test_without_zero_each_replica_draws_for_its_tensor_group(drawn):
    run = run_of(SMALL, Mesh(dp=2, tp=2), zero=0)
    expected, alone = initial(run), values(drawn)
    drawn.clear()
    team = Team.of(run)
    assert values(drawn) == 2 * alone
    demand_initial(team, expected, replica=1)


@pytest.mark.parametrize("zero", [1, 3])
def test_masters_of_half_precision_are_the_values_themselves(zero):
    run = run_of(SMALL, Mesh(dp=2), zero=zero, precision=Precision("bf16"))
    expected = initial(run)
    for name, weight in Team.of(run).masters().items():
        assert torch.equal(weight, expected[name]), name


def moved(team, op):
    """The bytes that all actors have sent by an operation while they launched."""
    return sum(table[op][1] for table in team.ledger("launch") if op in table)


@pytest.mark.parametrize(("mesh", "zero"), [(Mesh(dp=2), 1), (Mesh(dp=3), 2), (Mesh(dp=2), 3), (Mesh(tp=2), 0)])
def test_a_launch_counts_what_it_sends_by_itself(mesh, zero):
    run = run_of(SMALL, mesh, zero=zero)
    team, members = Team.of(run), mesh.dp * mesh.tp
    sizes = {name: one.numel() for name, one in shapes(build_model(SMALL, 0)).items()}
    divided = {name for name, one in team.all[0].holds().items() if zero == 3 or not one.is_whole} & sizes.keys()
    parts = 4 * sum(sizes[name] for name in divided) * (members - 1) / members
    wholes = 4 * sum(count for name, count in sizes.items() if name not in divided) * (members - 1)
    assert moved(team, "all_to_all") == parts, "to each its part, from who has drawn the tensor"
    assert moved(team, "broadcast") == wholes
    assert not any(team.ledger(axis)[0] for axis in ("dp", "tp")), "these are of steps"


def draws_of(model, members, cuts=None, once=()):
    """The draws of some members, each in its groups."""
    layers = range(len(model.names))
    given = cuts or [{} for _ in members]
    return [
        SharedDraws(model, layers, 0, lambda name, one=one: one, cut, once)
        for one, cut in zip(members, given, strict=True)
    ]


def each(draws, call):
    with threads(len(draws)) as pool:
        return [one.result(30) for one in [pool.submit(call, draw) for draw in draws]]


def shapes(model):
    return {name: one for tensors in model.draws(range(len(model.names))) for name, one in tensors.items()}


def test_tensors_go_round_the_largest_first():
    draws = draws_of(build_model(SMALL, 0), [Holders(None, one) for one in local_groups("dp", 3)])
    (drawers,) = {tuple(one._drawers.items()) for one in draws}
    load = Counter()
    for name, drawer in drawers:
        load[drawer] += draws[0]._tensors[name].numel()
    assert max(load.values()) - min(load.values()) <= SMALL.vocab * SMALL.hidden
    ahead = [(number, len(one._drawn)) for number, one in enumerate(draws)]
    assert ahead == [(0, 0), (1, 0), (2, 0)]
    each(draws, lambda one: [one.part(name, Shard(tuple(like.shape))) for name, like in shapes(one._model).items()][:0])
    assert not any(one._drawn or one._own for one in draws)


class Turned(nn.Module):
    """A parameter whose memory is not in row-major order."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 10).t())


def test_slices_of_scattered_pieces_and_other_orders_of_memory():
    model = build_model(Layers(lambda: [nn.Linear(4, 10), Turned()], mse), 0)
    whole = {name: model.draw({name: like}, 0)[0] for name, like in shapes(model).items()}
    assert whole["layers.1.weight"].stride() == (1, 10)
    pieces = [Sharding({0: Pieces(5, own)}) for own in ((0, 3), (1,), (2, 4))]
    draws = draws_of(model, [Holders(one, None) for one in local_groups("tp", 3)])
    numbers = {id(one): number for number, one in enumerate(draws)}

    def parts(one):
        return {name: one.part(name, Shard(tuple(w.shape), pieces[numbers[id(one)]])) for name, w in whole.items()}

    for sharding, found in zip(pieces, each(draws, parts), strict=True):
        for name, part in found.items():
            expected = sharding.take(whole[name]).clone()
            assert torch.equal(part, expected), name
            assert part.stride() == expected.stride(), name


def test_replicas_get_only_their_spans():
    groups = local_groups("dp", 3)
    model = build_model(Layers(lambda: [nn.Linear(20, 40)], mse), 0)
    cuts = [{"layers.0.weight": ReplicaCut(1, rank, 3)} for rank in range(3)]
    draws = draws_of(model, [Holders(None, one) for one in groups], cuts)
    whole = model.draw({"layers.0.weight": shapes(model)["layers.0.weight"]}, 0)[0]
    found = each(draws, lambda one: one.part("layers.0.weight", Shard((40, 20))))
    for cut, part in zip(cuts, found, strict=True):
        own = cut["layers.0.weight"].shard(whole)
        assert torch.equal(own.take(part), own.take(whole))
    assert [one.spans for one in draws] == [{"layers.0.weight"}] * 3
    sent = sum(entry.bytes for group in groups for entry in group.ledger.entries().values())
    kept = cuts[0]["layers.0.weight"].shard(whole).take(whole)
    assert sent == 4 * (whole.numel() - kept.numel())


def test_trained_weights_that_are_loaded_are_neither_drawn_nor_sent(monkeypatch, drawn):
    monkeypatch.setattr(team_support, "plans_of", partial(plans_of, is_loaded=True))
    team = Team.of(run_of(OWN, Mesh(dp=2), zero=1))
    weights = team.weights()
    assert {name for name, weight in weights.items() if weight.any()} == set()
    assert set(drawn) == {(7,)}, "a buffer may not be in a checkpoint"
    drawn.clear()
    Team.of(run_of(SMALL, Mesh()))
    assert not drawn


def test_a_second_use_of_the_same_memory_is_not_sent():
    groups = local_groups("dp", 2)
    once = ("embed.tokens.weight",)
    draws = draws_of(build_model(SMALL, 0), [Holders(None, one) for one in groups], once=once)
    first, second = each(draws, lambda one: [one.part(once[0], Shard((256, 16))) for _ in range(2)])
    assert torch.equal(first[0], second[0])
    assert [entry.calls for group in groups for entry in group.ledger.entries().values()] == [1, 1]


def test_a_failed_member_ends_the_launch_of_all(monkeypatch):
    hub = LocalHub()
    faults = [{"op": "broadcast", "nth": 2}, {"op": "none", "nth": 1}]
    groups = [FailingGroup(hub, "dp", rank, 2, timeout=5, **fault) for rank, fault in enumerate(faults)]
    monkeypatch.setattr(Team, "_groups", lambda self: [("dp/0", groups)])
    caught = []
    monkeypatch.setattr(
        Team, "each", lambda self, call, inner=Team.each: caught.extend(found := inner(self, call)) or found
    )
    with pytest.raises(ActionError, match="initial values"):
        Team.of(run_of(SMALL, Mesh(dp=2), zero=1))
    assert [type(one) for one in caught] == [ActionError, ActionError]
    assert "dp=0" in str(caught[1])
    assert "dp=1" in str(caught[1])
