"""Clusters from flags and tables, with all faults at once."""

import pytest

from raypar.planner.hardware.cluster_file import cluster_from, cluster_of

OWN = {"name": "mine", "inside": "nvlink4", "half": 1e14, "full": 1e13, "memory": 32e9, "bandwidth": 1e12}


def test_usual_nodes_are_filled():
    cluster = cluster_of(16, "h100").cluster
    assert (cluster.nodes, cluster.each_node, cluster.inside.name, cluster.between.name) == (2, 8, "nvlink4", "ib-ndr")
    assert str(cluster) == "16 h100 on 2 nodes: nvlink4 inside of nodes, 8 x ib-ndr between them"


def test_a_number_that_fills_no_nodes_names_those_that_do():
    (fault,) = cluster_of(20, "h100").faults
    assert "use 18 or 21" in fault


def test_a_table_has_links_and_devices_of_its_own():
    figures = {"half": 1e14, "full": 1e13, "memory": 32e9, "bandwidth": 1e12}
    device = {"name": "mine", "inside": "wire", **figures}
    table = {"nodes": 2, "each_node": 4, "device": device, "links": {"wire": {"bandwidth": 1e9, "latency": 1e-6}}}
    cluster = cluster_from(table).cluster
    assert cluster.device.half == 1e14
    assert cluster.inside.bandwidth == 1e9


def test_all_holes_are_told_at_once():
    table = {
        "node": 2,
        "each_node": "8",
        "device": {"name": "mine", "half": 1e14},
        "links": {"wire": {"bandwidth": 1e9}},
        "between": "wir",
    }
    told = "\n".join(cluster_from(table).faults)
    for part in ("did you mean 'nodes'", "nodes is missing", "each_node is '8'", "device lacks full, memory", "wire"):
        assert part in told
    assert cluster_from(table).cluster is None


def test_figures_that_are_none_are_told_with_the_holes():
    links = {"slow": {"bandwidth": -5.0, "latency": 1e-5}, "unused": {"bandwidth": 1e9, "latency": float("inf")}}
    figures = {"nodes": 0, "adapters": -2, "each_rack": 3, "device": "v100", "between": "slow", "links": links}
    told = "\n".join(cluster_from(figures).faults)
    for part in ("each_node is missing", "nodes is 0", "adapters is -2", "give across", "'v100'", "'slow'", "'unused'"):
        assert told.count(part) == 1


@pytest.mark.parametrize("device", [3, ["a100"]])
def test_a_device_of_another_kind_is_a_fault(device):
    assert "give a name or a table" in cluster_from({"nodes": 1, "each_node": 1, "device": device}).faults[0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"nodes": 1 << 60}, "are more than the 1,048,576 that are planned"),
        ({"between": "slow", "links": {"slow": {"bandwidth": True, "latency": 1e-5}}}, "lacks the number bandwidth"),
        (
            {"between": "slow", "links": {"slow": {"bandwidth": 1e9, "latency": 1e-5, "width": 4}}},
            "there is no links.slow.width: a link has bandwidth and latency",
        ),
        ({"adapters": 10**401}, "give a whole number"),
        ({"between": "slow", "links": {"slow": {"bandwidth": 10**401, "latency": 0}}}, "lacks the number bandwidth"),
        ({"between": "slow", "links": {"slow": {"bandwidth": 5e-324, "latency": 0}}}, "it must be 1 to 1e15 bytes/s"),
        ({"between": "slow", "links": {"slow": {"bandwidth": 1e9, "latency": 1e308}}}, "it must be 0 to 3,600 s"),
        ({"device": OWN | {"half": 5e-324}}, "half is 5e-324: it must be 1e-06 to 1e+30"),
        ({"replicas": 4, "actors_per_node": 8}, "as a cluster of raypar simulate has"),
        ({"device": OWN | {"units": 10.5}}, "device.units is 10.5: give a whole number"),
        ({"device": OWN | {"half": True}}, "device.half is True: give a number"),
        ({"device": "H100x"}, "did you mean 'h100'?"),
    ],
)
def test_what_is_no_figure_is_told(changes, told):
    found = cluster_from({"nodes": 2, "each_node": 8, "device": "h100"} | changes)
    assert found.cluster is None
    assert told in "\n".join(found.faults)


def test_a_device_is_named_in_any_case():
    assert cluster_of(8, "H100") == cluster_of(8, "h100")
    found = cluster_from({"nodes": 2, "each_node": 8, "device": "H100"}).cluster
    assert found is not None and found.device.name == "h100"
