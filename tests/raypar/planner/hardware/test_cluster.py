"""A cluster on paper: routes by level, and what is wrong with its figures."""

from dataclasses import replace

import pytest

from raypar.planner.hardware.cluster import Cluster
from raypar.planner.hardware.data_sheets import DEVICES, LINKS, data_sheet_faults, link_faults

DEVICE = replace(DEVICES["a100"], reached=1.0)
CLUSTER = Cluster(DEVICE, 4, 8, LINKS["nvlink3"], LINKS["ib-hdr"], 8)
GB = 1e9


@pytest.mark.parametrize(
    ("members", "stride", "bandwidth"),
    [
        (8, 1, 300 * GB),  # one node
        (2, 4, 300 * GB),
        (4, 8, 25 * GB),  # one on each node, with an adapter of its own
        (16, 2, 100 * GB),  # four on each node share four adapters
        (32, 1, 200 * GB),  # all eight
    ],
)
def test_a_group_has_the_adapters_of_its_members_on_a_node(members, stride, bandwidth):
    assert CLUSTER.route(members, stride).bandwidth == pytest.approx(bandwidth)


def test_one_adapter_is_shared_by_all_devices_of_a_node():
    shared = replace(CLUSTER, adapters=1)
    assert shared.route(4, 8).bandwidth == pytest.approx(25 * GB / 8)


def test_groups_across_racks_have_the_link_across():
    racks = replace(CLUSTER, each_rack=2, across=LINKS["ethernet-10"])
    assert racks.route(2, 8).bandwidth == pytest.approx(25 * GB)
    assert racks.route(2, 16).bandwidth == pytest.approx(1.25 * GB)


def test_the_data_sheets_are_sound():
    assert not [fault for device in DEVICES.values() for fault in device.faults()]
    assert not [fault for link in LINKS.values() for fault in link.faults()]
    assert {device.inside for device in DEVICES.values()} <= set(LINKS)


def test_all_faults_of_a_cluster_are_told_at_once():
    wrong = replace(
        CLUSTER, nodes=0, device=replace(DEVICE, half=-1.0, reached=1.5), between=replace(LINKS["ib-hdr"], bandwidth=0)
    )
    told = "\n".join(wrong.faults())
    for fault in ("nodes is 0", "half is -1.0", "reached is 1.5", "bandwidth is 0"):
        assert fault in told


def test_unknown_names_say_what_to_measure():
    (fault,) = data_sheet_faults("h10")
    assert "h100" in fault
    assert "measure" in fault
    (fault,) = link_faults("nvlink")
    assert "did you mean" in fault
    assert "[links.NAME]" in fault
