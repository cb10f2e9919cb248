"""Examples that share sequences: losses and gradients are those of each alone, on every layout. On threads."""

from __future__ import annotations

import pytest
import torch

import raypar as rp
from raypar.actors.data.examples.example_batches import open_sequences
from raypar.actors.specs.results import losses_of, mean_loss
from raypar.config.run import check_run
from raypar.parity.reference import watch_plainly
from tests.support.examples import made_jsonl
from tests.support.team import Team

SIZES = {"layers": 2, "hidden": 16, "heads": 4, "vocab": 256, "seq": 32}
MODELS = {
    "llama": rp.Llama(**SIZES, kv_heads=2),
    "op by op": rp.Llama(**SIZES, kv_heads=2, attention="materialised"),
    "window": rp.Llama(**SIZES, window=5),
    "alibi": rp.GPT(**SIZES, positions="alibi"),
    "learned": rp.GPT(**SIZES),
    "sinusoidal": rp.GPT(**SIZES, positions="sinusoidal"),
}
LAYOUTS = {
    "pp=2": {"mesh": rp.Mesh(pp=2)},
    "pp=2 recomputed": {"mesh": rp.Mesh(pp=2), "recompute": "full"},
    "pp=2 layers recomputed": {"mesh": rp.Mesh(pp=2), "recompute": ("full", "selective")},
    "tp=2 sequence parallel": {"mesh": rp.Mesh(tp=2), "sequence_parallel": True},
    "dp=2 zero 3": {"mesh": rp.Mesh(dp=2), "zero": 3},
    "ring": {"mesh": rp.Mesh(pp=2, cp=2)},
    "all_gather": {"mesh": rp.Mesh(cp=2), "context": "all_gather"},
    "ulysses": {"mesh": rp.Mesh(cp=2), "context": "ulysses"},
    "rsa": {"mesh": rp.Mesh(cp=2), "context": "rsa"},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    sizes = [i % 13 for i in range(16)]
    texts = [chr(97 + i) * (2 + n) + "".join(chr(65 + (i * j) % 26) for j in range(n)) for i, n in enumerate(sizes)]
    return str(made_jsonl(tmp_path_factory.mktemp("examples") / "data.jsonl", [{"text": text} for text in texts]))


def epoch(model, path, *, packing=True, **changes):
    """A run of which each step is an epoch, in two microbatches or replicas."""
    data = rp.Examples(path, packing=packing, val_path=path, cache=str(path) + ".cache")
    count = len(open_sequences(data, 32)[0])
    assert count % 2 == 0
    replicas = changes.get("mesh", rp.Mesh()).dp
    fields = {"microbatches": 2 // replicas, "micro_batch_size": count // 2, "optim": rp.SGD(lr=0.1), "timeout": 20.0}
    return rp.Run(model=model, data=data, **fields | changes)


def taken(run):
    """The loss and the gradients of a step."""
    team = Team.of(run)
    return mean_loss(*losses_of(team.step(0))), team.gradients()


def agree(one, other):
    assert one[0] == pytest.approx(other[0], rel=1e-5)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        torch.testing.assert_close(
            gradient, other[1][name], atol=2e-6, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("name", MODELS)
def test_packed_is_unpacked(name, path):
    packed, apart = (epoch(MODELS[name], path, packing=packing) for packing in (True, False))
    assert packed.micro_batch_size < apart.micro_batch_size
    agree(taken(packed), taken(apart))


@pytest.mark.sampled
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_every_layout(layout, path):
    run = epoch(MODELS["llama"], path, **LAYOUTS[layout])
    agree(taken(run), taken(epoch(MODELS["llama"], path, packing=False)))


def test_without_their_boundaries_examples_see_each_other(path, monkeypatch):
    monkeypatch.setattr("raypar.actors.layers.documents.Documents.turn_to", lambda *_: None)
    packed, apart = (taken(epoch(MODELS["llama"], path, packing=packing)) for packing in (True, False))
    assert abs(packed[0] - apart[0]) > 1e-4


def test_the_plain_process_of_a_parity_check_knows_them(path):
    run = epoch(MODELS["learned"], path, mesh=rp.Mesh(pp=2))
    _, gradients = taken(run)
    plain = watch_plainly(run, 0)
    theirs = {name: gradient for name, gradient in plain.gradients.items() if gradient is not None}
    for name, gradient in theirs.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-6, rtol=1e-5)


def test_layouts_that_can_not_keep_examples_apart_are_told(path):
    run = epoch(rp.GPT(**SIZES), path, mesh=rp.Mesh(cp=2))
    with pytest.raises(rp.ConfigError, match=r"with mesh.cp positions 'learned' count from the sequence's beginning"):
        check_run(run)
    with pytest.raises(rp.ConfigError, match=r"on grids .* attention does not know where examples begin"):
        check_run(epoch(rp.Llama(**SIZES), path, mesh=rp.Mesh(tp="2d:2x2")))
