"""Actors in a placement group of others: a given one, or that of the task that launches."""

from __future__ import annotations

import pytest
import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

import raypar as rp
from raypar.cluster.placement import given_group
from raypar.cluster.placement.devices import ActorResources
from raypar.cluster.placement.given_group import chosen_bundles, free_bundles
from raypar.errors import RoomError

pytestmark = pytest.mark.usefixtures("cluster")
RUN = rp.Run(rp.GPT(layers=2, hidden=16, heads=2, seq=8), mesh=rp.Mesh(pp=2), microbatches=2, steps=2, timeout=20.0)


@pytest.fixture
def group():
    made = placement_group([{"CPU": 1.0}, {"CPU": 2.0}], strategy="PACK", name="a quota")
    assert made.wait(30)
    yield made
    remove_placement_group(made)


def groups_that_are_there():
    return {its["name"] for its in placement_group_table().values() if its["state"] != "REMOVED"}


def test_bundles_are_filled_in_their_order():
    bundles = {1: {"CPU": 2.5}, 0: {"CPU": 1.0}, 2: {"CPU": 0.5, "GPU": 1.0}, 3: {"CPU": 4.0, "GPU": 1.0}}
    assert chosen_bundles(bundles, ActorResources("cpu", 0.0), 9) == [0, 1, 1, 3, 3, 3, 3]
    assert chosen_bundles(bundles, ActorResources("cpu", 0.0), 2) == [0, 1]
    assert chosen_bundles(bundles, ActorResources("cuda", 0.5), 9) == [3, 3]


def test_a_job_is_inside_a_given_group_which_stays(group):
    before = groups_that_are_there()
    with rp.launch(RUN, placement_group=group) as job:
        assert groups_that_are_there() == before, "no claim of its own"
        job.train()
        assert {home.group for home in job._lifetime.actors.bundles} == {group}
        assert [home.bundle for home in job._lifetime.actors.bundles] == [0, 1]
    assert placement_group_table(group)["state"] == "CREATED"


@pytest.mark.long
def test_a_job_is_inside_the_group_of_the_task_that_launches_it(group):
    @ray.remote(num_cpus=1)
    def trial():
        with rp.launch(RUN) as job:
            losses = [report.loss for report in job.train()]
            return losses, [home.bundle for home in job._lifetime.actors.bundles], groups_that_are_there()

    before = groups_that_are_there()
    inside = PlacementGroupSchedulingStrategy(group, 0, placement_group_capture_child_tasks=True)
    losses, bundles, there = ray.get(trial.options(scheduling_strategy=inside).remote(), timeout=60)
    assert bundles == [1, 1] and there == before, "bundle 0 has the task itself"
    with rp.launch(RUN) as job:
        assert losses == [report.loss for report in job.train()]


@pytest.mark.long
def test_a_group_of_the_task_without_room_is_left_for_one_of_the_jobs_own(group):
    @ray.remote(num_cpus=2)
    def trial():
        with rp.launch(RUN) as job:
            return {home.group.id.hex() for home in job._lifetime.actors.bundles}

    inside = PlacementGroupSchedulingStrategy(group, 1, placement_group_capture_child_tasks=True)
    found = ray.get(trial.options(scheduling_strategy=inside).remote(), timeout=60)
    assert group.id.hex() not in found


def test_what_the_task_has_is_never_free_for_its_actors(group, monkeypatch):
    whole = {f"CPU_group_{number}_{group.id.hex()}": amount for number, amount in enumerate((1.0, 2.0))}
    monkeypatch.setattr(given_group, "free_resources", lambda: {"a node": whole})  # as before the task was there
    monkeypatch.setattr(given_group, "held_resources", lambda: {f"CPU_group_1_{group.id.hex()}": 2.0})
    assert free_bundles(group, {0: {"CPU": 1.0}, 1: {"CPU": 2.0}}) == {0: {"CPU": 1.0}, 1: {"CPU": 0.0}}


def test_a_group_that_is_too_small_says_what_each_bundle_has(group):
    says = r"has room for 3 of 4 actors, each with 1 CPU \(bundle 0 1 CPU \(1 free\); bundle 1 2 CPUs \(2 free\)\)"
    with pytest.raises(RoomError, match=says):
        rp.launch(rp.Run(RUN.model, mesh=rp.Mesh(dp=2, pp=2)), placement_group=group)


def test_a_removed_group_is_refused():
    made = placement_group([{"CPU": 2.0}])
    assert made.wait(30)
    remove_placement_group(made)
    with pytest.raises(rp.ConfigError, match=r"placement_group \w+ was removed: give one that is there"):
        rp.launch(RUN, placement_group=made)


def test_what_is_no_group_is_refused_with_the_other_arguments():
    with pytest.raises(rp.ConfigError, match="placement_group is 'mine'"):
        rp.launch(RUN, placement_group="mine", wait_for_room=-1.0)
