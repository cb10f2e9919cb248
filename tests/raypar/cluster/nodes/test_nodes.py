"""What the driver knows of nodes: those that differ are refused by name, and what it claims of which."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

import raypar as rp
from raypar.actors.mesh.world import World
from raypar.actors.specs.precision import WITHOUT_FP8
from raypar.cluster.lifecycle import ray_cluster
from raypar.cluster.nodes import nodes as cluster_nodes
from raypar.cluster.nodes.nodes import (
    demand_alike,
    demand_fp8_accelerators,
    facts_of,
    living_nodes,
    versions_collector,
)
from raypar.cluster.placement.devices import ActorResources
from raypar.cluster.placement.placement import Node
from raypar.errors import ConfigError, RoomError

CPU = ActorResources("cpu", 0.0)


def node(name, cpus, free=None):
    return Node(f"id of {name}", name, "10.0.0.1", {"CPU": cpus}, {"CPU": cpus if free is None else free})


def test_nodes_that_differ_or_do_not_answer_are_refused_all_at_once(monkeypatch):
    own = versions_collector()()
    reported = {"id of b": own | {"torch": "1.0"}, "id of c": "it did not answer within 60 s", "id of d": own}
    monkeypatch.setattr(cluster_nodes, "own_node", lambda: "id of a")
    monkeypatch.setattr(cluster_nodes, "facts_of", lambda nodes, collector: reported)
    with pytest.raises(ConfigError) as caught:
        demand_alike([node(name, 1.0) for name in "abcd"])
    first, second = caught.value.faults
    assert first.startswith("node b (10.0.0.1) has torch 1.0, this process ") and "pip install torch==" in first
    assert second == "node c (10.0.0.1) does not run a task: it did not answer within 60 s"
    demand_alike([node("a", 1.0), node("d", 1.0)])


def test_nodes_that_do_not_see_the_runs_folder_are_refused(monkeypatch, tmp_path):
    def asked_of(nodes, collector):
        reported = collector()
        return {one.id: {"is_seen": False} if one.name == "c" and "is_seen" in reported else reported for one in nodes}

    monkeypatch.setattr(cluster_nodes, "own_node", lambda: "id of a")
    monkeypatch.setattr(cluster_nodes, "facts_of", asked_of)
    demand_alike([node(name, 1.0) for name in "abc"])
    with pytest.raises(ConfigError) as caught:
        demand_alike([node(name, 1.0) for name in "abc"], tmp_path)
    (fault,) = caught.value.faults
    assert fault.startswith(f"node c (10.0.0.1) does not see the folder {str(tmp_path)!r}: give one that all nodes")
    assert not [*tmp_path.iterdir()]


def test_nodes_whose_gpus_do_not_multiply_fp8_are_refused_by_name():
    kinds = {"a": "A100", "b": "H100", "c": "V100"}
    found = [replace(node(name, 4.0), total={"GPU": 8.0, f"accelerator_type:{kinds[name]}": 1.0}) for name in kinds]
    with pytest.raises(ConfigError) as caught:
        demand_fp8_accelerators([*found, node("d", 4.0)], WITHOUT_FP8)
    first, second = caught.value.faults
    assert first.startswith("node a (10.0.0.1) has A100 GPUs, which do not multiply fp8: set resources.accelerator_t")
    assert second.startswith("node c (10.0.0.1) has V100 GPUs")
    demand_fp8_accelerators(found[1:2], WITHOUT_FP8)
    demand_fp8_accelerators(found, ())


def test_nobody_is_asked_where_all_actors_are_on_the_drivers_node(monkeypatch):
    monkeypatch.setattr(cluster_nodes, "own_node", lambda: "id of a")
    monkeypatch.setattr(cluster_nodes, "facts_of", None)
    demand_alike([node("a", 4.0)])


def test_a_node_answers_or_says_why_not(cluster):
    def fails():
        raise OSError("no disk\nof mine")

    (here,) = living_nodes()
    assert (here.total["CPU"], here.rack) == (16.0, "")
    assert facts_of([here], versions_collector()) == {here.id: versions_collector()()}
    assert facts_of([here], fails) == {here.id: "OSError: no disk"}


def test_without_what_is_free_all_of_a_node_counts(cluster, monkeypatch):
    monkeypatch.setattr(cluster_nodes, "free_resources", lambda: None)
    (here,) = living_nodes()
    assert here.free == here.total


def claim(world, nodes, share=CPU, strategy="PACK", *, grows=False):
    """Return the blocks that would be claimed, and the node of each."""
    found, _ = ray_cluster._claim(world, nodes, share, strategy, 1, "job", grows=grows)
    return [block for block, _ in found.pins], [node.removeprefix("id of ") for _, node in found.pins]


def test_a_claim_pins_every_block_to_its_node_and_leaves_to_ray_what_is_not_free_yet(caplog):
    world, groups = World(rp.Mesh(pp=2, tp=2)), [(0, 1), (2, 3), (4,)]
    with caplog.at_level(logging.INFO, "raypar"):
        assert claim(world, [node("a", 2.0), node("b", 3.0)]) == (groups, ["b", "a", ""])
    assert "actors on 2 nodes: a (10.0.0.1): pp=1 tp=0, pp=1 tp=1; b (10.0.0.1): pp=0 tp=0, pp=0 tp=1" in caplog.text
    assert claim(world, [node("a", 2.0, 1.0), node("b", 3.0)]) == (groups, ["", "", ""])
    assert claim(world, [node("a", 1.0)], grows=True) == (groups, ["", "", ""])


def test_blocks_are_packed_or_spread_as_the_strategy_says():
    world, nodes = World(rp.Mesh(pp=3)), [node("a", 4.0), node("b", 4.0), node("c", 2.0)]
    each = [(0,), (1,), (2,), (3,)]
    assert claim(world, nodes) == (each, ["a", "a", "a", ""])
    assert claim(world, nodes, strategy="SPREAD") == (each, ["a", "b", "a", ""])
    assert claim(world, nodes, strategy="STRICT_SPREAD") == (each, ["a", "b", "c", ""])
    assert claim(world, nodes, strategy="STRICT_PACK") == (each, ["a", "a", "a", ""])
    busy = [node("a", 2.0), node("b", 4.0, 2.0), node("c", 2.0, 0.0)]
    assert claim(world, busy, strategy="STRICT_PACK") == ([(0, 1, 2), (3,)], ["", ""]), "one group, on one node"
    assert claim(world, busy, strategy="STRICT_SPREAD") == (each, ["b", "a", "c", ""]), "c is waited for"
    for strategy, few in (("STRICT_PACK", [node("a", 2.0), node("b", 2.0)]), ("STRICT_SPREAD", [node("a", 4.0)])):
        with pytest.raises(RoomError, match=f"{strategy} wants .*: use a smaller mesh, or another placement_strategy"):
            claim(world, few, strategy=strategy)


def test_what_actors_take_decides_for_how_many_a_node_has_room():
    share = ActorResources("cpu", 0.0, 2.0, {"memory": 2.0**30, "disk": 0.5}, {"zone": "in(x,y)", "spot": "!true"})

    def one(cpus=4.0, memory=4.0, disk=1.0, **labels):
        has = {"CPU": cpus, "memory": memory * 2**30, "disk": disk}
        return Node("n", "host", "10.0.0.1", has, has, labels)

    world = World(rp.Mesh(pp=2))
    assert claim(world, [one(zone="x")], share)[1] == ["n", "n", ""]
    for wrong, says in [
        (one(3.0, zone="x"), r"4 CPUs and 2.0 GiB memory and 1 disk on nodes with zone=in\(x,y\) and spot=!true, "),
        (
            one(memory=1.5, zone="y"),
            r"host \(10.0.0.1\) has 4 CPUs \(4 free\) and 1.5 GiB memory \(1.5 free\) and 1 disk",
        ),
        (one(disk=0.5, zone="x"), "0.5 disk .*: room for 1"),
        (one(zone="z"), "has label zone=z: room for 0.*ask for less in resources"),
        (one(), "has no label zone: room for 0"),
        (one(zone="x", spot="true"), "has label spot=true: room for 0"),
    ]:
        with pytest.raises(RoomError, match=says):
            claim(world, [wrong], share)


def test_what_no_node_has_is_told_at_once_with_each_node():
    with pytest.raises(ConfigError, match=r"mesh: 4 actors need 4 CPUs, the cluster has 3 \(3 free\) on 2 nodes \(a "):
        claim(World(rp.Mesh(pp=4)), [node("a", 2.0), node("b", 1.0)])
    gpus = [Node("g", "g", "g", {"CPU": 1.0, "GPU": 4.0}, {"CPU": 1.0, "GPU": 4.0})] * 2
    with pytest.raises(ConfigError, match=r"g has 1 CPU \(1 free\) and 4 GPUs \(4 free\): room for 1, g has"):
        claim(World(rp.Mesh(pp=4)), gpus, ActorResources("cuda", 1.0))


def test_a_split_tensor_group_is_claimed_actor_by_actor_and_warned_of_once(caplog):
    world = World(rp.Mesh(pp=2, tp=2))
    with caplog.at_level(logging.WARNING, "raypar"):
        assert sorted(claim(world, [node("a", 1.0), node("b", 3.0)])[1]) == ["", "a", "b", "b"]
    (warning,) = caplog.records
    assert "no node has room for its 2 actors" in warning.getMessage()
    (blocks, on) = claim(world, [node("a", 1.0, 0.0), node("b", 3.0)])
    assert blocks[-3:] == [(2,), (3,), (4,)] and set(on) == {""}, "whole tensor groups would wait forever"


def test_the_heads_address_is_the_one_that_others_reach_whatever_a_driver_calls_it(monkeypatch):
    """Else a head that listens to all would be found to be reached from its machine alone."""
    nodes = [
        {"NodeManagerAddress": "10.0.0.7", "Resources": {"CPU": 1.0}},
        {"NodeManagerAddress": "10.0.0.9", "Resources": {"node:__internal_head__": 1.0}},
    ]
    ray = SimpleNamespace(nodes=lambda: nodes, get_runtime_context=lambda: SimpleNamespace(gcs_address="127.0.0.1:99"))
    monkeypatch.setattr(cluster_nodes, "ray", ray)
    assert cluster_nodes.head_address() == "10.0.0.9:99"
    nodes.pop()
    assert cluster_nodes.head_address() == "127.0.0.1:99"


def test_nodes_that_set_up_a_runtime_environment_are_waited_for_longer_and_it_is_said(cluster, monkeypatch, caplog):
    (here,) = living_nodes()

    def slow():
        import time

        time.sleep(1.0)
        return {}

    monkeypatch.setattr(cluster_nodes, "_ANSWER_SECONDS", 0.2)
    assert facts_of([here], slow) == {here.id: "it did not answer within 0.2 s"}
    monkeypatch.setattr(cluster_nodes, "_SAY", 0.2)
    context = SimpleNamespace(runtime_env={"pip": ["raypar"]}, get_node_id=lambda: here.id)
    monkeypatch.setattr(cluster_nodes.ray, "get_runtime_context", lambda: context)
    with caplog.at_level(logging.INFO, "raypar"):
        assert facts_of([here], slow) == {here.id: {}}
    assert "waiting for 1 nodes to set up the job's runtime_env" in caplog.messages
    monkeypatch.setattr(cluster_nodes, "_SET_UP", 0.2)
    assert facts_of([here], slow)[here.id].endswith(
        "within 0.2 s; perhaps it still sets up the job's runtime_env (pip)"
    )


def test_plan_says_what_would_wait(monkeypatch):
    cuda = SimpleNamespace(is_built=lambda: False)
    monkeypatch.setattr(ray_cluster, "torch", SimpleNamespace(backends=SimpleNamespace(cuda=cuda)))
    lines = ray_cluster.foreseen(World(rp.Mesh(pp=2)), [node("a", 2.0, 1.0)], "auto", rp.Resources())
    assert lines[0] == "a (10.0.0.1): pp=0, pp=1"
    assert lines[1].endswith("it would wait until all are free, and Ray would choose")
