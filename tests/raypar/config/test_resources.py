"""What a run's actors ask of their nodes: the fields, what is wrong with them, and what follows for threads."""

from __future__ import annotations

import pytest

import raypar as rp
from raypar.actors.machine.this_machine import actor_count_faults
from raypar.actors.specs.resources import num_bytes
from raypar.cluster.placement.devices import ActorResources, share_of
from raypar.cluster.placement.placement import is_selected, wants
from raypar.config.run import reset_faults
from raypar.reporting.summary import plan_rows
from raypar.schedules import build

RUN = rp.recipe("gpt-tiny")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *[("8GiB", 8 << 30), ("500MB", 500_000_000), ("1.5 KiB", 1536), ("12B", 12), (" 2TiB ", 2 << 40)],
        *[("8 bananas", 0), ("8", 0), ("GiB", 0), ("-1GB", 0), ("8gib", 0), ("", 0)],
    ],
)
def test_sizes_have_a_unit(text, size):
    assert num_bytes(text) == size


@pytest.mark.parametrize(
    ("resources", "says"),
    [
        (
            {"memory": "8 bananas"},
            "resources.memory is '8 bananas': it must be a number of bytes with its unit",
        ),
        ({"cpus": 0.0}, "resources.cpus is 0.0: it must be above 0"),
        ({"cpus": 1.5}, "resources.cpus is 1.5, but above 1 Ray takes whole numbers only: set it to 1"),
        ({"gpus": 2.0}, "resources.gpus is 2.0: it must be at most 1"),
        ({"custom": {"disk": 2.5}}, "resources.custom['disk'] is 2.5, but above 1 Ray takes whole numbers only"),
        ({"custom": {"CPU": 2.0}}, "resources.custom has 'CPU', which has a field of its own: set resources.cpus"),
        ({"custom": {"disk": 0.0}}, "resources.custom['disk'] is 0.0: it must be above 0"),
        ({"labels": {"zone": 3}}, "resources.labels['zone'] is 3: it must be a text"),
        (
            {"placement_strategy": "RANDOM"},
            "resources.placement_strategy is 'RANDOM': it must be 'PACK', 'SPREAD'",
        ),
    ],
)
def test_what_nobody_can_have_is_refused_with_its_fix(resources, says):
    (fault,) = rp.faults(rp.Run(resources=rp.Resources(**resources)))
    assert fault.startswith(says)


def test_gpus_do_not_go_with_cpus_alone():
    (fault,) = rp.faults(rp.Run(device="cpu", resources=rp.Resources(gpus=0.5)))
    assert fault == "resources.gpus is 0.5, but device is 'cpu': leave one of them out"
    with pytest.raises(rp.ConfigError, match=r"resources.gpus is 1, but the cluster has no GPU: use device 'cpu'"):
        share_of("auto", rp.Resources(gpus=1.0), 2, 0, built=True, grows=False)
    assert share_of("auto", rp.Resources(gpus=0.5), 2, 1, built=True, grows=False) == ActorResources("cuda", 0.5)


def test_an_actor_takes_what_is_asked_for_and_computes_with_as_many_threads():
    asked = rp.Resources(cpus=4.0, memory="1GiB", custom={"disk": 1.0}, accelerator_type="A100", labels={"zone": "x"})
    share = share_of("cpu", asked, 2, 0, built=False, grows=False)
    assert wants(share) == {"CPU": 4.0, "memory": 2.0**30, "disk": 1.0, "accelerator_type:A100": 0.001}
    assert share.labels == {"zone": "x"}
    run = rp.recipe("gpt-tiny", resources=asked)
    assert run.num_threads == 4 and rp.recipe("gpt-tiny", resources=asked, threads=2).num_threads == 2
    assert RUN.num_threads == rp.recipe("gpt-tiny", resources=rp.Resources(cpus=0.5)).num_threads == 1
    told = "4 CPUs and 1GiB of memory and 1 disk on nodes with A100 and zone=x; it computes with 4 threads"
    assert dict(plan_rows(run, build("1f1b", 1, run.microbatches)))["each actor takes"] == told
    assert "each actor takes" not in dict(plan_rows(RUN, build("1f1b", 1, RUN.microbatches)))


def test_a_ray_of_raypars_own_has_room_for_fewer_of_them(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("raypar.actors.machine.this_machine.num_cores", lambda: 2)
    assert not [*actor_count_faults(4, 4.0)]
    (fault,) = actor_count_faults(5, 4.0)
    assert "5 actors are more than the 4 that this machine of 2 cores takes with resources.cpus=4: use a" in fault


def test_a_reset_keeps_what_actors_have_taken():
    other = rp.recipe("gpt-tiny", resources=rp.Resources(cpus=2.0))
    assert not [*reset_faults(other, "cpu", other)]
    (fault,) = reset_faults(other, "cpu", RUN)
    assert fault.startswith("reset keeps the actors, which can't take other resources: leave resources as they are")


@pytest.mark.parametrize(
    ("value", "wanted", "is_so"),
    [
        *[("x", "x", True), ("x", "y", False), (None, "x", False)],
        *[("x", "!x", False), ("y", "!x", True), (None, "!x", True)],
        *[("x", "in(x,y)", True), ("z", "in(x, y)", False), ("z", "!in(x,y)", True), ("y", "!in(x,y)", False)],
    ],
)
def test_labels_are_selected_as_ray_does(value, wanted, is_so):
    assert is_selected(value, wanted) == is_so
