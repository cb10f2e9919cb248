"""The actor that measures products, attention, memory and group operations on the nodes of a run's actors."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from raypar.planner.calibrated.calibration import AttentionTime, GroupOp, GroupTime, MeasuredProduct

ROWS = (32, 128, 512)
WEIGHTS = ((64, 64), (64, 256), (256, 64), (256, 256), (256, 1024), (1024, 256))  # inner, columns
LENGTHS = (64, 128, 256, 512)
GROUP_BYTES = (4 << 10, 64 << 10, 1 << 20, 8 << 20)
GROUP_OPS: tuple[GroupOp, ...] = ("all_reduce", "all_gather", "p2p")
_HEADS, _WIDTH = 8, 32  # heads times samples, and the width of a head
_MEMORY = 32 << 20  # bytes of a tensor that no cache holds
_LEAST, _REPEATS = 4e-3, 7  # least seconds of a sample; number of samples, the fastest of which counts


class Meter:
    """Measures on the node on which it runs."""

    def setup(self, device: str, threads: int) -> str:
        """Prepare the device, and return its name.

        Args:
            device: "cpu" or "cuda".
            threads: CPU threads.
        """
        import torch

        torch.set_num_threads(threads)
        self._device = torch.device(device)
        torch.manual_seed(0)
        return torch.cuda.get_device_name(0) if device == "cuda" else ""

    def product(self, rows: int, inner: int, columns: int) -> MeasuredProduct:
        """Measure a product as a run's layers compute it, and the two products of its backward."""
        import torch

        from raypar.actors.layers.linear import linear_of

        layer = linear_of("auto")(inner, columns, bias=False, device=self._device)
        x = torch.randn(rows, inner, device=self._device, requires_grad=True)
        gradient = torch.ones(rows, columns, device=self._device)
        forward, backward = self._both(lambda: layer(x), gradient)
        return MeasuredProduct(rows, inner, columns, forward, backward)

    def attention(self, tokens: int) -> AttentionTime:
        """Measure the core of causal attention as a run's layers compute it."""
        import torch

        from raypar.actors.layers.attention.attention import Core

        core = Core("blocks", 0.0, None)
        shape = (1, _HEADS, tokens, _WIDTH)
        q, k, v = (torch.randn(shape, device=self._device, requires_grad=True) for _ in range(3))
        forward, backward = self._both(lambda: core(q, k, v), torch.ones(shape, device=self._device))
        return AttentionTime(tokens, _HEADS, _WIDTH, forward, backward)

    def memory(self) -> float:
        """Measure the bytes per second that are read and written in tensors larger than all caches."""
        import torch

        source = torch.zeros(_MEMORY // 4, device=self._device)
        target = torch.empty_like(source)
        return 2 * _MEMORY / self._seconds(lambda: target.copy_(source))

    def join(self, name: str, size: int, rank: int) -> None:
        """Join a group as the actors of a run do."""
        from raypar.actors.collective.ray.ray_groups import join

        self._group = join(name, "calibration", size, rank, 60.0, None, self._device)

    def group(self, op: GroupOp, count: int, nodes: int) -> GroupTime:
        """Measure an operation of the group, which all members call.

        Args:
            op: The operation.
            count: Bytes of the whole tensor.
            nodes: Number of the members' nodes.
        """
        import torch

        group, numbers = self._group, count // 4
        whole = group.empty(numbers, torch.float32).zero_()
        part = group.empty(max(1, numbers // group.size), torch.float32).zero_()
        gathered = whole[: part.numel() * group.size]

        def there_and_back() -> None:
            if group.rank == 0:
                group.send(whole, 1).wait()
                group.recv(whole, 1).wait()
            elif group.rank == 1:
                group.recv(whole, 0).wait()
                group.send(whole, 0).wait()

        work: dict[GroupOp, Callable[[], object]] = {
            "all_reduce": lambda: group.all_reduce(whole).wait(),
            "all_gather": lambda: group.all_gather(gathered, part).wait(),
            "p2p": there_and_back,
        }
        repeats = max(3, min(50, (16 << 20) // count))
        seconds = self._fastest(work[op], repeats, lambda: group.barrier().wait())
        return GroupTime(op, group.size, nodes, count, seconds / 2 if op == "p2p" else seconds)

    def leave(self, name: str) -> None:
        """Leave the group."""
        from raypar.actors.collective.ray.ray_groups import leave

        leave(name)

    def _both(self, forward: Callable[[], Any], gradient: Any) -> tuple[float, float]:
        """Return the seconds of a forward and of its backward."""
        alone = self._seconds(forward)
        return alone, max(self._seconds(lambda: forward().backward(gradient)) - alone, 1e-9)

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of some work: the fastest of several samples, each of many repetitions."""
        work()
        self._synchronize()
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < _LEAST or not count:
            work()
            count += 1
        self._synchronize()
        return self._fastest(work, count, lambda: None)

    def _fastest(self, work: Callable[[], object], count: int, before: Callable[[], object]) -> float:
        """Return the seconds of some work: of the fastest sample of so many repetitions, ``before`` each."""
        taken: list[float] = []
        for _ in range(_REPEATS):
            before()
            begin = time.perf_counter()
            for _ in range(count):
                work()
            self._synchronize()
            taken.append((time.perf_counter() - begin) / count)
        return min(taken)

    def _synchronize(self) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize()


def slowest(times: Sequence[GroupTime], op: GroupOp) -> GroupTime:
    """Return the slowest member's time; for p2p that of the slower one of the two that communicate."""
    active = times[:2] if op == "p2p" else times
    return max(active, key=lambda one: one.seconds)
