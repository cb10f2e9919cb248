"""The placement groups of a job: one for each block of actors, given back with its last actor, and never hoarded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from ray.util.placement_group import placement_group_table

import raypar as rp
from raypar.actors.mesh.world import World
from raypar.cluster.lifecycle import claims
from raypar.cluster.lifecycle import replacement_actors as vacancies
from raypar.cluster.lifecycle.claims import Claim
from raypar.cluster.lifecycle.replacement_actors import ActorBundle
from raypar.cluster.placement.devices import ActorResources
from raypar.errors import RoomError

ROOT = Path(__file__).parents[4]
RUN = rp.Run(rp.GPT(layers=2, hidden=16, heads=2, seq=8), mesh=rp.Mesh(pp=2), microbatches=2, steps=9, timeout=20.0)


class Books:
    """Ray's books of placement groups, in which a group is made if a node has room; time passes as it is slept."""

    def __init__(self, monkeypatch, **rooms):
        self.rooms, self.now, self.made, self.slept, self.later = rooms, 0.0, [], [], []
        monkeypatch.setattr(claims, "placement_group", self.make)
        monkeypatch.setattr(claims, "remove_placement_group", self.remove)
        monkeypatch.setattr(claims, "placement_group_table", self.table)
        monkeypatch.setattr(claims, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(claims, "living_nodes", list)
        monkeypatch.setattr(claims, "holders", lambda own: "")
        monkeypatch.setattr(claims, "coming_nodes", lambda: None)

    def make(self, bundles, *, strategy, name, bundle_label_selector):
        assert strategy == "STRICT_PACK"
        group = SimpleNamespace(name=name, bundles=bundles, node="", wait=lambda seconds: self.wait(group, seconds))
        group.id = SimpleNamespace(hex=lambda: f"{name} {id(group)}")
        group.pin = (bundle_label_selector or [{}])[0].get("ray.io/node-id", "")
        self.made.append(group)
        self.fill()
        return group

    def fill(self):
        for group in self.made:
            need = sum(bundle["CPU"] for bundle in group.bundles)
            fit = [name for name, room in self.rooms.items() if room >= need and group.pin in ("", name)]
            if not group.node and fit:
                group.node = fit[0]
                self.rooms[fit[0]] -= need

    def wait(self, group, seconds):
        self.sleep(0.0 if group.node else seconds)
        return bool(group.node)

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += seconds
        for when, call in self.later:
            if when <= self.now:
                self.later.remove((when, call))
                call()
                self.fill()
                break

    def remove(self, group):
        self.made.remove(group)
        if group.node:
            self.rooms[group.node] += sum(bundle["CPU"] for bundle in group.bundles)
        self.fill()

    def table(self):
        return {
            group.id.hex(): {
                "placement_group_id": group.id.hex(),
                "state": "CREATED" if group.node else "PENDING",
                "bundles_to_node_id": dict.fromkeys(range(len(group.bundles)), group.node),
            }
            for group in self.made
        }


CPU = ActorResources("cpu", 0.0)


def claim_of(mesh, nodes=None, spares=0, job="job"):
    world = World(mesh)
    size = world.mesh.tensor_ranks
    blocks = [tuple(range(first, first + size)) for first in range(0, world.size, size)]
    blocks += [(number,) for number in range(world.size, world.size + spares)]
    pins = zip(blocks, [*(nodes or [""] * (len(blocks) - spares)), *[""] * spares], strict=True)
    return Claim(world, [*pins], CPU, job)


def test_ranks_that_follow_each_other_get_the_groups_of_one_node(monkeypatch):
    books = Books(monkeypatch, a=1.0, b=2.0, c=1.0)
    claim = claim_of(rp.Mesh(pp=4))
    claim.make()
    books.made[1].node, books.made[2].node, books.made[3].node = "c", "a", "b"  # as Ray has chosen
    books.made[0].node = "b"
    assert [home.node for home in claim.bundles()] == ["a", "b", "b", "c"]


def test_a_tensor_group_shares_one_group_which_its_last_actor_gives_back(monkeypatch):
    books = Books(monkeypatch, a=4.0, b=1.0)
    claim = claim_of(rp.Mesh(pp=2, tp=2), ["a", "a"], spares=1)
    claim.make()
    claim.wait(1.0)
    homes = claim.bundles()
    assert [(home.node, home.bundle) for home in homes] == [("a", 0), ("a", 1)] * 2 + [("b", 0)]
    assert [group.name for group in books.made] == ["job pp=0 tp=0", "job pp=1 tp=0", "job spare 4"]
    monkeypatch.setattr(vacancies, "remove_placement_group", books.remove)
    homes[0].give_back()
    homes[0].give_back()
    assert len(books.made) == 3
    homes[1].give_back()
    assert [group.name for group in books.made] == ["job pp=1 tp=0", "job spare 4"]


def test_a_home_in_a_group_of_others_is_not_given_back(monkeypatch):
    monkeypatch.setattr(vacancies, "remove_placement_group", None)
    ActorBundle("theirs", 0).give_back()


def test_who_has_a_part_gives_it_back_while_others_wait(monkeypatch):
    books = Books(monkeypatch, a=2.0)
    mine, other = claim_of(rp.Mesh(pp=2), job="mine"), claim_of(rp.Mesh(pp=2), job="other")
    mine.make()
    books.remove(books.made[1])  # so that each has one of the two
    other.make()
    mine._groups[1] = books.make([{"CPU": 1.0}], strategy="STRICT_PACK", name="mine pp=1", bundle_label_selector=None)
    assert Counter(group.node for group in books.made) == {"a": 2, "": 2}
    books.later = [(20.0, other.give_back)]
    mine.wait(60.0)
    assert all(group.node for group in mine._groups) and books.now < 30.0
    assert any(seconds > 0.5 or 0 < seconds < 0.5 for seconds in books.slept), "it has waited for a random time"


def test_a_part_is_kept_while_nobody_else_waits(monkeypatch):
    books, made = Books(monkeypatch, a=1.0), []
    claim = claim_of(rp.Mesh(pp=2))
    claim.make()
    made = list(claim._groups)
    books.later = [(30.0, lambda: books.rooms.update(b=1.0))]
    claim.wait(60.0)
    assert claim._groups == made
    with pytest.raises(RoomError, match=r"they were not free within 3 s.*; room for 1 of 2 actors is there"):
        books = Books(monkeypatch, a=1.0)
        claim = claim_of(rp.Mesh(pp=2))
        claim.make()
        claim.wait(3.0)


def test_nodes_that_come_are_said(monkeypatch, caplog):
    books = Books(monkeypatch, a=1.0)
    monkeypatch.setattr(claims, "coming_nodes", lambda: 1)
    claim = claim_of(rp.Mesh(pp=2))
    claim.make()
    books.later = [(15.0, lambda: books.rooms.update(b=1.0))]
    with caplog.at_level("INFO", "raypar"):
        claim.wait(60.0)
    (text,) = caplog.messages
    assert "waited for, 50 s are left; room for 1 of 2 actors is there; 1 node is coming" in text


@pytest.mark.usefixtures("cluster")
@pytest.mark.long
def test_what_a_reset_and_a_relayout_do_not_need_is_given_back_and_claimed_again(caplog):
    def mine(job):
        its = (its for its in placement_group_table().values() if its["name"].startswith(job._loading._name))
        return sorted(one["name"].split()[1] for one in its if one["state"] == "CREATED")

    with rp.launch(RUN) as job:
        assert mine(job) == ["pp=0", "pp=1"] and job.num_actors == 2
        losses = [report.loss for report in job.train(1)]
        job.relayout(mesh=rp.Mesh())
        assert len(mine(job)) == job.num_actors == 1
        job.reset(RUN)
        assert len(mine(job)) == job.num_actors == 2
        assert [report.loss for report in job.train(1)] == losses
        job.reset(rp.Run(RUN.model, steps=1), keep_idle=True)
        assert len(mine(job)) == 2
        job.reset(rp.Run(RUN.model, steps=1))
        assert len(mine(job)) == 1
    assert mine(job) == []


PLACED = """
import atexit, json
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table
import raypar as rp

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
atexit.register(cluster.shutdown)
atexit.register(ray.shutdown)
cluster.add_node(num_cpus=4, resources={"disk": 2.0}, labels={"zone": "x"})
cluster.add_node(num_cpus=4, labels={"zone": "y"})
ray.init(address=cluster.address, namespace="raypar", log_to_driver=False, logging_level="ERROR")
zones = {node["NodeID"]: node["Labels"].get("zone", "head") for node in ray.nodes()}
MODEL = rp.GPT(layers=4, hidden=8, heads=2, seq=8)

def run_of(resources, **mesh):
    return rp.Run(MODEL, mesh=rp.Mesh(**mesh), resources=resources, device="cpu")

def placed(resources, **mesh):
    with rp.launch(run_of(resources, **mesh)) as job:
        job.step()
        groups = [its for its in placement_group_table().values() if its["state"] == "CREATED"]
        found = sorted((zones[its["bundles_to_node_id"][0]], its["bundles"][0]) for its in groups)
    return [zone for zone, _ in found], found[0][1]

found = {"asked": placed(rp.Resources(cpus=2, custom={"disk": 1}, labels={"zone": "in(x,z)"}), pp=2)}
for strategy in ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"):
    found[strategy] = placed(rp.Resources(placement_strategy=strategy), pp=3)[0]
for name, resources in (
    ("labels", rp.Resources(labels={"zone": "z"})),
    ("custom", rp.Resources(custom={"disk": 2}, labels={"zone": "y"})),
    ("memory", rp.Resources(memory="900TiB")),
    ("type", rp.Resources(accelerator_type="A100")),
):
    try:
        rp.launch(run_of(resources, pp=2))
    except rp.ConfigError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


@pytest.mark.long
def test_actors_are_where_and_take_what_a_run_asks_for():
    done = subprocess.run([sys.executable, "-c", PLACED], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["asked"] == [["x", "x"], {"CPU": 2.0, "disk": 1.0}]
    assert len({*found["PACK"]}) == len({*found["STRICT_PACK"]}) == 1
    assert len({*found["SPREAD"]}) > 1 and {*found["STRICT_SPREAD"]} == {"head", "x", "y"}
    assert "on nodes with zone=z" in found["labels"] and "has no label zone: room for 0" in found["labels"]
    assert "0 disk (0 free)" in found["custom"] and "has label zone=x: room for 0" in found["custom"]
    assert "GiB memory" in found["memory"] and "accelerator_type:A100" in found["type"]
    assert all("ask for less in resources, use a smaller mesh" in found[one] for one in ("labels", "custom", "memory"))
