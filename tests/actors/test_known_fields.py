"""An unknown field of a description says the nearest one; the dataclass stays one in every other way."""

import copy
import inspect
import pickle
from dataclasses import dataclass, fields, replace

import pytest

import raypar as rp
from raypar.actors.known_fields import known_fields
from raypar.config.fields import field_faults


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: rp.GPT(hiden=3), "GPT has no field 'hiden': did you mean hidden?"),
        (lambda: rp.Llama(hiden=3), "Llama has no field 'hiden': did you mean hidden?"),
        (lambda: rp.Run(microbatch=3), "Run has no field 'microbatch': did you mean microbatches?"),
        (
            lambda: rp.Mesh(pipeline=3),
            "Mesh has no field 'pipeline': its fields are "
            "pp, dp, cp, tp, shard, ep, etp, rank_dp, rank_tp, expert_actors",
        ),
        (lambda: rp.AdamW(beta=3), "AdamW has no field 'beta': did you mean betas?"),
        (lambda: rp.SGD(momentun=3), "SGD has no field 'momentun': did you mean momentum?"),
        (lambda: rp.Text(pth="a"), "Text has no field 'pth': did you mean path?"),
        (lambda: rp.Batches(valid=1), "Batches has no field 'valid': did you mean validate?"),
        (lambda: rp.Layers(plans={}), "Layers has no field 'plans': did you mean plan?"),
    ],
)
def test_an_unknown_field_says_the_nearest(make, told):
    with pytest.raises(TypeError) as raised:
        make()
    assert str(raised.value) == told


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: rp.Llama(mlp=3), "Llama has no field 'mlp': it has ffn, the width of its MLP itself"),
        (lambda: rp.GPT(kv_heads=3), "GPT has no field 'kv_heads': Llama has one"),
        (lambda: rp.Run(lr=0.1), "Run has no field 'lr': AdamW and SGD and Muon have one"),
        (lambda: rp.SGD(betas=(0.9, 0.9)), "SGD has no field 'betas': AdamW has one"),
        (lambda: rp.Muon(betas=(0.9, 0.9)), "Muon has no field 'betas': it has adamw_betas"),
    ],
)
def test_a_field_of_another_description_says_whose_it_is(make, told):
    with pytest.raises(TypeError) as raised:
        make()
    assert str(raised.value) == told


def test_all_unknown_fields_are_told_at_once_and_replace_tells_too():
    with pytest.raises(TypeError, match=r"'hiden': did you mean hidden.*\n.*'laiers': did you mean layers"):
        replace(rp.GPT(), hiden=2, laiers=3)


def test_the_dataclass_stays_as_it_was():
    gpt = rp.GPT(layers=2, hidden=16)
    assert pickle.loads(pickle.dumps(gpt)) == copy.deepcopy(gpt) == replace(rp.GPT(), layers=2, hidden=16) == gpt
    assert repr(gpt).startswith("GPT(layers=2, hidden=16, ")
    assert {*inspect.signature(rp.GPT).parameters} == {field.name for field in fields(rp.GPT)}
    assert rp.GPT.__init__.__name__ == "__init__"
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        rp.Layers()
    assert not [*field_faults(rp.Run())]


@pytest.mark.parametrize("text", ["none", "None"])
def test_a_text_stands_for_none_where_none_is_legal(text):
    run = rp.Run(clip=text, folder=text, chunks=text, offload="none", recompute="none")
    assert (run.clip, run.folder, run.chunks, run.offload, run.recompute) == (None, None, None, "none", "none")
    assert replace(rp.Run(), zero=text).zero is None


def test_a_subclass_has_fields_of_its_own():
    @known_fields()
    @dataclass(frozen=True)
    class Base:
        one: int = 1

    @dataclass(frozen=True)
    class More(Base):
        two: int = 2

    assert More(two=3).two == 3
