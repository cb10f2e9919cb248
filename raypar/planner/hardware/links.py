"""Data sheets of links, by level of the ladder: NVLink, PCIe, InfiniBand, Ethernet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from raypar.planner.hardware.data_sheets import sheet_faults


@dataclass(frozen=True)
class Link:
    """A kind of link between devices.

    Attributes:
        name: Its name.
        bandwidth: Bytes/s in one direction of one device, or of one network adapter.
        latency: Seconds of one hop of a message, however short it is.
        source: Where the bandwidth is from. Latencies are not in data sheets; they are of the order that small
            messages take.
    """

    name: str
    bandwidth: float
    latency: float
    source: str

    def faults(self) -> Iterator[str]:
        """Yield which figures are no figures of a link."""
        if not 1 <= self.bandwidth <= 1e15:
            yield f"link {self.name!r}: bandwidth is {self.bandwidth}: it must be 1 to 1e15 bytes/s"
        if not 0 <= self.latency <= 3600:
            yield f"link {self.name!r}: latency is {self.latency}: it must be 0 to 3,600 s"


_SHEETS = (
    Link("nvlink3", 300e9, 2e-6, "A100: 12 links of 25 GB/s each way, over NVSwitch"),
    Link("nvlink4", 450e9, 2e-6, "H100 and H200: 18 links of 25 GB/s each way, over NVSwitch"),
    Link("nvlink5", 900e9, 2e-6, "B200: 18 links of 50 GB/s each way, over NVSwitch"),
    Link("pcie4", 31.5e9, 5e-6, "PCI Express 4.0, 16 lanes of 16 GT/s, 128b/130b"),
    Link("pcie5", 63e9, 5e-6, "PCI Express 5.0, 16 lanes of 32 GT/s, 128b/130b"),
    Link("ib-hdr", 25e9, 5e-6, "InfiniBand HDR, 200 Gb/s"),
    Link("ib-ndr", 50e9, 5e-6, "InfiniBand NDR, 400 Gb/s"),
    Link("ib-xdr", 100e9, 5e-6, "InfiniBand XDR, 800 Gb/s"),
    Link("ethernet-10", 1.25e9, 30e-6, "10 Gb/s Ethernet"),
    Link("ethernet-25", 3.125e9, 30e-6, "25 Gb/s Ethernet"),
    Link("ethernet-100", 12.5e9, 20e-6, "100 Gb/s Ethernet"),
    Link("ethernet-400", 50e9, 10e-6, "400 Gb/s Ethernet"),
    Link("shm", 4e9, 60e-6, "shared memory of CPU actors, docs/benchmarks.md"),
)

LINKS: Mapping[str, Link] = {link.name: link for link in _SHEETS}

MEASURE = (
    "measure it with two devices at its ends: bandwidth (bytes/s of a message of 1 GB in one direction) and latency "
    "(seconds of a message of 8 bytes), and give both in a cluster file as [links.NAME]"
)


def link_faults(name: str) -> Iterator[str]:
    """Yield a fault if there is no data sheet of a link, with what to measure instead."""
    yield from sheet_faults("link", name, LINKS, MEASURE)
