"""The GPU backend over torch's ProcessGroupNCCL: one for the collectives of a group and one for each of its edges."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore

from raypar.actors.autograd.torch_private import all_gather_flat, reduce_scatter_flat, set_timeout
from raypar.actors.collective.gpu.group import GpuGroup
from raypar.actors.collective.gpu.watcher import Issued, IssuedOp
from raypar.actors.collective.group import Finish
from raypar.actors.collective.reductions import ReduceOp
from raypar.actors.collective.torch_options import member_parts, options_of

_NEVER = timedelta(days=1)  # torch's own timeout of an op; our deadlines are kept by the watcher
# Multiprocessors (of 132 on an H100) that a waiting receive may occupy: it must leave the others to compute.
_EDGE_CTAS = 4
_ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # torch's own handler ends the process, so no error would reach the driver
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # its monitor also ends it if an abort takes long, and polls the store
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # its watchdog ends it too, on an error that the current action also raises
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",  # ops over an edge are meant to be serial
}


class NcclGroup(GpuGroup):
    """A group over ``torch.distributed.ProcessGroupNCCL``. See ``GpuGroup`` for the arguments."""

    def _prepare(self) -> None:
        os.environ.update(_ENVIRONMENT)  # torch reads the variables whenever it creates a process group

    def _connect(self, name: str, rank: int, size: int, *, edge: bool) -> Any:
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options(is_high_priority_stream=True)  # small kernels that other work waits for
        set_timeout(options, _NEVER)
        if edge:
            options.config.max_ctas = _EDGE_CTAS
        group = nccl(PrefixStore(name, self._store), rank, size, options)
        group.eager_connect_single_device(self.device)  # else send and recv would create communicators of their own
        return group

    def _put(self, edge: Any, tensor: Tensor) -> IssuedOp:
        return _Work(edge.send([tensor], 1, 0))

    def _take(self, edge: Any, tensor: Tensor) -> IssuedOp:
        return _Work(edge.recv([tensor], 0, 0))

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Finish:
        return self._waiter(self._all.allreduce([tensor], options_of("Allreduce", op=op)))

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Finish:
        return self._waiter(all_gather_flat(self._all, out.view(-1), tensor.view(-1)))

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Finish:
        options = options_of("ReduceScatter", op=op)
        return self._waiter(reduce_scatter_flat(self._all, out.view(-1), tensor.view(-1), options))

    def _all_to_all(self, out: Tensor, tensor: Tensor, outs: list[int], ins: list[int]) -> Finish:
        return self._waiter(self._all.alltoall_base(out, tensor, outs, ins))

    def _broadcast(self, tensor: Tensor, root: int) -> Finish:
        return self._waiter(self._all.broadcast([tensor], options_of("Broadcast", root=root)))

    def _reduce(self, tensor: Tensor, root: int, op: ReduceOp) -> Finish:
        return self._waiter(self._all.reduce([tensor], options_of("Reduce", root=root, op=op)))

    def _gather(self, out: Tensor | None, tensor: Tensor, root: int) -> Finish:
        options = options_of("Gather", root=root)
        return self._waiter(self._all.gather(member_parts(out, self.size), [tensor.view(-1)], options))

    def _scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> Finish:
        options = options_of("Scatter", root=root)
        return self._waiter(self._all.scatter([out.view(-1)], member_parts(tensor, self.size), options))

    def _waiter(self, work: Any) -> Issued:
        return self._issued(_Work(work))


class _Work:
    """Adapts the Work handle of a torch op to a Transfer."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def join(self) -> None:
        self._work.synchronize()

    def over(self) -> bool:
        if not self._work.is_completed():
            return False
        self._work.wait()  # complete, so it returns at once or raises the op's error
        return True


def has_torch_nccl() -> bool:
    """Return whether this torch supports NCCL."""
    return bool(dist.is_available() and hasattr(dist, "ProcessGroupNCCL"))
