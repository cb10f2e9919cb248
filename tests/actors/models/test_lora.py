"""Low-rank adapters learn in the place of a model's weights, as a plain process computes them, on every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.actors.models.build import build_model
from raypar.actors.specs.lora import is_adapter
from raypar.actors.specs.results import losses_of, mean_loss
from raypar.config.toml import load_run, plain_of, toml_of
from raypar.planner.sizes.sized_run import counts_of
from tests.support.hugging_face import VOCAB, some_ids
from tests.support.team import Team

SIZES = {"layers": 2, "hidden": 16, "heads": 4, "vocab": VOCAB, "seq": 12}
LLAMA = rp.Llama(**SIZES, kv_heads=2, lora=rp.Lora(rank=3))
MODELS = {
    "llama": LLAMA,
    "one head of keys": replace(LLAMA, kv_heads=1),
    "gpt": rp.GPT(**SIZES, qkv_bias=True, tied=True, lora=rp.Lora(rank=2, alpha=5.0)),
    "attn": replace(LLAMA, lora=rp.Lora(rank=3, targets="attn")),
    "mlp": replace(LLAMA, lora=rp.Lora(rank=3, targets="mlp")),
    "q and v": replace(LLAMA, lora=rp.Lora(rank=3, targets=("q", "v"))),
    "some": replace(LLAMA, lora=rp.Lora(rank=3, targets=("out", "up", "down"))),
    "experts": replace(LLAMA, moe=rp.MoE(experts=4), lora=rp.Lora(rank=3, targets="attn")),
}
LAYOUTS = {
    "pp=2": {"mesh": rp.Mesh(pp=2)},
    "zero bubble": {"mesh": rp.Mesh(pp=2), "schedule": "zb-h1"},
    "recomputed": {"mesh": rp.Mesh(pp=2), "recompute": "full"},
    "tp=2": {"mesh": rp.Mesh(tp=2)},
    "pp=2 tp=2 sequence parallel": {"mesh": rp.Mesh(pp=2, tp=2), "sequence_parallel": True},
    "cp=2": {"mesh": rp.Mesh(cp=2)},
    **{f"zero {level}": {"mesh": rp.Mesh(dp=2), "zero": level} for level in range(4)},
}


def batch(step, microbatch, dp):
    ids = some_ids(step)[2 * (microbatch + dp) : 2 * (microbatch + dp) + 2]
    return ids, torch.roll(ids, -1, 1)


def team_of(model, **changes):
    fields = {"data": rp.Batches(batch, batch), "microbatches": 2, "optim": rp.AdamW(lr=1e-2), "timeout": 20.0}
    fields["microbatches"] //= changes.get("mesh", rp.Mesh()).dp
    return Team.of(rp.Run(model=model, clip=None, **fields | changes))


def taken(model, **changes):
    """The losses of three steps, the gradients of the third, and the weights."""
    team = team_of(model, **changes)
    losses = [mean_loss(*losses_of(team.step(number))) for number in range(3)]
    return losses, team.gradients(), team.weights()


@pytest.mark.sampled
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_products_that_are_added_to_the_weights(name):
    model = MODELS[name]
    team = team_of(model, optim=rp.SGD(lr=0.5))
    team.step(0)  # from now on the second halves are not 0
    weights = team.weights()
    team.step(1)
    found = {key: value for key, value in team.gradients().items() if value is not None}
    assert found.keys() == {key for key in weights if is_adapter(key)}
    adapters = {key: weights[key].clone().requires_grad_() for key in found}
    built = build_model(replace(model, lora=None), 0)
    layers = built.materialize(range(len(built.names)), 0)
    merged = {}
    for layer, module in zip(built.names, layers, strict=True):
        for inner, parameter in module.named_parameters():
            whole = f"{layer}.{inner}"
            key = f"{whole.removesuffix('.weight')}_lora"
            if f"{key}.a.weight" in adapters:
                added = adapters[f"{key}.b.weight"] @ adapters[f"{key}.a.weight"]
                merged[whole] = parameter.detach() + model.lora.scale * added
    ties = dict(map(reversed, built.ties))
    every = {f"{n}.{i}": p.detach() for n, m in zip(built.names, layers, strict=True) for i, p in m.named_parameters()}
    total = 0
    for microbatch in range(2):
        ids, labels = batch(1, microbatch, 0)
        x = (ids,)
        for layer, module in zip(built.names, layers, strict=True):
            inside = {
                inner: merged.get(f"{layer}.{inner}", every[ties.get(f"{layer}.{inner}", f"{layer}.{inner}")])
                for inner, _ in module.named_parameters()
            }
            x = (torch.func.functional_call(module, inside, x),)
        total = total + built.loss(x, (labels,)) / 2
    if model.moe is None:  # experts have a loss of their own
        gradients = torch.autograd.grad(total, [*adapters.values()])
        for key, gradient in zip(adapters, gradients, strict=True):
            torch.testing.assert_close(
                found[key], gradient, atol=2e-6, rtol=1e-4, msg=lambda text, k=key: f"{k}: {text}"
            )


@pytest.mark.sampled
@pytest.mark.each_value
@pytest.mark.parametrize("name", ["llama", "one head of keys", "gpt", "q and v", "some"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_learns_the_same(layout, name):
    losses, gradients, weights = taken(MODELS[name])
    others = taken(MODELS[name], **LAYOUTS[layout])
    assert others[0] == pytest.approx(losses, rel=1e-5)
    for mine, theirs in ((gradients, others[1]), (weights, others[2])):
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            if value is None:
                assert theirs[key] is None
            else:
                torch.testing.assert_close(theirs[key], value, atol=1e-5, rtol=1e-3, msg=lambda t, k=key: f"{k}: {t}")


@pytest.mark.sampled
@pytest.mark.parametrize("layout", ["pp=2 tp=2 sequence parallel", *(f"zero {level}" for level in range(4))])
def test_what_is_frozen_stays_bit_by_bit_and_costs_no_gradients(layout):
    team = team_of(LLAMA, **LAYOUTS[layout])
    before = {key: value.clone() for key, value in frozen_of(team).items()}
    team.step(0)
    assert before and all(torch.equal(value, before[key]) for key, value in frozen_of(team).items())
    assert sum(is_adapter(key) for key in team.weights()) == 28 == len(team.weights())


def frozen_of(team):
    """The weights of all actors that nothing changes."""
    return {
        (rank, name): value
        for rank, actor in enumerate(team.all)
        for stage in actor.stages.values()
        for name, value in stage.state()
        if not is_adapter(name)
    }


def test_the_ledger_of_replicas_has_the_bytes_of_adapters_only():
    team = team_of(LLAMA, mesh=rp.Mesh(dp=2))
    team.step(0)
    adapters = sum(value.numel() * 4 for value in team.weights().values())
    sent = sum(count for _, count in team.ledger("dp")[0].values())
    assert adapters <= sent < 1.05 * adapters + 300, "the rest is the vote of the step"


def test_what_can_have_no_adapters_is_told():
    run = rp.Run(model=replace(LLAMA, moe=rp.MoE(experts=4)))
    assert "model.lora.targets is 'all', and experts have no adapters: use 'attn'" in rp.faults(run)[0]
    run = rp.Run(model=replace(LLAMA, vocab=256), mesh=rp.Mesh(tp="2d:2x2"), tile=4)
    told = [fault for fault in rp.faults(run) if fault.startswith("model.lora")]
    assert [("grid" in fault, "tile" in fault) for fault in told] == [(True, False), (False, True)]


def test_a_rank_that_no_layer_has_is_told():
    model = rp.Llama(layers=2, hidden=16, heads=4, vocab=256, seq=8)
    assert not rp.faults(rp.Run(model=replace(model, lora=rp.Lora(rank=16))))
    (fault,) = rp.faults(rp.Run(model=replace(model, lora=rp.Lora(rank=17))))
    assert fault.startswith(
        "model.lora.rank is 17, and a layer's inputs or outputs are 16, so no layer has that rank: use"
    )


@pytest.mark.sampled
@pytest.mark.parametrize("name", ["llama", "one head of keys", "gpt", "attn", "mlp"])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_planner_counts_what_actors_hold(name, tp):
    team = team_of(MODELS[name], mesh=rp.Mesh(pp=2, tp=tp))
    schedule = team.programs["train"]
    counts = counts_of(team.run, schedule, None)
    for pp in range(2):
        actor = team.all[pp * tp]
        held = sum(parameter.numel() for stage in actor.stages.values() for parameter in stage.parameters().values())
        assert counts.held[pp] == held
        every = sum(value.numel() for stage in actor.stages.values() for _, value in stage.state())
        assert counts.frozen[pp] == every - held


@pytest.mark.parametrize(
    ("model", "targets", "says"),
    [
        (rp.Llama(), (), "name one layer at least, and each once"),
        (rp.Llama(), ("q", "q"), "name one layer at least, and each once"),
        (rp.GPT(), ("gate", "up"), "a GPT's MLP has up and down alone: leave out 'gate'"),
        (rp.Llama(moe=rp.MoE(experts=4)), ("q", "up"), "experts have no adapters: use 'attn'"),
    ],
)
def test_names_of_layers_that_are_none_are_told(model, targets, says):
    (fault,) = rp.faults(rp.Run(model=replace(model, lora=rp.Lora(targets=targets))))
    assert says in fault


def test_any_layers_by_name_are_taken_from_files(tmp_path):
    run = rp.Run(model=replace(LLAMA, lora=rp.Lora(targets=("q", "v"))))
    (tmp_path / "run.toml").write_text(toml_of(plain_of(run)))
    assert load_run(tmp_path / "run.toml").model.lora.targets == ("q", "v")
