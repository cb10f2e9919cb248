"""What a run's precision does not go with, and how it is spelled."""

from __future__ import annotations

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
        ({"precision": rp.Precision(master="bf16")}, "set precision.compute to 'bf16' too"),
        ({"precision": rp.Precision("fp16", reduce="fp16", master="fp16")}, "optim.eps 1e-08 is 0 in fp16"),
        ({"precision": rp.Precision("fp8")}, "precision.compute is 'fp8'"),
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
