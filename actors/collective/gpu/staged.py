"""Groups of actors that share a GPU, and not over NCCL: tensors are copied through the host and a CPU group."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from raypar.actors.collective.flat_cut import FlatCut
from raypar.actors.collective.gpu.group import demand_device
from raypar.actors.collective.group import Finish, Group, GroupMember, Start
from raypar.actors.collective.reductions import ReduceOp

log = logging.getLogger(__name__)


class StagedGroup(Group):
    """A group for tensors on ``device`` that communicates through a CPU group.

    An op copies its inputs to pinned memory when it is called, which blocks until the GPU has computed them. Its
    outputs are copied back on torch's current stream when it is waited for. Order of additions, tags and deadlines are
    those of the CPU group. Both groups share one ledger, in which an op counts once.

    Args:
        inner: The CPU group. It also serves as ``host``: it can be used directly if all members do so in the same
            order.
        device: Device of the tensors.
    """

    def __init__(self, inner: Group, device: torch.device) -> None:
        one = GroupMember(inner.name, inner.axis, inner.rank, inner.size, inner.timeout, ledger=inner.ledger)
        super().__init__(one)
        self.device, self.host, self._inner = device, inner, inner
        if device.type == "cuda":
            _warn()

    def abort(self) -> None:
        self._closed = True
        self._inner.abort()

    def _starter(self, op: str, peer: int | None, start: Start, args: tuple[object, ...]) -> Start:
        demand_device(self.name, op, self.device, args)
        return start

    def _staged(self, tensor: Tensor, *, is_read: bool) -> Tensor:
        """Return the host's tensor for one of an op, a copy of it unless the op only writes into it."""
        return self._read(tensor) if is_read else self._host_like(tensor)

    def _all_reduce_bytes(self, tensor: Tensor) -> int:
        return self._inner._all_reduce_bytes(tensor)

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Finish:
        return self._inner._all_reduce(tensor, op)

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Finish:
        return self._inner._all_gather(out, tensor)

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Finish:
        return self._inner._reduce_scatter(out, tensor, op)

    def _reduce_scatter_cut(self, out: Tensor | None, flat: Tensor, cut: FlatCut) -> Finish:
        return self._inner._reduce_scatter_cut(out, flat, cut)

    def _all_gather_cut(self, flat: Tensor, part: Tensor | None, cut: FlatCut) -> Finish:
        return self._inner._all_gather_cut(flat, part, cut)

    def _all_to_all(self, out: Tensor, tensor: Tensor, outs: list[int], ins: list[int]) -> Finish:
        return self._inner._all_to_all(out, tensor, outs, ins)

    def _broadcast(self, tensor: Tensor, root: int) -> Finish:
        return self._inner._broadcast(tensor, root)

    def _reduce(self, tensor: Tensor, root: int, op: ReduceOp) -> Finish:
        return self._inner._reduce(tensor, root, op)

    def _gather(self, out: Tensor | None, tensor: Tensor, root: int) -> Finish:
        return self._inner._gather(out, tensor, root)

    def _scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> Finish:
        return self._inner._scatter(out, tensor, root)

    def _barrier(self) -> Finish:
        return self._inner._barrier()

    def _send(self, tensor: Tensor, dst: int, tag: int) -> Finish:
        return self._inner._send(tensor, dst, tag)

    def _recv(self, tensor: Tensor, src: int, tag: int) -> Finish:
        return self._inner._recv(tensor, src, tag)

    def _host_like(self, tensor: Tensor) -> Tensor:
        """Allocate a contiguous host tensor of this shape and dtype.

        On GPUs it is pinned, and torch reuses freed pinned memory.
        """
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self.device.type == "cuda")

    def _read(self, tensor: Tensor) -> Tensor:
        """Copy a tensor to the host and wait for the copy: the CPU group reads it at once."""
        host = self._host_like(tensor)
        host.copy_(tensor, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).record_event().synchronize()
        return host


@functools.cache
def _warn() -> None:
    """Log once per process that transfers are slow."""
    log.warning(
        "actors share a GPU, or have no NCCL: their tensors go through the host, which is slow; "
        "give every actor a GPU of its own"
    )
