"""A job evaluates, generates and exports with the averages of its weights, and goes on with the weights themselves."""

from __future__ import annotations

import pytest
import torch

import raypar as rp
from raypar.checkpoint.find import averaged
from raypar.errors import JobError
from raypar.job.start.resume import find

MODEL = rp.GPT(layers=2, hidden=32, heads=4, seq=64, qkv_bias=True)
RUN = rp.Run(
    model=MODEL, mesh=rp.Mesh(pp=2), microbatches=2, micro_batch_size=1, steps=4, ema=0.5, optim=rp.AdamW(lr=3e-2)
)


def read(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.long
def test_averages_are_used_where_that_is_asked_for(job_of, said, tmp_path):
    job = job_of(RUN)
    job.train(3)
    own, path = dict(job.weights()), job.save(tmp_path / "saved")
    plain, mean = job.evaluate(), job.evaluate(ema=True)
    assert mean.is_averaged and not plain.is_averaged and mean.loss != plain.loss
    told = []
    wants = (lambda: job.step(), lambda: job.evaluate(), lambda: job.save(tmp_path / "no"))

    def on(number, token, text):
        for want in wants:
            with pytest.raises(JobError, match="the actors compute with averaged weights: do this when generate has"):
                want()
        told.append(token)

    (made,) = job.generate("import ", 4, ema=True, on=on)
    assert list(made.tokens) == told
    assert job.evaluate().loss == plain.loss, "and the weights are their own again"
    there = read(job.export_hf(tmp_path / "mean", ema=True))
    weights = dict(job.weights())
    assert all(torch.equal(weights[name], own[name]) for name in own)
    code, _, err = said("ckpt", "export", path, tmp_path / "same", "--ema")
    assert code == 0, err
    same, others = read(tmp_path / "same"), read(job.export_hf(tmp_path / "own"))
    assert all(torch.equal(same[name], there[name]) for name in there)
    assert any(not torch.equal(same[name], others[name]) for name in there)
    job.reset(rp.Run(**{**vars(RUN), "mesh": rp.Mesh(), "ema": None}), resume=averaged(find(path)))
    assert job.generate("import ", 4)[0].tokens == made.tokens
    assert job.evaluate().loss == pytest.approx(mean.loss, rel=1e-5)
    with pytest.raises(rp.ConfigError, match="ema is True, but the run keeps no averages of its weights: give Run"):
        job.evaluate(ema=True)


def test_a_folder_of_hugging_face_has_none(said, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    code, _, err = said("generate", tmp_path, "a", "--ema")
    assert (code, "is a folder of Hugging Face, with one value of each weight: leave out --ema" in err) == (2, True)
