"""The GPU backend over torch's ProcessGroupNCCL: one for the collectives of a group and one for each of its edges."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import PrefixStore

from raypar.actors.autograd.torch_private import all_gather_flat, reduce_scatter_flat, set_timeout
from raypar.actors.collective.gpu import GpuGroup
from raypar.actors.collective.group import Finish
from raypar.actors.collective.reductions import ReduceOp
from raypar.actors.collective.watcher import IssuedOp
from raypar.actors.tensors import row_size, staged

_OPS: dict[ReduceOp, Any] = {
    "sum": dist.ReduceOp.SUM,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
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

    def _put(self, edge: Any, flat: Tensor) -> IssuedOp:
        return _Work(edge.send([flat], 1, 0))

    def _take(self, edge: Any, flat: Tensor) -> IssuedOp:
        return _Work(edge.recv([flat], 0, 0))

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Finish:
        if not tensor.numel():
            return self._nothing()
        flat, back = staged(tensor)
        options = c10d.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return self._issued(_Work(self._all.allreduce([flat], options)), back, flat)

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Finish:
        if not out.numel():
            return self._nothing()
        flat, back = staged(out)
        part = tensor.contiguous()
        work = all_gather_flat(self._all, flat.view(-1), part.view(-1))
        return self._issued(_Work(work), back, flat, part)

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Finish:
        if not out.numel():
            return self._nothing()
        flat, back = staged(out)
        source = tensor.contiguous()
        options = c10d.ReduceScatterOptions()
        options.reduceOp = _OPS[op]
        work = reduce_scatter_flat(self._all, flat.view(-1), source.view(-1), options)
        return self._issued(_Work(work), back, flat, source)

    def _all_to_all(self, out: Tensor, tensor: Tensor, outs: list[int], ins: list[int]) -> Finish:
        if not row_size(tensor):
            return self._nothing()
        flat, back = staged(out)
        source = tensor.contiguous()
        work = self._all.alltoall_base(flat, source, outs, ins)
        return self._issued(_Work(work), back, flat, source)

    def _broadcast(self, tensor: Tensor, root: int) -> Finish:
        if not tensor.numel():
            return self._nothing()
        flat, back = staged(tensor)
        options = c10d.BroadcastOptions()
        options.rootRank = root
        return self._issued(_Work(self._all.broadcast([flat], options)), back, flat)

    def _reduce(self, tensor: Tensor, root: int, op: ReduceOp) -> Finish:
        if not tensor.numel():
            return self._nothing()
        flat, back = staged(tensor)
        if self.rank != root:
            back = None  # only the root gets a result
        options = c10d.ReduceOptions()
        options.reduceOp, options.rootRank = _OPS[op], root
        return self._issued(_Work(self._all.reduce([flat], options)), back, flat)

    def _gather(self, out: Tensor | None, tensor: Tensor, root: int) -> Finish:
        if not tensor.numel():
            return self._nothing()
        part = tensor.contiguous().view(-1)
        options = c10d.GatherOptions()
        options.rootRank = root
        if out is None or self.rank != root:
            return self._issued(_Work(self._all.gather([], [part], options)), None, part)
        flat, back = staged(out)
        pieces = list(flat.view(-1).chunk(self.size))
        return self._issued(_Work(self._all.gather([pieces], [part], options)), back, flat, part)

    def _scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> Finish:
        if not out.numel():
            return self._nothing()
        flat, back = staged(out)
        options = c10d.ScatterOptions()
        options.rootRank = root
        if tensor is None or self.rank != root:
            return self._issued(_Work(self._all.scatter([flat.view(-1)], [], options)), back, flat)
        source = tensor.contiguous()
        pieces = list(source.view(-1).chunk(self.size))
        return self._issued(_Work(self._all.scatter([flat.view(-1)], [pieces], options)), back, flat, source)


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
