"""What can be wrong with a run: everything is found before an actor starts, all at once, and each fault has its fix."""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import raypar as rp
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.data import Batches, Text
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.optim import SGD, AdamW, Muon
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import SEND_WINDOW
from raypar.config import recipe_tables
from raypar.config.conflicts.parallel import idle_fields
from raypar.config.fields import field_faults
from raypar.config.recipe_tables import RECIPES
from raypar.config.recipes import recipe
from raypar.config.run import check_run
from raypar.config.toml import load_run, plain_of, run_of, toml_of
from raypar.errors import ConfigError
from raypar.schedules import ScheduleError, build, check
from raypar.schedules.action import Op


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Enough bytes for short sequences."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("to be or not to be, that is the question\n" * 200)
    return Text(path=str(folder / "a.txt"), cache=str(folder / "cache"))


@pytest.fixture(scope="module")
def tiny(text):
    return replace(recipe("gpt-tiny"), data=text)


def faults_of(run):
    with pytest.raises(ConfigError) as caught:
        check_run(run)
    faults = caught.value.faults
    assert str(caught.value) == (faults[0] if len(faults) == 1 else "\n".join(f"- {fault}" for fault in faults))
    return caught.value.faults


def toml(folder, written):
    path = folder / "run.toml"
    path.write_text(written, encoding="utf-8")
    return path


def toml_faults(folder, written, base=None):
    with pytest.raises(ConfigError) as caught:
        load_run(toml(folder, written), base)
    return caught.value.faults


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_are_right(name, text):
    run = recipe(name)
    check_run(replace(run, data=text, model=replace(run.model, seq=32)))


def test_every_file_of_a_recipe_is_offered():
    assert {file.stem for file in Path(recipe_tables.__file__).with_name("recipe_files").iterdir()} == {*RECIPES}


def test_an_unknown_recipe_is_guessed():
    with pytest.raises(
        ConfigError, match=r"did you mean 'gpt-small'.*known are gpt-tiny, gpt-small, gpt-124m, llama-tiny, llama-small"
    ):
        recipe("gpt-smal")


def test_all_faults_of_a_run_come_at_once(tiny, text):
    check_run(tiny)  # its text is converted: for a run with other faults none is
    run = replace(
        tiny,
        model=GPT(layers=3, hidden=10, heads=4, seq=10**6, vocab=50),
        mesh=Mesh(pp=4, dp=2, tp=0),
        optim=SGD(lr=0, momentum=1, warmup=-1),
        clip=0.0,
        steps=0,
        timeout=-1,
        data=replace(text, val_fraction=0.5),
    )
    wanted = (
        "mesh.tp is 0: it must be at least 1",
        "optim.lr is 0: it must be above 0",
        "optim.warmup is -1: it must be at least 0",
        "optim.momentum is 1: it must be below 1",
        "clip is 0.0: it must be above 0",
        "steps is 0: it must be at least 1",
        "timeout is -1: it must be above 0",
        "model.hidden 10 is not a multiple of model.heads 4: set model.heads to 5, say",
        "4 stages for 3 layers: use 4 layers or more, or set mesh.pp to 3 at most",
        "data.path: the largest token id is 117, but model.vocab is 50",
        "data.val_fraction: 0.5 leaves 4100 of 8200 tokens for training, fewer than one window of model.seq + 1",
    )
    for fault, start in zip(faults_of(run), wanted, strict=True):
        assert fault.startswith(start)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"bucket_mb": 1e308}, "bucket_mb is 1e+308: it must be at most 1e+06"),
        ({"schedule": "1f1f"}, "there is no schedule '1f1f': did you mean '1f1b'"),
        ({"schedule": "forward"}, "has no backward: it can evaluate but not train"),
        ({"schedule": "interleaved", "chunks": 1}, "set chunks to 2 or more, or use '1f1b'"),
        ({"schedule": "gpipe", "chunks": 2}, "gpipe takes at most 1 stage a rank"),
        ({"schedule": "gone.csv"}, "schedule file 'gone.csv' can't be read"),
        ({"schedule": build("1f1b", 4, 4)}, "is for 4 ranks: set mesh.pp to 4"),
        ({"split": (4, 3)}, "split adds up to 7 layers, the model has 8"),
        ({"split": (3, 3, 2)}, "split names 3 stages, the schedule has 2"),
        ({"split": (8, 0)}, "split leaves a stage without layers"),
        (
            {"mesh": Mesh(cp=3)},
            "mesh.cp 3: context 'ring' cuts a sequence into 6 pieces, but model.seq is 32: set model.seq to 30 or 36",
        ),
        ({"mesh": Mesh(tp=3)}, "mesh.tp 3 does not divide model.heads 4: use 3 heads with model.hidden 33 or 6 heads"),
        (
            {"mesh": Mesh(cp=3), "context": "ulysses"},
            "does not divide model.heads 4: use 3 heads with model.hidden 33 or 6 heads",
        ),
        ({"mesh": Mesh(tp=8)}, "mesh.tp 8 does not divide model.heads 4: use 8 heads, or set mesh.tp to 4"),
        (
            {"mesh": Mesh(tp=4), "sequence_parallel": True, "model": GPT(heads=4, seq=30)},
            "sequence_parallel: mesh.tp 4 does not divide model.seq 30: use 28 or 32",
        ),
        (
            {"mesh": Mesh(tp=4), "model": Llama(heads=12, hidden=48, kv_heads=3)},
            "mesh.tp 4, model.kv_heads 3: one must divide the other, use 2 or 4",
        ),
        (
            {"mesh": Mesh(tp=4), "model": Llama(heads=4, ffn=30)},
            "mesh.tp 4 does not divide model.ffn 30: use 28 or 32",
        ),
        ({"mesh": Mesh(tp=2), "data_parallel": "parameter_server"}, "mesh.tp is 2, but servers hold whole weights"),
        (
            {"mesh": Mesh(tp=2), "model": Layers(fn=list, loss=max, seq=8)},
            "mesh.tp is 2, but raypar does not know how to divide your own layers: give Layers(plan=",
        ),
        (
            {"mesh": Mesh(tp=4), "model": GPT(vocab=3, heads=4)},
            "mesh.tp 4 is more than model.vocab 3: set it to 3 at most",
        ),
        (
            {"mesh": Mesh(tp="2d:2x3")},
            "mesh.tp is '2d:2x3': it must be a whole number or a grid of equal sides, as '2d:2x2'",
        ),
        ({"mesh": Mesh(tp="2x2"), "micro_batch_size": 0}, "mesh.tp is '2x2': it must be a whole number or a grid"),
        (
            {"mesh": Mesh(tp="2d:3x3"), "model": GPT(heads=4, hidden=32)},
            "mesh.tp is '2d:3x3', but 3 does not divide model.heads 4: use 3 heads with model.hidden 33 or 6 heads",
        ),
        (
            {"mesh": Mesh(tp="2d:2x2"), "model": Llama(heads=4, hidden=32, kv_heads=1)},
            "mesh.tp is '2d:2x2', but 2 does not divide model.kv_heads 1: set model.kv_heads to 2",
        ),
        (
            {"mesh": Mesh(tp="3d:2x2x2"), "model": GPT(heads=2, hidden=30)},
            "mesh.tp is '3d:2x2x2', but 4 does not divide model.hidden 30: set model.hidden to 28 or 32",
        ),
        (
            {"mesh": Mesh(tp="3d:2x2x2"), "model": Llama(heads=4, hidden=32, ffn=30)},
            "mesh.tp is '3d:2x2x2', but 4 does not divide model.ffn 30: set model.ffn to 28 or 32",
        ),
        (
            {"mesh": Mesh(tp="2d:4x4"), "model": GPT(heads=4, hidden=32, vocab=3)},
            "mesh.tp is '2d:4x4', but model.vocab 3 is less than 4: set model.vocab to 4 at least",
        ),
        (
            {"mesh": Mesh(tp="2.5d:2x2x2"), "micro_batch_size": 6},
            "micro_batch_size is 6, of which mesh.tp '2.5d:2x2x2' can't make 4 equal parts: set it to 4 or 8",
        ),
        (
            {"mesh": Mesh(tp="3d:2x2x2"), "data": Batches(lambda *at: ([[0, 1]] * 6, [[1, 2]] * 6))},
            "data.fn returns 6 samples, of which mesh.tp '3d:2x2x2' can't make 4 equal parts: return 4 or 8",
        ),
        (
            {"mesh": Mesh(tp="2d:2x2"), "sequence_parallel": True},
            "sequence_parallel is True, but mesh.tp is '2d:2x2', which divides norms and dropout already: set",
        ),
        (
            {"mesh": Mesh(tp="2d:2x2"), "data_parallel": "parameter_server"},
            "mesh.tp is '2d:2x2', but servers hold whole weights: set data_parallel to 'all_reduce'",
        ),
        ({"mesh": Mesh(pp=2, ep=2)}, "mesh.ep is 2, which does not divide dp x cp = 1: use 1, say"),
        ({"seed": 1 << 64}, "seed is 18446744073709551616: it must be at most"),
        ({"seed": 10**5000}, "seed is a value of type int that is too long to write: it must be at most"),
        ({"eval_every": 10**5000}, "eval_every is a value of type int that is too long to write: it must be at most"),
        ({"save_every": 10**19}, "save_every is 10000000000000000000: it must be at most 1e+18"),
        ({"unit": "a\nb"}, "unit is 'a\\nb': it must be of characters that can be printed"),
        ({"bucket_mb": 0.0}, "bucket_mb is 0.0: it must be above 0"),
        ({"data_parallel": "zero"}, "data_parallel is 'zero': it must be 'all_reduce' or 'parameter_server'"),
        ({"servers": 2}, "servers is 2, but data_parallel is 'all_reduce': leave servers out, or set"),
        (
            {"servers": 55, "data_parallel": "parameter_server"},
            "servers is 55, but pp=0 has 54 parameters, and each is on one server: use 54 at most",
        ),
        ({"recompute": ("full", "none")}, "recompute has 2 words, the model 8 layers: set recompute to 'full', say"),
        ({"recompute": ("full", "some")}, "recompute.1 is 'some': it must be 'none', 'selective' or 'full'"),
        (
            {"recompute": "selective", "model": Layers(lambda: [torch.nn.Identity()] * 2, loss=max)},
            "recompute is 'selective', but raypar does not know which of your own layers attend: use 'full' or 'none'",
        ),
        ({"data": Text(path="/no/such/file")}, "data.path: '/no/such/file' cannot be read"),
        ({"data": Text(val_fraction=1.0)}, "data.val_fraction: 1.0 is not between 0 and 1"),
        ({"model": Layers(fn=list, loss=max)}, "the model has no sequence length"),
        (
            {"model": Llama(heads=8, kv_heads=3)},
            "model.kv_heads 3 does not divide model.heads 8: set model.kv_heads to 2, say",
        ),
        (
            {"model": Llama(heads=8, kv_heads=9)},
            "model.kv_heads 9 does not divide model.heads 8: set model.kv_heads to 8, say",
        ),
        ({"model": Llama(hidden=12, heads=4)}, "model.positions is 'rope', which turns pairs, but a head has the odd"),
        (
            {"model": GPT(hidden=7, heads=4)},
            "model.hidden 7 is not a multiple of model.heads 4: set model.hidden to 8, say",
        ),
        (
            {"model": Llama(hidden=33, heads=4)},
            "model.hidden 33 is not a multiple of model.heads 4: set model.hidden to 32, say",
        ),
        ({"schedule": "v-half", "chunks": 3}, "v-half takes at most 2 stages a rank"),
        (
            {"model": GPT(hidden=9, heads=4)},
            "model.hidden 9 is not a multiple of model.heads 4: set model.heads to 3, say",
        ),
    ],
)
def test_a_wrong_value_is_named_with_its_fix(tiny, change, says):
    assert any(says in fault for fault in faults_of(replace(tiny, **change)))


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (torch.zeros(2, 4), "data.fn: a batch function must return (inputs, targets), it returned Tensor"),
        ((torch.zeros(2, 4),), "data.fn: a batch function must return (inputs, targets), it returned tuple"),
        (
            (torch.zeros(2, 4), None),
            "data.fn: as targets a batch function returned NoneType: return a tensor or a tuple",
        ),
        (
            (np.zeros((2, 4)), torch.zeros(2)),
            "data.fn: as inputs a batch function returned ndarray: make tensors of arrays with torch.from_numpy",
        ),
    ],
)
def test_a_batch_function_that_returns_no_pair_of_tensors_is_refused(tiny, batch, says):
    model = Layers(lambda: [nn.Linear(4, 4), nn.Linear(4, 4)], loss=max)
    faults = faults_of(replace(tiny, model=model, data=Batches(lambda *_: batch)))
    assert [fault[: len(says)] for fault in faults] == [says]


def test_a_mistake_in_a_batch_function_is_told_with_its_line(tiny):
    def mistaken(step, microbatch, dp):
        return [torch.zeros(2, 4)][microbatch + 1]

    model = Layers(lambda: [nn.Linear(4, 4), nn.Linear(4, 4)], loss=max)
    (fault,) = faults_of(replace(tiny, model=model, data=Batches(mistaken)))
    line = mistaken.__code__.co_firstlineno + 1
    assert fault == f"data.fn fails at {__file__}:{line}, IndexError: list index out of range"


def test_any_exception_of_a_batch_function_is_told_where_actors_run_here(tiny, monkeypatch):
    def absent(step, microbatch, dp):
        raise ValueError("no file today")

    run = replace(tiny, model=Layers(lambda: [nn.Linear(4, 4), nn.Linear(4, 4)], loss=max), data=Batches(absent))
    monkeypatch.setattr("raypar.config.conflicts.batches._is_connected", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (fault,) = faults_of(run)
    assert fault.startswith("data.fn fails at ")
    assert fault.endswith(", ValueError: no file today")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_run(run)


def test_what_has_no_effect_is_told(tiny):
    data = Batches(lambda *_: (torch.zeros(2, 4), torch.zeros(2, 4)))
    idle = [*idle_fields(replace(tiny, steps=5, eval_every=2, data=data, optim=AdamW(warmup=9), context="ulysses"))]
    assert [told.split(":")[0] for told in idle] == [
        "context 'ulysses' has no effect without mesh.cp",
        "eval_every 2 has no effect without Batches(validate=...)",
        "optim.warmup is 9 steps, and steps is 5",
    ]
    (told,) = idle_fields(replace(tiny, sequence_parallel=True))
    assert told.startswith("sequence_parallel has no effect without mesh.tp")
    assert not [*idle_fields(replace(tiny, steps=5, eval_every=2, optim=AdamW(warmup=5)))]
    assert [told.partition(":")[0] for told in idle_fields(replace(tiny, spares=2, snapshot_every=0))] == [
        "spares 2 has no effect without max_failures",
        "snapshot_every 0 has no effect without max_failures",
    ]
    assert not [*idle_fields(replace(tiny, spares=2, snapshot_every=0, max_failures=1))]


def test_a_micro_batch_size_beside_batches_is_told(tiny):
    data = Batches(lambda step, microbatch, dp: (torch.zeros(1, 8), torch.zeros(1, 8)))
    (told,) = idle_fields(replace(tiny, data=data, micro_batch_size=3, eval_every=0))
    assert told.startswith("micro_batch_size 3 has no effect with Batches, whose function decides how many samples")
    assert not [*idle_fields(replace(tiny, micro_batch_size=3))]


@pytest.mark.parametrize(("hidden", "heads", "kv_heads"), [(33, 4, 3), (32, 5, 3), (48, 5, 4), (30, 4, 3), (64, 7, 7)])
def test_fixes_of_heads_work_together(hidden, heads, kv_heads):
    model = Llama(hidden=hidden, heads=heads, kv_heads=kv_heads)
    faults = [*model.faults(lambda *paths: True)]
    assert faults
    for fault in faults:
        if found := re.search(r"set model.hidden to (\d+)", fault):
            model = replace(model, hidden=int(found[1]))
        elif found := re.search(r"set model.heads to (\d+)", fault):
            model = replace(model, heads=int(found[1]))
        elif found := re.search(r"set model.kv_heads to (\d+), say", fault):
            model = replace(model, kv_heads=int(found[1]))
    assert not [*model.faults(lambda *paths: True)], faults


def test_a_text_in_the_place_of_a_model_or_data_is_understood(tiny):
    assert faults_of(replace(tiny, model="gpt-small", data="my.txt", optim="adam")) == [
        "model is 'gpt-small': it must be a GPT or a Llama or a Layers; "
        "rp.recipe('gpt-small') is a run with such a model",
        "data is 'my.txt': it must be a Text or an Examples or a Batches; for text files give rp.Text('my.txt')",
        "optim is 'adam': it must be an AdamW or an SGD or a Muon; such as rp.AdamW(lr=1e-3)",
    ]
    assert faults_of(replace(tiny, model=nn.Linear(2, 2), data=faults_of, precision="bf16")) == [
        "model is Linear(in_features=2, out_features=2, bias=True): it must be a GPT or a Llama or a Layers; "
        "modules of yours are rp.Layers(lambda: [...], loss=...)",
        f"data is {faults_of!r}: it must be a Text or an Examples or a Batches; "
        "a function of yours is rp.Batches(function)",
        "precision is 'bf16': it must be a Precision, such as rp.Precision('bf16')",
    ]
    assert "rp.HF('gpt2') is the model in a folder of Hugging Face" in faults_of(replace(tiny, model="gpt2"))[0]


def test_every_field_that_is_a_function_or_a_dictionary_says_what_a_right_one_looks_like():
    run = Run(model=Layers(5, loss=5), data=Batches(5))
    told, seen = {fault.path: fault.text for fault in field_faults(run)}, set()
    for part, below in ((run, ""), (run.model, "model."), (run.data, "data."), (run.optim, "optim.")):
        for name, hint in get_type_hints(type(part)).items():
            for kind in {Callable, Mapping} & {get_origin(one) for one in (hint, *get_args(hint))}:
                value = 0.5 if below + name == "tile" else 5
                told |= {one.path: one.text for one in field_faults(replace(part, **{name: value}), below)}
                assert "a function, such as " in told[below + name] or "a dictionary, such as {" in told[below + name]
                seen.add(kind)
    assert seen == {Callable, Mapping}
    assert told["model.plan"].endswith("it must be a dictionary, such as {'layers.0': 'column', 'layers.2': 'row'}")


@pytest.mark.parametrize("positions", ["learned", "rope", "alibi"])
def test_batches_longer_than_the_model_are_refused(tiny, positions, monkeypatch):
    def tokens(step, microbatch, dp):
        return torch.zeros(2, 40, dtype=torch.int64), torch.zeros(2, 40, dtype=torch.int64)

    def broken(step, microbatch, dp):
        raise OSError("its files are on the actors' machines")

    model = GPT(layers=8, seq=32, positions=positions)
    long = "returns sequences of 40 tokens, but model.seq is 32: set model.seq to 40"
    assert faults_of(replace(tiny, model=model, data=Batches(tokens, tokens))) == [
        f"data.fn {long}",
        f"data.validate {long}",
    ]
    check_run(replace(tiny, model=replace(model, seq=40), data=Batches(tokens)))
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    check_run(replace(tiny, model=model, data=Batches(broken)))


@pytest.mark.parametrize(
    ("settings", "fault"),
    [
        ({"token_slices": 4}, "token_slices is 4: give 28 or 32 tokens"),
        ({"mesh": Mesh(cp=2)}, "mesh.cp 2 with context 'ring' cuts them into 4 pieces: give 28 or 32 tokens"),
        ({"mesh": Mesh(cp=4), "context": "rsa"}, "mesh.cp 4 with context 'rsa' cuts them into 4 pieces: give 28 or 32"),
    ],
    ids=["slices", "ring", "rsa"],
)
def test_batches_that_can_not_be_cut_are_refused(tiny, settings, fault):
    def tokens(step, microbatch, dp):
        return torch.zeros(2, 30, dtype=torch.int64), torch.zeros(2, 30, dtype=torch.int64)

    run = replace(tiny, model=GPT(layers=8, seq=32, heads=4), data=Batches(tokens), **settings)
    assert [one for one in faults_of(run) if one.startswith(f"data.fn returns sequences of 30 tokens, but {fault}")]
    check_run(replace(run, data=Batches(lambda *_: [part[:, :28] for part in tokens(*_)])))


def test_faults_are_returned_without_raising(tiny):
    assert rp.faults(tiny) == []
    wrong = replace(tiny, steps=0, mesh=Mesh(pp=2, dp=0))
    assert rp.faults(wrong) == faults_of(wrong)
    assert len(rp.faults(wrong)) == 2


def test_a_module_in_place_of_a_function_is_told(tiny):
    model = Layers(nn.Sequential(nn.Linear(2, 2)), loss=nn.functional.mse_loss)
    fix = "give a function that returns a list of modules, lambda: [...]"
    assert f"model.fn is a module, Sequential: {fix}" in rp.faults(replace(tiny, model=model))


def test_layers_that_have_no_sizes_yet_are_told_all_at_once(tiny):
    def layers():
        return [nn.Linear(4, 8), nn.Sequential(nn.LazyLinear(8)), nn.LazyBatchNorm1d(), nn.Linear(8, 2)]

    why = "learns its sizes from its first batch, and actors divide the weights before"
    data = Batches(lambda *_: (torch.zeros(2, 4), torch.zeros(2, 2)))
    assert rp.faults(replace(tiny, model=Layers(layers, nn.functional.mse_loss), data=data)) == [
        f"model.fn: layers.1.0 is a LazyLinear, which {why}: give Linear with its sizes",
        f"model.fn: layers.2 is a LazyBatchNorm1d, which {why}: give BatchNorm1d with its sizes",
    ]


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        (list, "its list has nothing: put one into it"),
        (lambda: [nn.ReLU(), 3], "its list has ReLU, int: make a module of what is none, nn.ReLU() of torch.relu, say"),
        (lambda: 3, "it returns int: return [nn.Linear(4, 1)], say"),
        (lambda: nn.Linear(4, 4), "it returns Linear: put it into a list"),
    ],
)
def test_a_function_that_gives_no_modules_is_told_in_one_sentence(tiny, caplog, layers, says):
    data = Batches(lambda *_: (torch.zeros(2, 4), torch.zeros(2, 2)))
    faults = rp.faults(replace(tiny, model=Layers(layers, nn.functional.mse_loss), data=data))
    assert faults == [f"model.fn must return a list of nn.Modules, one or more, and {says}"]
    assert caplog.text == "", "nothing is said of how else it is built"


def test_layers_that_do_not_fit_the_data_are_among_the_faults(tiny):
    data = Batches(lambda *_: (torch.zeros(2, 3), torch.zeros(2, 4)))
    model = Layers(lambda: [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], torch.nn.functional.mse_loss)
    (fault,) = rp.faults(replace(tiny, model=model, data=data, micro_batch_size=2))
    assert "can't take what data.fn gives, (2, 3)" in fault


@pytest.mark.parametrize("batch", [lambda: 1, lambda step, microbatch: 1])
def test_a_batch_function_takes_three_arguments(tiny, batch):
    assert rp.faults(replace(tiny, data=Batches(batch, batch))) == [
        f"data.{name} can't be called with (step, microbatch, dp): give a function of these three"
        for name in ("fn", "validate")
    ]


@pytest.mark.parametrize(
    ("loss", "says"),
    [
        (torch.nn.MSELoss, "model.loss is a class, MSELoss: give an object of it, MSELoss()"),
        (lambda output: output, "model.loss can't be called with (output, target): give a function of these two"),
    ],
)
def test_a_loss_takes_an_output_and_a_target(tiny, loss, says):
    data = Batches(lambda *_: (torch.zeros(2, 4), torch.zeros(2, 4)))
    model = Layers(lambda: [torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)], loss)
    assert rp.faults(replace(tiny, model=model, data=data)) == [says]
    assert rp.faults(replace(tiny, model=replace(model, loss=torch.nn.MSELoss()), data=data)) == []


def test_an_empty_text_is_refused(tiny, tmp_path):
    (tmp_path / "empty.txt").touch()
    data = Text(path=str(tmp_path / "empty.txt"), cache=str(tmp_path / "cache"))
    assert ["is empty" in fault for fault in faults_of(replace(tiny, data=data))] == [True]


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n0F2\n", "stage 0 is on rank 0 and on rank 2"),
        ("0F0,0B0\n1F0,1B0\n", "is for 1 microbatch: set microbatches to 1"),
        ("0F0,0B0\n1F0,1B0\n2F0,2B0\n", "is for 3 ranks and 1 microbatch: set mesh.pp to 3 and microbatches to 1"),
        ("0B0,0F0\n1F0,1B0\n2F0,2B0\n", "0B0"),
        ("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0,1Q\n", "line 2, column 5: '1Q' is not an action"),
        (
            "0F0,0SEND_F0,0RECV_B0,0B0,0F1,0SEND_F1,0RECV_B1,0B1\n1RECV_F1,1F1,1B1,1SEND_B1,1RECV_F0,1F0,1B0,1SEND_B0\n",
            "deadlock: rank 0, action 2: rank 0 at 0RECV_B0 waits for 1SEND_B0 of rank 1; rank 1 at 1RECV_F1",
        ),
    ],
)
def test_a_wrong_csv_is_refused(tiny, tmp_path, rows, says):
    path = tmp_path / "mine.csv"
    path.write_text(rows)
    assert any(says in fault for fault in faults_of(replace(tiny, schedule=str(path), microbatches=2)))


def test_a_file_that_is_no_csv_is_refused(tiny, tmp_path):
    path = tmp_path / "mine.csv"
    path.write_bytes(b"\xff\xfe0F0")
    assert ["is not a CSV text" in fault for fault in faults_of(replace(tiny, schedule=str(path)))] == [True]


# --- types -----------------------------------------------------------------------------------------------------------


def test_all_wrong_types_come_at_once():
    run = Run(
        model=GPT(hidden=2.5, tied=1),
        mesh=None,
        schedule=3,
        microbatches="8",
        data=Batches(fn=3),
        optim=AdamW(lr=float("nan"), betas=[0.9, 0.95], decay="cos"),
        clip=float("inf"),
        split=(1, 2.0),
        steps=True,
    )
    assert faults_of(run) == [
        "model.hidden is 2.5: it must be a whole number",
        "model.tied is 1: it must be true or false",
        "mesh is None: it must be a Mesh; such as rp.Mesh(pp=2)",
        "schedule is 3: it must be a text or a Schedule; such as '1f1b', or raypar.schedules.Schedule.of('mine', rows)",
        "microbatches is '8': it must be a whole number",
        "data.fn is 3: it must be a function, such as batch, where def batch(step, microbatch, dp): returns (inputs, "
        "targets)",
        "optim.lr is nan: it must be a finite number",
        "optim.decay is 'cos': it must be 'constant', 'cosine', 'linear' or 'wsd'",
        "optim.betas is [0.9, 0.95]: it must be a tuple (in TOML a list)",
        "clip is inf: it must be a finite number",
        "split.1 is 2.0: it must be a whole number",
        "steps is True: it must be a whole number",
    ]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model": GPT}, "model is <class 'raypar.actors.specs.model.GPT'>: it must be a GPT or a Llama or a Layers"),
        ({"data": SGD}, f"data is {SGD}: it must be a Text or an Examples or a Batches"),
        (
            {"data": [1]},
            "data is [1]: it must be a Text or an Examples or a Batches; rp.Batches(batch) are yours, where def batch(",
        ),
        ({"zero": True}, "zero is True: it must be a whole number"),
        ({"zero": 2.0}, "zero is 2.0: it must be a whole number"),
        ({"seed": -1}, "seed is -1: it must be at least 0"),
        ({"save_every": None}, "save_every is None: it must be a whole number; 0 saves only at the end"),
        ({"precision": "bf16"}, "precision is 'bf16': it must be a Precision, such as rp.Precision('bf16')"),
        ({"split": "odd"}, "split is 'odd': it must be 'even' or 'balanced' or a tuple (in TOML a list)"),
        ({"optim": AdamW(betas=(0.9, 0.9, 1))}, "optim.betas is (0.9, 0.9, 1): it must be of 2 at most"),
        ({"timeout": 10**400}, "timeout is 1000"),
        ({"model": GPT(layers=10**9)}, "model.layers is 1000000000: it must be at most 100000"),
    ],
)
def test_a_wrong_type_is_told_in_plain_words(change, says):
    assert any(fault.startswith(says) for fault in faults_of(Run(**{"schedule": "none", **change})))


def test_wrong_types_and_wrong_values_come_together(tiny, text):
    check_run(tiny)  # its text is converted: for a run with other faults none is
    run = replace(
        tiny,
        model=GPT(layers=1, hidden="wide", heads=5, seq=32, vocab=50),
        mesh=Mesh(pp=4, tp="x", dp=2),
        steps=0,
        clip="much",
        recompute="some",
    )
    wanted = [
        "model.hidden is 'wide': it must be a whole number",
        "mesh.tp is 'x': it must be a whole number",
        "clip is 'much': it must be a number",
        "recompute is 'some': it must be 'none', 'selective' or 'full' or a tuple (in TOML a list)",
        "steps is 0: it must be at least 1",
        "4 stages for 1 layer: use 4 layers or more, or set mesh.pp to 1 at most",
        "data.path: the largest token id is 117, but model.vocab is 50",
    ]
    for fault, start in zip(faults_of(run), wanted, strict=True):
        assert fault.startswith(start)


@pytest.mark.parametrize(
    "change", [{"microbatches": 10**7}, {"mesh": Mesh(pp=4 * 10**6), "schedule": "gpipe"}, {"chunks": 10**6}]
)
def test_an_absurd_schedule_is_refused_before_it_is_made(tiny, change):
    fault, *others = faults_of(replace(tiny, **{"schedule": "interleaved", **change}))
    assert fault.endswith("chunks are more than 50000: use smaller numbers")
    assert all("stages for 8 layers" in other for other in others)


ANYTHING = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["even", "gpipe", "none", "full", "cosine", "sgd", "1f1b"]),
    st.lists(st.integers(-1, 9), max_size=4),
    st.lists(st.floats(), max_size=3).map(tuple),
)


def some_of(kind):
    """The dataclass with some of its fields replaced by anything."""
    names = st.sampled_from([field.name for field in fields(kind)])
    return st.dictionaries(names, ANYTHING, max_size=3).map(lambda changes: kind(**changes))


@given(run=some_of(Run), model=some_of(GPT) | some_of(Llama), mesh=some_of(Mesh), optim=some_of(AdamW) | some_of(Muon))
def test_any_run_is_right_or_a_config_error(text, run, model, mesh, optim):
    changed = replace(run, model=replace(model, seq=min(model.seq, 64)) if type(model.seq) is int else model, data=text)
    try:
        programs = check_run(replace(changed, mesh=mesh, optim=optim))
    except ConfigError as error:
        assert error.faults
    else:
        assert programs["train"].lowered


# --- TOML ------------------------------------------------------------------------------------------------------------


def test_a_file_changes_what_it_names(tmp_path):
    run = load_run(
        toml(
            tmp_path,
            """
            recipe = "gpt-tiny"
            schedule = "interleaved"
            split = [2, 2, 2, 2]
            recompute = ["none", "full", "selective", "none", "none", "none", "none", "none"]
            clip = "none"
            timeout = 60
            [model]
            layers = 8
            tied = true
            [optim]
            lr = 0.5
            """,
        )
    )
    base = recipe("gpt-tiny")
    assert run == replace(
        base,
        schedule="interleaved",
        split=(2, 2, 2, 2),
        recompute=("none", "full", "selective", *["none"] * 5),
        clip=None,
        timeout=60,
        model=replace(base.model, layers=8, tied=True),
        optim=replace(base.optim, lr=0.5),
    )


def test_a_file_without_recipe_changes_the_base(tmp_path):
    path = toml(tmp_path, "steps = 7")
    assert load_run(path) == Run(steps=7)
    assert load_run(path, recipe("gpt-tiny")) == replace(recipe("gpt-tiny"), steps=7)


def test_another_optimizer_keeps_the_learning_rate_schedule(tmp_path):
    run = load_run(toml(tmp_path, 'recipe = "gpt-tiny"\n[optim]\nkind = "sgd"\nmomentum = 0.5'))
    assert run.optim == SGD(momentum=0.5, warmup=2, decay="cosine")


def test_another_kind_of_model_keeps_the_sizes(tmp_path):
    run = load_run(toml(tmp_path, 'recipe = "gpt-tiny"\n[model]\nkind = "llama"\nkv_heads = 2\nlayers = 4'))
    assert run.model == Llama(layers=4, hidden=32, heads=4, kv_heads=2, seq=32, dropout=0.1)
    assert run_of({"model": {"kind": "gpt"}}, recipe("llama-tiny")).model == recipe("gpt-tiny").model
    assert toml_faults(tmp_path, '[model]\nkind = "bert"') == ["model.kind is 'bert': use 'gpt' or 'llama'"]


def test_a_field_of_another_kind_is_told_with_its_kinds(tmp_path):
    faults = toml_faults(tmp_path, '[optim]\nkind = "sgd"\nbetas = [0.9, 0.95]\n[model]\nmlp = 4\nffn = 64\n')
    assert faults == [
        "optim.betas is not a field of this kind: set optim.kind to 'adamw'",
        "model.ffn is not a field of this kind: set model.kind to 'llama'",
    ]


def test_all_mistakes_in_a_file_come_at_once(tmp_path):
    faults = toml_faults(
        tmp_path,
        """
        recipe = "gpt-tny"
        step = 5
        seed = 1.5
        mesh = 4
        zzz = 1
        [model]
        hiden = 64
        heads = "4"
        [optim]
        kind = "adam"
        lr = nan
        betas = [0.9]
        [data.path]
        x = 1
        """,
    )
    assert faults == [
        f"there is no recipe 'gpt-tny': did you mean 'gpt-tiny'? known are {', '.join(RECIPES)}",
        "step is not a field: did you mean 'steps'?",
        "mesh is 4: write its fields in a table [mesh]",
        f"zzz is not a field: known are {', '.join(sorted(field.name for field in fields(Run)))}",
        "model.hiden is not a field: did you mean 'hidden'?",
        "optim.kind is 'adam': use 'adamw' or 'sgd' or 'muon'",
        "model.heads is '4': it must be a whole number",
        "data.path is {'x': 1}: it must be a text",
        "optim.lr is nan: it must be a finite number",
        "optim.betas.1 is (0.9,): it must be longer",
        "seed is 1.5: it must be a whole number",
    ]


def test_values_out_of_range_come_with_the_wrong_types_of_a_file(tmp_path):
    assert toml_faults(tmp_path, "steps = 0\nseed = 1.5") == [
        "seed is 1.5: it must be a whole number",
        "steps is 0: it must be at least 1",
    ]
    assert load_run(toml(tmp_path, "steps = 0")).steps == 0  # a flag may set it right


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("steps = 3\nsteps = 4\nseed = 1", "is not TOML (Cannot overwrite a value (at line 2, column 10))"),
        ("steps = 1e", "at line 1"),
        ("steps = " + "9" * 5000, "is not TOML"),
        ("a = " + "[" * 10_000, "nested too deeply"),
    ],
)
def test_what_is_not_toml_is_named_with_its_line(tmp_path, written, says):
    [fault] = toml_faults(tmp_path, written)
    assert says in fault


def test_a_number_that_python_does_not_write_is_told_without_it(tmp_path):
    run = load_run(toml(tmp_path, "steps = 0x" + "f" * 5000))
    with pytest.raises(ConfigError, match="steps is a value of type int that is too long to write"):
        check_run(run)


@pytest.mark.parametrize("part", ["model", "data"])
def test_a_run_of_functions_is_for_python(tmp_path, part):
    """The run folder of one names them, but a name is no function."""
    assert toml_faults(tmp_path, f'[{part}]\nfn = "__main__.fn"\nvalidate = 3') == [
        f"{part}.fn is '__main__.fn': a run with your own functions starts from Python, launch(run, resume=...)"
    ]


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path):
    for path in (tmp_path, tmp_path / "gone.toml", Path("nul\0.toml")):
        with pytest.raises(ConfigError):
            load_run(path)
    (tmp_path / "b.toml").write_bytes(b"steps = 3 # \xff")
    with pytest.raises(ConfigError, match="not TOML"):
        load_run(tmp_path / "b.toml")


FIELDS = sorted(
    {field.name for kind in (Run, GPT, Llama, Mesh, Text, AdamW, SGD, Muon) for field in fields(kind)} | {"recipe"}
)
KEYS = st.sampled_from(FIELDS) | st.text(max_size=6)
VALUES = st.recursive(
    ANYTHING.filter(lambda value: value is not None) | st.datetimes() | st.sampled_from([*RECIPES]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(KEYS, VALUES, max_size=6))
def test_any_table_is_a_run_or_a_config_error(table):
    before = repr(table)
    try:
        run = run_of(table)
    except ConfigError as error:
        assert error.faults
    else:
        assert type(run) is Run
        assert set(table) <= {*FIELDS}
    assert repr(table) == before


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(alphabet="[]{}=.,\"'#\n\t \\x0F1e-_:stepmodl", max_size=60) | st.text(max_size=40))
def test_any_text_is_a_run_or_a_config_error(tmp_path, written):
    try:
        load_run(toml(tmp_path, written.encode("utf-8", "replace").decode()))
    except ConfigError as error:
        assert error.faults


def test_schedule_errors_are_config_errors_of_a_run(tiny):
    with pytest.raises(ScheduleError):
        build("1f1b", 0, 4)
    assert len(faults_of(replace(tiny, schedule="1f1b", mesh=Mesh(pp=0)))) == 1


def test_backwards_may_be_in_halves(tiny, tmp_path):
    path = tmp_path / "zero_bubble.csv"
    path.write_text("0F0,0F1,0I0,0I1,0W0,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n")
    train = check_run(replace(tiny, schedule=str(path), microbatches=2))["train"]
    assert " ".join(map(str, train.rows[1])) == "1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W0 1W1 STEP"


def test_a_run_says_how_backwards_are_split(tiny):
    wide = replace(tiny.model, hidden=1024, heads=4)  # of narrow layers the halves take longer than they spare
    run = replace(tiny, model=wide, mesh=Mesh(pp=2), schedule="1f1b")
    ops = {}
    for backward in ("auto", "whole", "split"):
        train = check_run(replace(run, backward=backward))["train"]
        check(train, send_capacity=SEND_WINDOW)
        ops[backward] = [{action.op for action in row if action.op in (Op.B, Op.I, Op.W)} for row in train.rows]
    assert ops == {"auto": [{Op.B}, {Op.I, Op.W}], "whole": [{Op.B}] * 2, "split": [{Op.I, Op.W}] * 2}
    own = Layers(lambda: [torch.nn.Linear(4, 4) for _ in range(2)], torch.nn.functional.mse_loss)
    plain, run = run, replace(run, data=Batches(lambda *_: (torch.ones(1, 4), torch.ones(1, 4))))
    (fault,) = faults_of(replace(run, backward="split", model=own))
    assert "your own Layers are not to be split: give Layers(halves=True), or let backward be auto or whole" in fault
    assert check_run(replace(run, model=own))["train"] == check_run(replace(plain, backward="whole"))["train"]
    check_run(replace(tiny, backward="split", mesh=Mesh(pp=2, tp="2d:2x2")))
    assert len(faults_of(replace(tiny, backward="half"))) == 1


def test_backward_is_read_from_toml_and_old_files_have_none(tiny, tmp_path):
    assert load_run(toml(tmp_path, 'backward = "split"')).backward == "split"
    assert load_run(toml(tmp_path, "seed = 1")).backward == "auto"
    run = replace(tiny, backward="whole")
    assert run_of(plain_of(run)) == run
    assert toml_faults(tmp_path, 'backward = "half"')


def test_the_check_comes_after_the_last_pass(tiny, monkeypatch):
    """A pass that makes W before its I is found out, whatever it was given."""

    def wrong(schedule, costs, **how):
        row = [action._replace(op=Op.W) if action.op is Op.B else action for action in schedule.rows[1]]
        return replace(schedule, rows=(schedule.rows[0], tuple(row)))

    monkeypatch.setattr("raypar.config.schedule.split_backward", wrong)
    with pytest.raises(ScheduleError, match="has no I of microbatch"):
        check_run(replace(tiny, mesh=Mesh(pp=2)))


def test_replicas_and_servers_need_no_more_than_the_run_has(tiny):
    for changes in ({"mesh": Mesh(dp=3)}, {"data_parallel": "parameter_server", "servers": 54}):
        programs = check_run(replace(tiny, **changes))
        reduced = [action for row in programs["train"].rows for action in row if action.op is Op.REDUCE_GRAD]
        assert len(reduced) == programs["train"].num_stages
        assert not any(action.op is Op.REDUCE_GRAD for row in programs["evaluate"].rows for action in row)
    assert not any(action.op is Op.REDUCE_GRAD for row in check_run(tiny)["train"].rows for action in row)


# --- as plain data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip": None, "chunks": 2, "split": (3, 5), "optim": SGD(lr=0.5), "mesh": Mesh(pp=2, dp=3)},
        {"recompute": ("full", "selective"), "optim": Muon(rates={"embed.*": 0.5, "*": 1}, adamw_lr=0.1)},
        {"keep_last": 3, "zero": 1, "device": "cpu", "data": Text(__file__, val_path="stdlib")},
    ],
)
def test_plain_data_is_read_back_as_the_same_run(name, changes):
    run = replace(recipe(name), **changes)
    plain = plain_of(run)
    assert plain == json.loads(json.dumps(plain, allow_nan=False))
    assert run_of(plain) == run
    assert run_of(plain, replace(run, seed=5, optim=AdamW(lr=9.0))) == run, "nothing is left to what it starts from"


def test_plain_data_has_paths_that_hold_in_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = plain_of(Run(data=Text("a.txt"), folder="b"))
    assert (plain["data"]["path"], plain["folder"]) == (str(tmp_path / "a.txt"), str(tmp_path / "b"))


def test_a_field_that_may_be_a_mapping_is_read_as_it_was_written(tmp_path):
    data = rp.Examples({str(tmp_path / "a.jsonl"): 0.7, str(tmp_path / "b.jsonl"): 0.3})
    run = rp.Run(model=rp.Llama(layers=2, hidden=16, heads=4, vocab=256, seq=32), data=data, tile={"blocks.*.mlp.*": 2})
    again = run_of(tomllib.loads(toml_of(plain_of(run))))
    assert (again.data.path, again.tile) == (data.path, run.tile)


def test_a_plan_is_written_as_pairs():
    run = Run(model=Layers(print, print, plan={"layers.*.up": "column", "layers.*.down": "row"}))
    assert plain_of(run)["model"]["plan"] == [["layers.*.up", "column"], ["layers.*.down", "row"]]
    assert tomllib.loads(toml_of(plain_of(run)))["model"]["plan"] == plain_of(run)["model"]["plan"]
    assert hash(run) == hash(replace(run, model=replace(run.model, plan={}))), "of a run's hash it is no part"


def test_sizes_of_a_wrong_type_are_not_compared(tiny):
    (fault,) = faults_of(replace(tiny, mesh=Mesh(pp=2, dp="x"), zero=1))
    assert fault.startswith("mesh.dp is 'x'")


def test_heads_that_do_not_fit_are_told_once(tiny):
    """A GPT has no heads of keys and values to change."""
    assert len(faults_of(replace(tiny, mesh=Mesh(tp=3)))) == 1
    assert not any("kv_heads" in fault for fault in faults_of(replace(tiny, mesh=Mesh(cp=3), context="ulysses")))


@pytest.mark.parametrize(
    ("options", "mesh", "says"),
    [
        ({"sparse": True}, Mesh(), "layers.0 has sparse gradients, which are not added up and clipped as others are"),
        ({"max_norm": 1.0}, Mesh(dp=2), "layers.0 has max_norm, which changes the weights of one actor alone"),
        ({"max_norm": 1.0}, Mesh(tp=2), "mesh.tp is 2, but raypar does not know how to divide your own layers"),
        ({"max_norm": 1.0}, Mesh(pp=2), None),
    ],
)
def test_embeddings_that_can_not_be_kept_alike_are_refused(tiny, options, mesh, says):
    model = Layers(lambda: [nn.Embedding(8, 4, **options), nn.Linear(4, 8)], loss=max)
    run = replace(tiny, model=model, mesh=mesh, data=Batches(lambda *_: (torch.zeros(2, 4), torch.zeros(2, 4))))
    if says is None:
        check_run(run)
    else:
        assert faults_of(run)[0].startswith(says)
        assert faults_of(replace(run, zero="x", servers=[1], mesh=replace(mesh, dp="y"))), "and no traceback"


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        (
            "column",
            "model.plan is 'column': it must be a dictionary, such as {'layers.0': 'column', 'layers.2': 'row'}",
        ),
        ({"layers.0": 3}, "model.plan['layers.0'] is 3: it must be a text"),
    ],
)
def test_a_plan_of_another_type_is_refused(tiny, plan, says):
    assert faults_of(
        replace(tiny, model=Layers(fn=lambda: [nn.Linear(2, 2), nn.Linear(2, 2)], loss=max, seq=8, plan=plan))
    ) == [says]


def test_plain_data_of_functions_is_refused_and_not_taken_for_something_else():
    plain = plain_of(Run(model=Layers(len, len), data=Batches(len), schedule=build("gpipe", 1, 1)))
    assert plain["model"]["fn"] == "builtins.len"
    with pytest.raises(ConfigError) as caught:
        run_of(json.loads(json.dumps(plain)))
    for path in ("model.fn", "data.fn"):
        assert any(fault.startswith(path) for fault in caught.value.faults)


def test_data_of_a_wrong_type_are_one_fault():
    for data in (5, Batches(5)):
        (fault,) = faults_of(Run(model=Layers(lambda: [torch.nn.Linear(2, 2)], loss=max), data=data))
        assert fault.startswith(("data is 5", "data.fn is 5"))
