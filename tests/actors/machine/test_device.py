"""Places: what a CPU does at no cost, and what a GPU is asked for. The GPU is played by clocks."""

from __future__ import annotations

import types
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from raypar.actors.machine import device as places
from raypar.actors.machine.device import ComputeDevice, Cuda, PeakMemory, device_of
from raypar.actors.specs.results import Span
from raypar.schedules.action import STEP
from tests.support.descriptors import descriptors


def test_a_host_has_everything_where_it_is():
    host, values = ComputeDevice(), (torch.ones(2),)
    assert host.to(values) is values
    spans = [Span(STEP, host.mark(), host.mark())]
    host.finish()
    assert host.spans(spans) is spans
    assert host.seconds(1.5) == 1.5
    host.begin()
    assert host.peak() > 0


def test_layers_draw_the_same_after_the_same_seed():
    host = ComputeDevice()
    host.seed(3)
    first = torch.rand(4)
    host.seed(3)
    assert torch.equal(first, torch.rand(4))


def test_a_process_without_a_gpu_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert device_of("cpu").kind == "cpu"
    with pytest.raises(RuntimeError, match=r"torch .* finds no GPU in this process"):
        device_of("cuda")


@pytest.fixture
def gpu(monkeypatch):
    """A Cuda whose stream comes to each event 10 s after the one before; ``calls`` are what torch was asked for."""
    calls, events = [], []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self, stream):
            events.append(self)
            self.at = 10.0 * len(events)

        def synchronize(self):
            calls.append("synchronize")

        def elapsed_time(self, other):
            return 1e3 * (other.at - self.at)

    seeds = types.SimpleNamespace(manual_seed=lambda seed: calls.append(f"seed {seed}"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "default_generators", (None, seeds))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append(f"set {device}"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(f"reset {device}"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 7)
    monkeypatch.setattr(places.time, "perf_counter", lambda: 1000.0)
    found = Cuda(1)
    found.calls = calls
    return found


def test_marks_are_events_that_are_timed_when_the_step_is_over(gpu):
    spans = [Span(STEP, gpu.mark(), gpu.mark()), Span(STEP, gpu.mark(), gpu.mark(), 5, 2)]
    assert gpu.calls == [], "nobody waited"
    gpu.finish()
    assert gpu.calls == ["synchronize"]
    assert gpu.spans(spans) == [Span(STEP, 960.0, 970.0), Span(STEP, 980.0, 990.0, 5, 2)]
    gpu.clock_offset = 7.0
    assert gpu.spans(spans) == [Span(STEP, 967.0, 977.0), Span(STEP, 987.0, 997.0, 5, 2)], "of the driver's clock"


def test_a_cpus_spans_are_on_the_drivers_clock():
    host = ComputeDevice()
    assert host.spans([Span(STEP, 1.0, 2.0)]) == [Span(STEP, 1.0, 2.0)]
    host.clock_offset = -0.5
    assert host.spans([Span(STEP, 1.0, 2.0, 5, 2)]) == [Span(STEP, 0.5, 1.5, 5, 2)]


def test_every_step_has_its_own_marks_and_peak(gpu):
    gpu.mark()
    gpu.begin()
    assert (gpu.mark(), gpu.peak()) == (0.0, 7)
    assert gpu.calls == ["reset cuda:1"]


def test_both_generators_are_seeded(gpu):
    gpu.seed(5)
    first = torch.rand(2)
    gpu.seed(5)
    assert torch.equal(first, torch.rand(2))
    assert gpu.calls == ["seed 5", "seed 5"]


def test_a_thread_computes_on_the_gpu_once_it_has_entered(gpu):
    gpu.enter()
    assert gpu.calls == ["set cuda:1"]


def test_only_what_is_elsewhere_is_moved(gpu, monkeypatch):
    gpu.device = torch.device("meta")
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor.clone())
    here, there = torch.ones(2, device="meta"), torch.ones(3)
    first, second = gpu.to((here, there))
    assert first is here
    assert (second.device.type, second.shape) == ("meta", (3,))
    modules = [nn.Linear(2, 2), nn.BatchNorm1d(3)]
    gpu.settle(modules)
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_who_measures_memory_closes_its_files():
    before, peak = descriptors(), PeakMemory()
    assert len(descriptors() - before) == 2
    del peak
    assert not descriptors() - before


def test_a_peak_is_read_after_thousands_of_groups(monkeypatch):
    groups = b"Name:\tpython\nGroups:\t" + b"1000000 " * 9000
    status = groups + b"\nVmPeak:\t 99 kB\nVmHWM:\t  123456 kB\nVmRSS:\t 9 kB\n"
    monkeypatch.setattr(places.os, "pread", lambda file, size, start: status[start : start + size])
    assert PeakMemory().read() == 123456 << 10
    for cut in range(1, 40):  # the end of a read within the line
        monkeypatch.setattr(places, "_STATUS", status.index(b"VmPeak") + cut)
        assert PeakMemory().read() == 123456 << 10


def test_a_system_that_resets_no_peak_tells_that_of_the_whole_process(monkeypatch):
    def refused(*_):
        raise FileNotFoundError

    known = PeakMemory().read()
    monkeypatch.setattr(places.os, "open", refused)
    monkeypatch.setattr(places.Path, "read_text", refused)
    peak = PeakMemory()
    peak.reset()
    assert peak.read() == places.resident_memory() == places.largest_memory()
    assert 0.9 * known <= peak.read() < 100 * known  # KiB that were taken for bytes would be far off
    monkeypatch.setattr(places, "_MAXIMUM_UNIT", 1)  # macOS, where the maximum is in bytes
    assert peak.read() == places.resource.getrusage(places.resource.RUSAGE_SELF).ru_maxrss


@pytest.fixture
def products():
    """What chooses how torch multiplies fp32 on GPUs; it is afterwards as before."""
    chosen = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    before = [one.fp32_precision for one in chosen]
    yield chosen
    for one, value in zip(chosen, before, strict=True):
        one.fp32_precision = value


def test_fp32_is_multiplied_in_tf32_on_gpus_alone_and_only_if_asked_for(products):
    for tf32, name in ((True, "tf32"), (False, "ieee")):
        Cuda.choose_products(types.SimpleNamespace(), tf32=tf32)
        assert {one.fp32_precision for one in products} == {name}
    ComputeDevice().choose_products(tf32=True)
    assert {one.fp32_precision for one in products} == {"ieee"}


@pytest.mark.parametrize(("capability", "takes"), [((8, 0), False), ((8, 9), True), ((9, 0), True)])
def test_a_gpu_that_does_not_multiply_fp8_says_so_by_name(capability, takes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100")
    gpu = types.SimpleNamespace(device=torch.device("cuda", 0))
    with nullcontext() if takes else pytest.raises(ValueError, match="this GPU, NVIDIA A100, does not multiply: set"):
        Cuda.demand_fp8(gpu)
