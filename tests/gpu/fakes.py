"""NCCL without a GPU: torch's process group and cupy's communicator, played by threads on CPU tensors.

A fake stream is a thread that does one thing after the other, so a receive that nobody answers holds up what was issued
to the same stream behind it, as on a GPU. Waiting for a stream blocks, for a CPU has no stream to wait in its place.
"""

from __future__ import annotations

import ctypes
import functools
import secrets
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from raypar.actors.collective.gloo.group import create_device
from raypar.actors.collective.gpu import nccl
from raypar.actors.collective.reductions import reduce_in_order
from tests.support.local_groups import LocalHub

PATIENCE = 30.0


# --- torch: ProcessGroupNCCL ------------------------------------------------------------------------------------------


class FakeWork:
    """Done once its stream has come to it."""

    def __init__(self, future):
        self._future = future

    def is_completed(self):
        return self._future.done()

    def wait(self):
        if self._future.exception() is not None and not isinstance(self._future.exception(), AbortedError):
            raise self._future.exception()

    def synchronize(self):
        self._future.exception(PATIENCE)


class AbortedError(RuntimeError):
    """An op that an abort has ended: on a GPU nothing raises it."""


class FakeOptions:
    def __init__(self, is_high_priority_stream=False):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = types.SimpleNamespace(max_ctas=None)


class FakeProcessGroup:
    """ProcessGroupNCCL's calls on a ProcessGroupGloo, one after the other."""

    Options = FakeOptions

    def __init__(self, store, rank, size, options):
        gloo = dist.ProcessGroupGloo._Options()
        gloo._devices, gloo._threads = [create_device("127.0.0.1")], 1
        gloo._timeout = timedelta(seconds=PATIENCE)
        self._gloo, self._rank, self._size = dist.ProcessGroupGloo(store, rank, size, gloo), rank, size
        self._stream, self._aborted = ThreadPoolExecutor(1), threading.Event()
        self.options, self.device = options, None

    def eager_connect_single_device(self, device):
        self.device = device

    def abort(self):
        self._aborted.set()
        for peer in range(self._size):
            if peer != self._rank:
                try:
                    self._gloo.recv([torch.zeros(1)], peer, 99).wait(timedelta(milliseconds=1))
                except RuntimeError:
                    continue
        self._stream.shutdown(wait=False)

    def __getattr__(self, name):
        call = getattr(self._gloo, name)

        def issue(*args):
            if name == "reduce" and args[1].rootRank != self._rank:
                args = ([args[0][0].clone()], args[1])  # Gloo writes to it, NCCL does not

            def run():
                try:
                    call(*args).wait(timedelta(seconds=PATIENCE))
                except RuntimeError as error:
                    raise (AbortedError() if self._aborted.is_set() else error) from None

            return FakeWork(self._stream.submit(run))

        return issue


@contextmanager
def fake_nccl():
    """Within it torch has NCCL, played by threads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "ProcessGroupNCCL", FakeProcessGroup, raising=False)
        for name in nccl._ENVIRONMENT:
            patch.setenv(name, "as it was")
        yield


# --- cupy: NcclCommunicator -------------------------------------------------------------------------------------------


class FakeEvent:
    def __init__(self, future):
        self._future = future

    def query(self):
        return self._future.done()


class FakeStream:
    def __init__(self, device, priority=0):
        self.thread = ThreadPoolExecutor(1)

    @property
    def cuda_stream(self):
        """A real one gives an address: here it is the stream."""
        return self

    def wait_stream(self, stream):
        assert isinstance(stream, FakeCurrent)

    def record_event(self):
        return FakeEvent(self.thread.submit(lambda: None))


class FakeCurrent:
    """torch's current stream: the calling thread itself."""

    def wait_event(self, event):
        event._future.result(PATIENCE)


def memory(pointer, count, dtype):
    """The tensor at an address."""
    buffer = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(pointer)
    return torch.frombuffer(buffer, dtype=dtype)


DTYPES = {
    "NCCL_INT8": torch.int8,
    "NCCL_UINT8": torch.uint8,
    "NCCL_INT32": torch.int32,
    "NCCL_INT64": torch.int64,
    "NCCL_FLOAT16": torch.float16,
    "NCCL_FLOAT32": torch.float32,
    "NCCL_FLOAT64": torch.float64,
    "NCCL_BFLOAT16": torch.bfloat16,
}
OPS = {"NCCL_SUM": "sum", "NCCL_PROD": "product", "NCCL_MIN": "min", "NCCL_MAX": "max"}


class FakeCommunicator:
    """One member; what is called between groupStart and groupEnd is one op of a stream.

    As NCCL it knows addresses alone, and as NCCL's its abort returns when no op uses them any more.
    """

    lock, local = threading.Lock(), threading.local()

    def __init__(self, hubs, size, uid, rank):
        with self.lock:
            self._hub = hubs.setdefault(uid, LocalHub())
        self._size, self._rank, self._issued, self.error = size, rank, 0, None
        self._in_memory, self._aborted = threading.Lock(), False

    def check_async_error(self):
        if self.error:
            raise RuntimeError(self.error)

    def abort(self):
        with self._in_memory:  # first: what waits wakes up, and the next op of its stream begins
            self._aborted = True
        self._hub.abort()

    def send(self, pointer, count, dtype, peer, stream):
        def put():
            self._hub.put(self._rank, peer, "p2p", memory(pointer, count, dtype))

        self._add(stream, put, None)

    def recv(self, pointer, count, dtype, peer, stream):
        def take():
            got = self._take(peer, "p2p")
            self._access(lambda: memory(pointer, count, dtype).copy_(got))

        self._add(stream, None, take)

    def allReduce(self, source, target, count, dtype, op, stream):
        everyone = range(self._size)
        self._collect(source, count, dtype, everyone, everyone, stream, lambda got: _reduce(got, op, target, dtype))

    def reduce(self, source, target, count, dtype, op, root, stream):
        sources = range(self._size) if self._rank == root else ()
        self._collect(source, count, dtype, [root], sources, stream, lambda got: _reduce(got, op, target, dtype))

    def reduceScatter(self, source, target, count, dtype, op, stream):
        everyone = range(self._size)

        def finish(got):
            _reduce([part.view(self._size, -1)[self._rank] for part in got], op, target, dtype)

        self._collect(source, count * self._size, dtype, everyone, everyone, stream, finish)

    def allGather(self, source, target, count, dtype, stream):
        def finish(got):
            memory(target, count * self._size, dtype).copy_(torch.cat(got))

        self._collect(source, count, dtype, range(self._size), range(self._size), stream, finish)

    def broadcast(self, source, target, count, dtype, root, stream):
        to = range(self._size) if self._rank == root else ()
        self._collect(source, count, dtype, to, [root], stream, lambda got: memory(target, count, dtype).copy_(got[0]))

    def _collect(self, source, count, dtype, to, sources, stream, finish):
        self._issued += 1
        key = self._issued

        def put():
            for peer in to:
                self._hub.put(self._rank, peer, key, memory(source, count, dtype))

        def take():
            got = [self._take(peer, key) for peer in sources]
            if got:
                self._access(lambda: finish(got))

        self._add(stream, put, take)

    def _take(self, peer, key):
        return self._hub.take(peer, self._rank, key, time.monotonic() + PATIENCE)

    def _add(self, stream, put, take):
        self.local.calls.append((stream, put and functools.partial(self._access, put), take))

    def _access(self, use):
        """Read or write at addresses: after an abort what is there may belong to others."""
        with self._in_memory:
            if not self._aborted:
                use()


def _reduce(parts, op, target, dtype):
    reduce_in_order(parts, op, memory(target, parts[0].numel(), dtype))


def group_start():
    FakeCommunicator.local.calls = []


def group_end():
    calls, FakeCommunicator.local.calls = FakeCommunicator.local.calls, None

    def run():
        for put in [put for _, put, _ in calls if put]:
            put()
        for take in [take for _, _, take in calls if take]:
            take()

    if calls:
        calls[0][0].thread.submit(run)


def fake_cupy():
    """What stands for the module cupy.cuda.nccl; its numbers of dtypes and ops are what they stand for."""
    return types.SimpleNamespace(
        available=True,
        NcclCommunicator=functools.partial(FakeCommunicator, {}),
        get_unique_id=lambda: secrets.token_bytes(128),
        groupStart=group_start,
        groupEnd=group_end,
        **DTYPES,
        **OPS,
    )
