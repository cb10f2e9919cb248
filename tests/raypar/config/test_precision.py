"""What a run's precision does not go with, and how it is spelled."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import raypar as rp
from raypar.cli.train.train import TrainArgs
from raypar.cli.words.parsing import parse
from raypar.config.toml import plain_of, run_of


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"precision": rp.Precision("fp16"), "loss_scale": rp.LossScale(use="off")}, "loss_scale.use is 'off'"),
        ({"precision": rp.Precision("bf16", master="fp16")}, "set precision.master to 'fp32'"),
        ({"precision": rp.Precision("bf16", reduce="fp16")}, "precision.reduce is 'fp16'"),
        ({"precision": rp.Precision("bf16", tf32=True)}, "and precision.compute is 'bf16': leave it out"),
        ({"precision": rp.Precision(master="bf16")}, "set precision.compute to 'bf16' too"),
        ({"precision": rp.Precision("fp16", reduce="fp16", master="fp16")}, "optim.eps 1e-08 is 0 in fp16"),
        ({"precision": rp.Precision("fp4")}, "it must be 'fp32', 'bf16', 'fp16' or 'fp8'"),
        ({"precision": rp.Precision("fp8", master="fp16")}, "set precision.master to 'fp32'"),
        ({"precision": rp.Precision("fp8", reduce="fp16")}, "set precision.reduce to 'fp32' or 'bf16'"),
        ({"precision": rp.Precision("bf16"), "data_parallel": "parameter_server"}, "parameter servers hold fp32"),
        ({"nonfinite": "skip", "data_parallel": "parameter_server"}, "parameter servers do not skip steps"),
        ({"nonfinite": "rewind"}, "give folder and save_every"),
        ({"loss_scale": rp.LossScale(init=1.0, floor=2.0)}, "loss_scale.floor 2 is above"),
        ({"loss_scale": rp.LossScale(growth=1.0)}, "loss_scale.growth"),
    ],
)
def test_faults_say_the_fix(fields, said):
    (fault,) = rp.faults(rp.Run(**fields))
    assert said in fault


FP8, WIDE = rp.Precision("fp8"), rp.Llama(hidden=256, heads=4, ffn=704)
OWN = rp.Layers(lambda: [torch.nn.Linear(16, 16)], torch.nn.functional.mse_loss)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": OWN, "data": rp.Batches(lambda *_: (torch.ones(1, 16),) * 2)}, "make logits: set"),
        ({"model": replace(WIDE, ffn=704), "mesh": rp.Mesh(tp="2d:2x2")}, "whose blocks of matrices"),
        ({"tile": 2}, "tiles are multiplied in bf16"),
        ({"data_parallel": "parameter_server"}, "parameter servers hold fp32"),
        ({"resources": rp.Resources(accelerator_type="A100")}, "'A100', which does not multiply fp8: take H100, say"),
        ({"model": rp.GPT(hidden=264, heads=4, head_width=64)}, "model.hidden is 264: set it to 256 or 272"),
        ({"model": rp.GPT(hidden=264, heads=4, head_width=64), "mesh": rp.Mesh(tp=2)}, "x tp 2, but model.hidden is"),
        ({"model": replace(WIDE, ffn=700, moe=rp.MoE(experts=4))}, "model.ffn is 700: set it to 688 or 704"),
        ({"model": replace(WIDE, ffn=700)}, "model.ffn is 700: set it to 688 or 704"),
        ({"model": replace(WIDE, ffn=720), "mesh": rp.Mesh(tp=2)}, "16 x tp 2, but model.ffn is 720: set it to 704 or"),
        ({"model": rp.Llama(hidden=256, heads=3, head_width=8)}, "not 3 x 8 outputs of model.heads"),
        ({"model": replace(WIDE, heads=4, head_width=24, kv_heads=1)}, "not 1 x 24 outputs of model.kv_heads"),
        ({"model": replace(WIDE, moe=rp.MoE(experts=4, width=40))}, "model.moe.width is 40: set it to 32 or 48"),
        ({"model": replace(WIDE, moe=rp.MoE(experts=4)), "mesh": rp.Mesh(tp=2)}, "change which experts tokens choose"),
        ({"model": replace(WIDE, moe=rp.MoE(experts=4)), "mesh": rp.Mesh(cp=2)}, "change which experts tokens choose"),
    ],
)
def test_what_fp8_does_not_go_with(fields, said):
    (fault,) = rp.faults(rp.Run(**({"model": WIDE} | fields), precision=FP8))
    assert said in fault


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"model": rp.recipe("gpt-tiny").model},
        {"mesh": rp.Mesh(tp=2), "sequence_parallel": True},
        {"mesh": rp.Mesh(tp=4), "model": replace(WIDE, kv_heads=2)},
        {"model": replace(WIDE, moe=rp.MoE(experts=4)), "mesh": rp.Mesh(dp=2, ep=2)},
        {"resources": rp.Resources(accelerator_type="H100")},
        {"precision": rp.Precision("fp8", reduce="bf16", master="bf16")},
    ],
)
def test_what_fp8_goes_with(fields):
    assert rp.faults(rp.Run(**({"model": WIDE, "precision": FP8} | fields))) == []


def test_the_faults_of_fp8_come_with_all_others():
    small = rp.Llama(hidden=40, heads=4, head_width=6, ffn=100)
    run = rp.Run(model=small, precision=FP8, tile=2, micro_batch_size=0, nonfinite="rewind")
    assert len(rp.faults(run)) == 6


def test_all_faults_come_at_once():
    run = rp.Run(precision=rp.Precision("fp16", reduce="bf16"), loss_scale=rp.LossScale(use="off"), nonfinite="rewind")
    assert len(rp.faults(run)) == 3


@pytest.mark.parametrize(
    "precision",
    [rp.Precision("bf16"), rp.Precision("fp16", reduce="fp16"), rp.Precision("bf16", reduce="bf16", master="bf16")],
)
def test_what_goes_together_has_no_fault(precision):
    assert rp.faults(rp.Run(precision=precision)) == []


def test_eps_is_no_fault_with_fp32_states():
    assert torch.tensor(1e-8).half().item() == 0.0
    assert (
        rp.faults(rp.Run(precision=rp.Precision("fp16", reduce="fp16", master="fp16"), optim=rp.AdamW(eps=1e-4))) == []
    )


def test_files_and_flags_spell_it_as_a_word_or_field_by_field():
    wanted = rp.Precision("bf16")
    assert run_of({"precision": "bf16"}).precision == wanted
    assert run_of({"precision": {"compute": "bf16"}}).precision == wanted
    run = rp.Run(precision=wanted, loss_scale=rp.LossScale(window=7))
    assert run_of(plain_of(run)) == run
    for words in (["--precision", "bf16"], ["--precision=bf16"], ["--precision.compute", "bf16"]):
        args = parse(TrainArgs, [*words, "--loss-scale.window", "7"], "train", "Train.", "gpt-tiny").args
        assert args.precision == wanted
        assert args.loss_scale.window == 7
    with pytest.raises(rp.ConfigError, match="'bf17'"):
        run_of({"precision": "bf17"})
