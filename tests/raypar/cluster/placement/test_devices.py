"""What a run computes on: the decision, and that Ray gives actors what was decided."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import raypar as rp
from raypar.actors.mesh.world import World
from raypar.cluster.lifecycle import ray_cluster
from raypar.cluster.placement import given_group
from raypar.cluster.placement.devices import ActorResources, gpu_share
from raypar.cluster.placement.placement import Node
from raypar.config.run import check_run, reset_faults
from raypar.job.start.actor_plans import plans_of

ROOT = Path(__file__).parents[4]
CPU, WHOLE = ActorResources("cpu", 0.0), ActorResources("cuda", 1.0)


def share(choice, actors, gpus, built=True, grows=False):
    return gpu_share(choice, actors, gpus, built=built, grows=grows)


@pytest.mark.parametrize(
    ("choice", "actors", "gpus", "wanted"),
    [
        ("auto", 4, 4, WHOLE),
        ("auto", 4, 5, WHOLE),
        ("auto", 4, 3, CPU),  # never shared unasked
        ("auto", 1, 0, CPU),
        ("cpu", 1, 8, CPU),
        ("cuda", 2, 2, WHOLE),
        ("cuda", 4, 3, ActorResources("cuda", 0.5)),
        ("cuda", 3, 1, ActorResources("cuda", 0.3333)),
        ("cuda", 7, 1, ActorResources("cuda", 0.1428)),
    ],
)
def test_who_gets_what(choice, actors, gpus, wanted):
    assert share(choice, actors, gpus) == wanted


@pytest.mark.parametrize("gpus", [1, 2, 3, 8])
@pytest.mark.parametrize("actors", [1, 2, 3, 7, 16, 100])
def test_the_shares_of_all_actors_fit_on_the_gpus(actors, gpus):
    part = share("cuda", actors, gpus).gpus
    assert 0 < part <= 1
    on_one = int(1 / part + 1e-9)
    assert on_one * gpus >= actors, "there is room for all"
    assert round(part * 10_000) * on_one <= 10_000, "in Ray's own units"


def test_a_torch_without_cuda_uses_no_gpu_unless_told_to():
    assert share("auto", 1, 8, built=False) == CPU
    with pytest.raises(rp.ConfigError, match="torch is built without CUDA here: install"):
        share("cuda", 1, 8, built=False)


def test_a_cluster_without_a_gpu_may_get_some_while_it_grows():
    with pytest.raises(rp.ConfigError, match="device is 'cuda', but the cluster has no GPU: use device 'cpu'"):
        share("cuda", 2, 0)
    assert share("cuda", 2, 0, grows=True) == WHOLE
    assert share("cuda", 4, 2, grows=True) == WHOLE
    assert share("auto", 2, 0, grows=True) == CPU


@pytest.mark.parametrize(
    ("choice", "actors", "gpus", "built", "says"),
    [
        ("auto", 2, 2, True, "computing on GPUs, one for each actor"),
        ("auto", 2, 1, True, "computing on CPUs (GPUs are fewer than actors: device 'cuda' would share them)"),
        ("auto", 2, 2, False, "computing on CPUs (torch has no CUDA here)"),
        ("auto", 2, 0, True, "computing on CPUs"),
        ("cpu", 2, 2, True, "computing on CPUs"),
    ],
)
def test_the_log_says_which(caplog, choice, actors, gpus, built, says):
    with caplog.at_level(logging.INFO, logger="raypar"):
        share(choice, actors, gpus, built)
    assert [record.getMessage() for record in caplog.records] == [says]


def test_sharing_is_warned_of(caplog):
    share("cuda", 3, 2)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("3 actors share 2 GPUs, up to 2 one: their tensors go through the host")


def test_sharing_over_nccl_is_said_to_be_for_trying(caplog):
    assert gpu_share("cuda", 4, 1, built=True, grows=False, shared_gpu="nccl") == ActorResources("cuda", 0.25)
    (record,) = caplog.records
    assert record.getMessage() == (
        "4 actors share 1 GPU, up to 4 one: NCCL connects them, and their kernels take turns, which is for "
        "trying, not for speed"
    )


@pytest.mark.parametrize(
    ("gpus", "grows", "why"), [(2, False, ""), (1, True, ", as none is shared with wait_for_nodes")]
)
def test_where_each_actor_has_a_gpu_none_is_shared_over_nccl(gpus, grows, why):
    with pytest.raises(rp.ConfigError) as caught:
        gpu_share("cuda", 2, gpus, built=True, grows=grows, shared_gpu="nccl")
    assert caught.value.faults == [
        f"shared_gpu is 'nccl', but each actor gets a GPU of its own{why}: leave shared_gpu out"
    ]


def gpu_node(name, cpus=8.0, gpus=1.0):
    resources = {"CPU": cpus, "GPU": gpus}
    return Node(name, name, "10.0.0.1", resources, resources)


def test_actors_that_share_over_nccl_are_on_one_node_or_refused(monkeypatch):
    cuda = SimpleNamespace(is_built=lambda: True)
    monkeypatch.setattr(ray_cluster, "torch", SimpleNamespace(backends=SimpleNamespace(cuda=cuda)))
    world = World(rp.Mesh(dp=4))

    def foreseen(nodes, **resources):
        return ray_cluster.foreseen(world, nodes, "cuda", rp.Resources(**resources), "nccl")

    small, large = gpu_node("a", cpus=3.0), gpu_node("b")
    assert foreseen([small, large], gpus=0.25) == ["b (10.0.0.1): pp=0 dp=0, pp=0 dp=1, pp=0 dp=2, pp=0 dp=3"]
    with pytest.raises(rp.ConfigError) as caught:
        foreseen([gpu_node("a"), gpu_node("b")])
    (fault,) = caught.value.faults
    assert fault.startswith("shared_gpu is 'nccl', but no node has room for all 4 actors (a (10.0.0.1) has ")
    assert fault.endswith(
        "and NCCL connects actors of one GPU on one node only: set resources.gpus to 0.25, so that all are on one, "
        "or leave shared_gpu out"
    )
    with pytest.raises(rp.ConfigError, match="one node only: leave shared_gpu out"):
        foreseen([gpu_node("a", cpus=1.0), gpu_node("b", cpus=1.0)], gpus=0.25)


def test_a_placement_group_for_actors_that_share_over_nccl_is_on_one_node(monkeypatch):
    table = {"bundles_to_node_id": {0: "a", 1: "b", 2: "b"}, "name": "a quota"}
    monkeypatch.setattr(given_group, "placement_group_table", lambda group: table)
    group = SimpleNamespace(id=SimpleNamespace(hex=lambda: "c0ffee"))
    given_group.demand_one_node(group, {1, 2})
    with pytest.raises(rp.ConfigError, match=r"'a quota' \(c0ffee\) has its bundles on 2 nodes, .* STRICT_PACK"):
        given_group.demand_one_node(group, {0, 1})


PLACED = """
import json, sys
import ray, torch
import raypar as rp
from raypar.actors.mesh.world import World
from raypar.cluster.lifecycle.ray_cluster import start_actors

class Told:
    def gpu(self):
        import os, ray
        return ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES")

torch.backends.cuda.is_built = lambda: True
ray.init(address="local", num_cpus=6, num_gpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
         object_store_memory=80 * 2**20)
found = {}
for choice, pp in (("auto", 2), ("cuda", 3)):
    actors = start_actors(Told, World(rp.Mesh(pp=pp)), choice, f"{choice}{pp}")
    found[f"{choice} {pp}"] = [actors.device, ray.get([handle.gpu.remote() for handle in actors.handles])]
    actors.end()
try:
    rp.launch(rp.Run(model=rp.GPT(layers=8, hidden=8, heads=2, seq=8), mesh=rp.Mesh(pp=7), device="cpu"))
except rp.ConfigError as error:
    found["full"] = str(error)
left = ray.util.list_named_actors(all_namespaces=True)
found["then"] = ray.available_resources().get("CPU"), left, ray.is_initialized()
print(json.dumps(found))
"""


@pytest.mark.long
def test_ray_gives_every_actor_its_gpu_and_says_what_it_has_no_room_for():
    """A Ray that is told of two GPUs hands them out, whether they are there or not."""
    done = subprocess.run([sys.executable, "-c", PLACED], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    device, whole = found["auto 2"]
    assert device == "cuda"
    assert sorted(ids for ids, _ in whole) == [[0], [1]]
    assert all(shown == str(ids[0]) for ids, shown in whole), "an actor's own GPU is the only one that it sees"
    device, shared = found["cuda 3"]
    assert device == "cuda"
    assert {ids[0] for ids, _ in shared} <= {0, 1}
    assert max([ids for ids, _ in shared].count([gpu]) for gpu in (0, 1)) == 2
    says = "mesh: 7 actors need 7 CPUs, the cluster has 6 (6 free) on 1 node: use a smaller mesh"
    assert found["full"].startswith(says)
    assert found["then"] == [6.0, [], True], "no actor, no place taken, and a cluster that is not ours goes on"


def test_verifying_on_a_gpu_needs_one_in_this_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(rp.ConfigError, match=r"the plain process has no GPU .*: verify on 'cpu'"):
        rp.verify(rp.recipe("gpt-tiny", device="cuda"))


@pytest.mark.parametrize(("device", "fits"), [("auto", True), ("cpu", True), ("cuda", False)])
def test_a_reset_keeps_the_device(device, fits):
    faults = list(reset_faults(rp.recipe("gpt-tiny", device=device), "cpu"))
    assert faults == ([] if fits else ["reset keeps the actors: device must stay 'cpu'; launch anew for 'cuda'"])


def test_plans_say_what_all_compute_on():
    run = rp.recipe("gpt-tiny", device="auto", data_parallel="parameter_server")
    plans = plans_of(run, check_run(run), "name", device="cuda")
    assert len(plans) == 4
    assert {plan.device for plan in plans} == {"cuda"}
