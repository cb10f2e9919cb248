"""The GPU backend over cupy: the communicator that Ray's own NCCLGroup uses, with the features that NCCLGroup lacks.

NCCLGroup issues ops to cupy's current stream instead of torch's and never makes torch wait for them. It has no
deadlines, no abort, no all_to_all, gather or scatter, and one communicator for both directions between two ranks.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from raypar.actors.collective.gpu.group import GpuGroup
from raypar.actors.collective.gpu.watcher import IssuedOp
from raypar.actors.collective.group import Finish
from raypar.actors.collective.reductions import ReduceOp
from raypar.actors.tensors import nbytes

# Names in cupy.cuda.nccl. Only reductions need dtypes: everything else moves as bytes.
_OPS: dict[ReduceOp, str] = {"sum": "NCCL_SUM", "product": "NCCL_PROD", "min": "NCCL_MIN", "max": "NCCL_MAX"}
_DTYPES = {
    torch.float64: "NCCL_FLOAT64",
    torch.float32: "NCCL_FLOAT32",
    torch.float16: "NCCL_FLOAT16",
    torch.bfloat16: "NCCL_BFLOAT16",
    torch.int64: "NCCL_INT64",
    torch.int32: "NCCL_INT32",
    torch.int8: "NCCL_INT8",
    torch.uint8: "NCCL_UINT8",
}


class CupyGroup(GpuGroup):
    """A group over ``cupy.cuda.nccl.NcclCommunicator`` of cupy 14 or newer. See ``GpuGroup`` for the arguments.

    cupy cannot limit how much of the GPU a communicator occupies. With many edges set NCCL_MAX_CTAS, or waiting
    receives may leave no multiprocessors to compute.
    """

    def _prepare(self) -> None:
        self._nccl = _nccl()

    def _connect(self, name: str, rank: int, size: int, *, edge: bool) -> Any:
        key = f"uid/{name}"
        if rank == 0:
            self._store.set(key, self._nccl.get_unique_id().hex())
        uid = bytes.fromhex(self._store.get(key).decode())
        return _Lane(self._nccl, self._nccl.NcclCommunicator(size, uid, rank), self.device)

    def _put(self, edge: _Lane, tensor: Tensor) -> IssuedOp:
        return self._exchange(edge, {1: tensor}, {})

    def _take(self, edge: _Lane, tensor: Tensor) -> IssuedOp:
        return self._exchange(edge, {}, {0: tensor})

    def _demand_reducible(self, tensor: Tensor, name: str) -> None:
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"group {self.name}: {name}: NCCL can't reduce {tensor.dtype}: use {', '.join(map(str, _DTYPES))}"
            )

    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> Finish:
        return self._collective("allReduce", tensor, tensor, tensor.numel(), *self._reduction(tensor, op))

    def _all_gather(self, out: Tensor, tensor: Tensor) -> Finish:
        return self._collective("allGather", tensor, out, nbytes(tensor), self._nccl.NCCL_UINT8)

    def _reduce_scatter(self, out: Tensor, tensor: Tensor, op: ReduceOp) -> Finish:
        return self._collective("reduceScatter", tensor, out, out.numel(), *self._reduction(tensor, op))

    def _all_to_all(self, out: Tensor, tensor: Tensor, outs: list[int], ins: list[int]) -> Finish:
        give, take = dict(enumerate(tensor.split(ins))), dict(enumerate(out.split(outs)))
        return self._issued(self._exchange(self._all, give, take))

    def _broadcast(self, tensor: Tensor, root: int) -> Finish:
        return self._collective("broadcast", tensor, tensor, nbytes(tensor), self._nccl.NCCL_UINT8, root)

    def _reduce(self, tensor: Tensor, root: int, op: ReduceOp) -> Finish:
        return self._collective("reduce", tensor, tensor, tensor.numel(), *self._reduction(tensor, op), root)

    def _gather(self, out: Tensor | None, tensor: Tensor, root: int) -> Finish:
        return self._issued(self._exchange(self._all, {root: tensor}, self._by_rank(out)))

    def _scatter(self, out: Tensor, tensor: Tensor | None, root: int) -> Finish:
        return self._issued(self._exchange(self._all, self._by_rank(tensor), {root: out}))

    # --- NCCL's calls ---

    def _collective(self, name: str, source: Tensor, target: Tensor, *settings: int) -> Finish:
        """Issue a collective with two buffers; ``settings`` are the count, the dtype and what else the call takes."""
        data = source.data_ptr(), target.data_ptr(), *settings
        return self._issued(self._all.issue(lambda comm, stream: getattr(comm, name)(*data, stream)))

    def _exchange(self, lane: _Lane, give: Mapping[int, Tensor], take: Mapping[int, Tensor]) -> IssuedOp:
        """Send to some ranks and receive from some, possibly including this one, as one op.

        Args:
            lane: The lane.
            give: The contiguous tensor for each receiver, by rank.
            take: Where to store what each sender sends, by rank.
        """

        def call(comm: Any, stream: int) -> None:
            for move, parts in ((comm.send, give), (comm.recv, take)):
                for peer, part in parts.items():
                    if part.numel():
                        move(part.data_ptr(), nbytes(part), self._nccl.NCCL_UINT8, peer, stream)

        return lane.issue(call)

    def _by_rank(self, tensor: Tensor | None) -> dict[int, Tensor]:
        """Return the members' equal parts of the root's tensor; none on the others."""
        return {} if tensor is None else dict(enumerate(tensor.view(-1).chunk(self.size)))

    def _reduction(self, tensor: Tensor, op: ReduceOp) -> tuple[int, int]:
        """Return NCCL's constants for the dtype of a tensor and for a reduction."""
        return getattr(self._nccl, _DTYPES[tensor.dtype]), getattr(self._nccl, _OPS[op])


class _Lane:
    """A communicator and the stream of its ops. Before each op the stream waits for torch's current stream.

    Args:
        nccl: cupy's NCCL module.
        comm: The communicator.
        device: Its GPU.
    """

    def __init__(self, nccl: Any, comm: Any, device: torch.device) -> None:
        self._nccl, self._comm, self._device = nccl, comm, device
        self._stream = torch.cuda.Stream(device, priority=-1)  # small kernels that other work waits for
        self._lock = threading.Lock()
        self._aborted = False

    def issue(self, call: Callable[[Any, int], object]) -> IssuedOp:
        """Issue an op.

        Args:
            call: Makes the op's NCCL calls; it is given the communicator and the CUDA stream's address.
        """
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._nccl.groupStart()
        try:
            call(self._comm, self._stream.cuda_stream)
        finally:
            self._nccl.groupEnd()
        return _Recorded(self, self._stream.record_event(), self._device)

    def demand_sound(self) -> None:
        """Raise RuntimeError if NCCL has reported an asynchronous error."""
        with self._lock:  # so that no abort frees the communicator meanwhile
            if not self._aborted:
                self._comm.check_async_error()

    def abort(self) -> None:
        with self._lock:
            if not self._aborted:
                self._aborted = True
                self._comm.abort()


class _Recorded:
    """Adapts the event at the end of an op on a lane to a Transfer."""

    def __init__(self, lane: _Lane, event: torch.cuda.Event, device: torch.device) -> None:
        self._lane, self._event, self._device = lane, event, device

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def over(self) -> bool:
        self._lane.demand_sound()
        done: bool = self._event.query()
        return done


def has_cupy_nccl() -> bool:
    """Return whether cupy is installed and has found NCCL."""
    try:
        return bool(getattr(_nccl(), "available", False))
    except ImportError:
        return False


def _nccl() -> Any:
    """Import cupy's NCCL module, only when needed: cupy is an optional dependency."""
    return importlib.import_module("cupy.cuda.nccl")
