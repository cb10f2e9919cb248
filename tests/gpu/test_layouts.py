"""Every axis and every technique on GPUs: what is trained there is what one process trains on its GPU.

Actors share GPUs where there are fewer, and their tensors then go through the host.
"""

from __future__ import annotations

import pytest

import raypar as rp

BF16, FP16 = rp.Precision(compute="bf16"), rp.Precision(compute="fp16")
RUNS = {
    "tp": {"mesh": rp.Mesh(tp=2)},
    "tp-sequence": {"mesh": rp.Mesh(tp=2, pp=2), "sequence_parallel": True},
    "tp-2d": {"mesh": rp.Mesh(tp="2d:2x2")},
    "cp-ring": {"mesh": rp.Mesh(cp=2), "context": "ring"},
    "cp-ulysses": {"mesh": rp.Mesh(cp=2), "context": "ulysses"},
    "zero-2": {"mesh": rp.Mesh(dp=2), "zero": 2},
    "zero-3": {"mesh": rp.Mesh(dp=2, pp=2), "zero": 3},
    "offload": {"mesh": rp.Mesh(dp=2), "zero": 2, "offload": "optimizer"},
    "offload-parameters": {"mesh": rp.Mesh(dp=2), "zero": 3, "offload": "parameters"},
    "recompute": {"mesh": rp.Mesh(pp=2), "recompute": "selective"},
    "bf16": {"mesh": rp.Mesh(pp=2), "precision": BF16},
    "bf16-zero-3": {"mesh": rp.Mesh(dp=2), "zero": 3, "precision": BF16},
    "fp16": {"mesh": rp.Mesh(pp=2), "precision": FP16, "loss_scale": rp.LossScale(init=1024.0)},
    "zb-v": {"mesh": rp.Mesh(pp=2), "schedule": "zb-v"},
    "zb-h1-tp": {"mesh": rp.Mesh(pp=2, tp=2), "schedule": "zb-h1"},
    "dualpipe-v": {"mesh": rp.Mesh(pp=2), "schedule": "dualpipe-v"},
    "tasks": {"mesh": rp.Mesh(pp=2), "executor": "tasks"},
    "muon": {"mesh": rp.Mesh(dp=2), "optim": rp.Muon()},
    "llama": {"name": "llama-tiny", "mesh": rp.Mesh(pp=2, tp=2)},
    "experts": {"name": "moe-tiny", "layout": "ep2_dp2"},
}


@pytest.mark.parametrize("name", RUNS)
def test_a_layout_trains_what_one_process_does(cluster, name):
    changes = {"name": "gpt-tiny", "steps": 3, "device": "cuda", **RUNS[name]}
    verdict = rp.verify(rp.recipe(**changes))
    assert verdict.ok, str(verdict)


def test_an_asynchronous_schedule_trains(cluster):
    run = rp.recipe("gpt-tiny", mesh=rp.Mesh(pp=2), schedule="pipedream", clip=None, steps=8, device="cuda")
    with rp.launch(run) as job:
        losses = [report.loss for report in job.train()]
    assert losses[-1] < losses[0]


def test_a_checkpoint_of_gpus_is_read_by_another_layout(cluster, tmp_path):
    run = rp.recipe("gpt-tiny", mesh=rp.Mesh(pp=2), steps=4, device="cuda")
    with rp.launch(run) as job:
        for _ in range(2):
            job.step()
        job.save(tmp_path / "run")
        ahead = [job.step().loss for _ in range(2)]
    other = rp.recipe("gpt-tiny", mesh=rp.Mesh(tp=2), steps=4, device="cuda")
    with rp.launch(other, resume=tmp_path / "run") as job:
        assert [job.step().loss for _ in range(2)] == pytest.approx(ahead, rel=1e-4)


def test_a_killed_actor_is_replaced(cluster):
    run = rp.recipe("gpt-tiny", mesh=rp.Mesh(pp=2), steps=6, device="cuda", max_failures=1)
    with rp.launch(run) as job:
        undisturbed = [report.loss for report in job.train()]
    with rp.launch(run, chaos=[rp.chaos.kill("pp=1", at="1B0", step=3)]) as job:
        assert [report.loss for report in job.train()] == undisturbed


@pytest.mark.parametrize("hidden", [256, 1024])
@pytest.mark.parametrize("changes", [{}, {"precision": BF16}, {"recompute": "full"}], ids=["fp32", "bf16", "recompute"])
def test_the_memory_of_a_gpu_is_what_the_plan_says(cluster, changes, hidden):
    model = rp.GPT(layers=8, hidden=hidden, heads=8, seq=512, vocab=4096)
    with rp.launch(rp.recipe("gpt-small", model=model, micro_batch_size=4, steps=3, device="cuda", **changes)) as job:
        job.train()
        table = job.memory()
    print(table)
    for figures in table.values():
        assert figures["peak"].measured == pytest.approx(figures["peak"].formula, rel=0.12)
