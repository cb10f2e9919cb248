"""Moves values between the stages of different ranks: receives posted ahead, sends that never block."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.group import Group, Handle
from raypar.actors.models.model import Values
from raypar.actors.plan import SEND_WINDOW
from raypar.schedules.action import RECVS, SENDS, Action, Op

_MOST_TENSORS = 15  # a boundary, so that a message's tag has a digit (base 16) for the tensor
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_HEADER = 128  # int64s: count, then dtype, dims and shape of each tensor


class Spec(NamedTuple):
    """Shape and dtype of one tensor that crosses a boundary."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Courier:
    """Sends and receives for one program of one actor.

    The first message over a boundary is preceded by a header with its shapes; they hold for the rest of the program.
    Gradients have the shapes of the floating values that they belong to.

    group             the ranks of the pipeline; a stage's peer is ``placement[stage]`` in it
    num_microbatches  for tags
    """

    def __init__(self, group: Group | None, placement: tuple[int, ...], num_microbatches: int) -> None:
        self._group, self._placement, self._num_microbatches = group, placement, num_microbatches
        self._specs: dict[int, tuple[Spec, ...]] = {}  # of what the stage of this number hands to the next one
        self._posted: dict[Action, tuple[list[Tensor], list[Handle]]] = {}
        self._sending: dict[int, deque[list[Handle]]] = defaultdict(deque)

    def peer(self, action: Action) -> int | None:
        """The pipeline rank at the other end of a SEND or RECV; None for any other action."""
        stage, op, _ = action
        if op not in SENDS and op not in RECVS:
            return None
        assert stage is not None
        return self._placement[stage + (1 if op in (Op.SEND_F, Op.RECV_B) else -1)]

    def expect(self, action: Action) -> None:
        """Post the buffers of a RECV that is to come, if its shapes are known by now."""
        specs = self._specs_of(action)
        if specs is not None and action not in self._posted:
            buffers = [torch.empty(spec.shape, dtype=spec.dtype) for spec in specs]
            group, peer = self._link(action)
            handles = [group.recv(buffer, peer, self._tag(action, i + 1)) for i, buffer in enumerate(buffers)]
            self._posted[action] = (buffers, handles)

    def receive(self, action: Action) -> Values:
        """Wait for the values of a RECV."""
        if self._specs_of(action) is None:
            assert action.stage is not None
            self._specs[action.stage - 1] = self._read_header(action)
        self.expect(action)
        buffers, handles = self._posted.pop(action)
        for handle in handles:
            handle.wait()
        return tuple(buffers)

    def send(self, action: Action, values: Values) -> None:
        """Start sending the values of a SEND; they are kept until they have been received."""
        group, peer = self._link(action)
        queue = self._sending[peer]
        while len(queue) >= SEND_WINDOW:
            _wait_all(queue.popleft())
        handles = self._send_header(action, values) if action.op is Op.SEND_F else []
        handles += [group.send(value, peer, self._tag(action, i + 1)) for i, value in enumerate(values)]
        queue.append(handles)

    def drain(self) -> None:
        """Wait until everything sent has been received."""
        for queue in self._sending.values():
            while queue:
                _wait_all(queue.popleft())

    def _specs_of(self, action: Action) -> tuple[Spec, ...] | None:
        assert action.stage is not None
        if action.op is Op.RECV_F:
            return self._specs.get(action.stage - 1)
        known = self._specs.get(action.stage)
        return None if known is None else tuple(spec for spec in known if spec.dtype.is_floating_point)

    def _send_header(self, action: Action, values: Values) -> list[Handle]:
        stage = action.stage
        assert stage is not None
        specs = tuple(Spec(tuple(value.shape), value.dtype) for value in values)
        known = self._specs.get(stage)
        if known is not None:
            if specs != known:
                raise ValueError(
                    f"stage {stage} returned {_list(specs)}, for an earlier microbatch {_list(known)}: "
                    "what a stage returns must have one shape"
                )
            return []
        self._specs[stage] = specs
        group, peer = self._link(action)
        return [group.send(_pack(specs), peer, self._tag(action, 0), count_as="send shapes")]

    def _read_header(self, action: Action) -> tuple[Spec, ...]:
        header = torch.empty(_HEADER, dtype=torch.int64)
        group, peer = self._link(action)
        group.recv(header, peer, self._tag(action, 0), count_as="recv shapes").wait()
        return _unpack(header)

    def _link(self, action: Action) -> tuple[Group, int]:
        peer = self.peer(action)
        assert self._group is not None and peer is not None
        return self._group, peer

    def _tag(self, action: Action, tensor: int) -> int:
        """One number a message, the same at both ends: (producing stage, direction, microbatch, tensor)."""
        stage, op, microbatch = action
        assert stage is not None and microbatch is not None
        source = stage if op in SENDS else stage - 1 if op is Op.RECV_F else stage + 1
        backward = op in (Op.SEND_B, Op.RECV_B)
        return ((source * 2 + backward) * self._num_microbatches + microbatch) * (_MOST_TENSORS + 1) + tensor


def _pack(specs: tuple[Spec, ...]) -> Tensor:
    numbers = [len(specs)]
    for shape, dtype in specs:
        if dtype not in _DTYPES:
            raise ValueError(f"a stage returned {dtype}: between stages go {', '.join(map(str, _DTYPES))}")
        numbers += [_DTYPES.index(dtype), len(shape), *shape]
    if len(specs) > _MOST_TENSORS or len(numbers) > _HEADER:
        raise ValueError(
            f"a stage returned {len(specs)} tensors: at most {_MOST_TENSORS} of few dims can cross a boundary"
        )
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)))


def _unpack(header: Tensor) -> tuple[Spec, ...]:
    numbers = iter(header.tolist())
    specs = []
    for _ in range(next(numbers)):
        dtype, dims = _DTYPES[next(numbers)], next(numbers)
        specs.append(Spec(tuple(next(numbers) for _ in range(dims)), dtype))
    return tuple(specs)


def _list(specs: tuple[Spec, ...]) -> str:
    return ", ".join(map(str, specs))


def _wait_all(handles: list[Handle]) -> None:
    for handle in handles:
        handle.wait()
