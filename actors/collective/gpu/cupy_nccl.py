"""The GPU backend over cupy: the communicator that Ray's own NCCLGroup uses, with the features that NCCLGroup lacks.

NCCLGroup issues ops to cupy's current stream instead of torch's and never makes torch wait for them. It has no
deadlines, no abort, no all_to_all, gather or scatter, and one communicator for both directions between two ranks.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from raypar.actors.collective.gpu.group import GpuGroup
from raypar.actors.collective.gpu.watcher import IssuedOp
from raypar.actors.collective.reductions import ReduceOp

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

    def _put(self, edge: _Lane, flat: Tensor) -> IssuedOp:
        return edge.issue(lambda comm, stream: self._send_part(comm, _bytes(flat), 1, stream))

    def _take(self, edge: _Lane, flat: Tensor) -> IssuedOp:
        return edge.issue(lambda comm, stream: self._recv_part(comm, _bytes(flat), 0, stream))

    def _demand_reducible(self, tensor: Tensor, name: str) -> None:
        if tensor.dtype not in _DTYPES:
            raise ValueError(
                f"group {self.name}: {name}: NCCL can't reduce {tensor.dtype}: use {', '.join(map(str, _DTYPES))}"
            )

    def _start_all_reduce(self, flat: Tensor, op: ReduceOp) -> IssuedOp:
        data = flat.data_ptr(), flat.data_ptr(), flat.numel(), *self._reduction(flat, op)
        return self._lane.issue(lambda comm, stream: comm.allReduce(*data, stream))

    def _start_all_gather(self, flat: Tensor, part: Tensor) -> IssuedOp:
        data = part.data_ptr(), flat.data_ptr(), _bytes(part).numel(), self._uint8
        return self._lane.issue(lambda comm, stream: comm.allGather(*data, stream))

    def _start_reduce_scatter(self, flat: Tensor, source: Tensor, op: ReduceOp) -> IssuedOp:
        data = source.data_ptr(), flat.data_ptr(), flat.numel(), *self._reduction(flat, op)
        return self._lane.issue(lambda comm, stream: comm.reduceScatter(*data, stream))

    def _start_all_to_all(self, rows: Tensor, source: Tensor, outs: list[int], ins: list[int]) -> IssuedOp:
        return self._exchange(dict(enumerate(source.split(ins))), dict(enumerate(rows.split(outs))))

    def _start_broadcast(self, flat: Tensor, root: int) -> IssuedOp:
        data = flat.data_ptr(), flat.data_ptr(), _bytes(flat).numel(), self._uint8
        return self._lane.issue(lambda comm, stream: comm.broadcast(*data, root, stream))

    def _start_reduce(self, flat: Tensor, root: int, op: ReduceOp) -> IssuedOp:
        data = flat.data_ptr(), flat.data_ptr(), flat.numel(), *self._reduction(flat, op)
        return self._lane.issue(lambda comm, stream: comm.reduce(*data, root, stream))

    def _start_gather(self, pieces: Sequence[Tensor], part: Tensor, root: int) -> IssuedOp:
        return self._exchange({root: part}, dict(enumerate(pieces)))

    def _start_scatter(self, flat: Tensor, pieces: Sequence[Tensor], root: int) -> IssuedOp:
        return self._exchange(dict(enumerate(pieces)), {root: flat})

    # --- NCCL's calls ---

    def _exchange(self, give: dict[int, Tensor], take: dict[int, Tensor]) -> IssuedOp:
        """Send to some ranks and receive from some, possibly including this one, as one op.

        Args:
            give: The contiguous tensor for each receiver, by rank.
            take: Where to store what each sender sends, by rank.
        """

        def call(comm: Any, stream: int) -> None:
            for peer, part in give.items():
                self._send_part(comm, _bytes(part), peer, stream)
            for peer, part in take.items():
                self._recv_part(comm, _bytes(part), peer, stream)

        return self._lane.issue(call)

    def _send_part(self, comm: Any, data: Tensor, peer: int, stream: int) -> None:
        if data.numel():
            comm.send(data.data_ptr(), data.numel(), self._uint8, peer, stream)

    def _recv_part(self, comm: Any, data: Tensor, peer: int, stream: int) -> None:
        if data.numel():
            comm.recv(data.data_ptr(), data.numel(), self._uint8, peer, stream)

    @property
    def _lane(self) -> _Lane:
        """The lane of the collectives."""
        lane: _Lane = self._all
        return lane

    @property
    def _uint8(self) -> int:
        number: int = self._nccl.NCCL_UINT8
        return number

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


def _bytes(tensor: Tensor) -> Tensor:
    """View a contiguous tensor as bytes (n,)."""
    return tensor.view(-1).view(torch.uint8)
