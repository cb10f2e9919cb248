"""Data sheets of devices and links, and the one constant of each device: the part of them that a training step reaches.

``reached`` is a device's calibration constant: FLOP/s, bytes/s of its memory and bytes/s of its links are all
multiplied by it. Those of the A100 and of the H100 make published steps right on average (docs/planning.md). The H200
and the B200 take the H100's, and the L4 the A100's, as nothing published was used to set theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Literal

from raypar.schedules.nearest_name import did_you_mean

#: The constant of the A100, by which the ten rows of Narayanan et al. 2021, table 1, are right on average.
REACHED = 0.796
#: The constant of the H100, by which the two steps of Llama Team 2024, table 4, with 8,192 tokens are right on average.
REACHED_H100 = 0.707
_LEAST, _LARGEST = 1e-6, 1e30  # of a figure


def sheet_faults(kind: str, name: str, known: Mapping[str, object], measure: str) -> Iterator[str]:
    """Yield a fault if there is no data sheet of a name, with what to measure instead.

    Args:
        kind: What it is of: "device" or "link".
        name: The name.
        known: The data sheets by name.
        measure: What to measure of one that has none.
    """
    if name not in known:
        others = f"known are {', '.join(known)}; else {measure}"
        fix = did_you_mean(name.lower(), known, others, spelled=repr, both=True)
        yield f"there is no data sheet of a {kind} {name!r}: {fix}"


@dataclass(frozen=True)
class Device:
    """A kind of device.

    Attributes:
        name: Its name.
        half: FLOP/s of products in bf16 or fp16, without sparsity.
        full: FLOP/s of products in fp32.
        memory: Bytes of its memory.
        bandwidth: Bytes/s of its memory.
        inside: Name of the link between two of them in a node.
        each_node: How many a node usually has.
        reached: The part of these figures that a training step reaches.
        kernel: Seconds that an operation takes at least, however small it is.
        units: Multiprocessors, each of which makes a tile of a product at a time; 0: products are not made in tiles.
        source: Where the figures are from.
    """

    name: str
    half: float
    full: float
    memory: float
    bandwidth: float
    inside: str
    each_node: int = 8
    reached: float = REACHED
    kernel: float = 5e-6
    units: int = 0
    source: str = ""

    @property
    def kind(self) -> Literal["cpu", "cuda"]:
        """Whether actors on it compute on a CPU or a GPU."""
        return "cpu" if self.name == "cpu" else "cuda"

    def faults(self) -> Iterator[str]:
        """Yield which figures are no figures of a device."""
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, float | int):
                continue
            if field.name in ("kernel", "units") and not 0 <= value <= _LARGEST:
                yield f"device {self.name!r}: {field.name} is {value}: it must be 0 to {_LARGEST:g}"
            elif field.name not in ("kernel", "units") and not _LEAST <= value <= _LARGEST:
                yield f"device {self.name!r}: {field.name} is {value}: it must be {_LEAST:g} to {_LARGEST:g}"
        if self.reached > 1:
            yield f"device {self.name!r}: reached is {self.reached}: it is a part of the data sheet, 1 at the most"


_A100 = Device(
    "a100", 312e12, 19.5e12, 80e9, 2039e9, "nvlink3", units=108, source="NVIDIA A100 80GB SXM data sheet, 2021"
)
_H100 = Device(
    "h100", 989.4e12, 66.9e12, 80e9, 3350e9, "nvlink4", 8, REACHED_H100, 5e-6, 132, "NVIDIA H100 SXM data sheet, 2023"
)
_DEVICE_SHEETS = (
    _A100,
    replace(_A100, name="a100-40gb", memory=40e9, bandwidth=1555e9, source="NVIDIA A100 40GB SXM data sheet, 2020"),
    _H100,
    replace(_H100, name="h200", memory=141e9, bandwidth=4800e9, source="NVIDIA H200 SXM data sheet, 2024"),
    Device(
        "b200", 2250e12, 75e12, 180e9, 7700e9, "nvlink5", 8, REACHED_H100, 5e-6, 148, "NVIDIA HGX B200 data sheet, 2024"
    ),
    Device("l4", 121e12, 30.3e12, 24e9, 300e9, "pcie4", units=58, source="NVIDIA L4 data sheet, 2023"),
    # A core of docs/benchmarks.md (2026-11-24), measured, so that it reaches all of it; fp32 is its fastest dtype.
    Device("cpu", 80e9, 80e9, 8e9, 10e9, "shm", 16, 1.0, 2e-5, source="a core of an AMD EPYC, docs/benchmarks.md"),
)
DEVICES: Mapping[str, Device] = {device.name: device for device in _DEVICE_SHEETS}
MEASURE_DEVICE = (
    "measure on one device: half and full (FLOP/s of an 8192 x 8192 x 8192 product in bf16 and fp32), memory (bytes), "
    "bandwidth (bytes/s of a copy of 1 GB, read and written), and give them in a cluster file as [device]"
)


def data_sheet_faults(name: str) -> Iterator[str]:
    """Yield a fault if there is no data sheet of a device, in any case, with what to measure instead."""
    if name.lower() not in DEVICES:
        yield from sheet_faults("device", name, DEVICES, MEASURE_DEVICE)


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


_LINK_SHEETS = (
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
LINKS: Mapping[str, Link] = {link.name: link for link in _LINK_SHEETS}
MEASURE_LINK = (
    "measure it with two devices at its ends: bandwidth (bytes/s of a message of 1 GB in one direction) and latency "
    "(seconds of a message of 8 bytes), and give both in a cluster file as [links.NAME]"
)


def link_faults(name: str) -> Iterator[str]:
    """Yield a fault if there is no data sheet of a link, with what to measure instead."""
    yield from sheet_faults("link", name, LINKS, MEASURE_LINK)
