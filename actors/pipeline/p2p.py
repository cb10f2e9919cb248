"""Moves values between the stages of different ranks: receives posted ahead, sends that never block."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.collective.group import Group, Handle
from raypar.actors.specs.types import SEND_WINDOW
from raypar.actors.tensors import Order, Values, empty_in, order_of
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
_HEADER = 128  # int64s: count, then dtype, dims, shape and order of each tensor
_DIMS = 16  # an order is one number, with a digit for each dim


class Spec(NamedTuple):
    """Shape and dtype of one tensor that crosses a boundary, and the order of its dims in memory: sums of kernels, and
    so their last bits, depend on it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: Order

    @property
    def plain(self) -> bool:
        return self.order == tuple(range(len(self.shape)))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class Route(NamedTuple):
    """Where the values of a SEND or RECV go.

    peer      the rank at the other end
    tag       of its header; tensor i has ``tag + 1 + i``. The same number at both ends, another for every message
    boundary  the stage that hands the forward values over
    specs     what is known of the values, by boundary
    """

    peer: int
    tag: int
    boundary: int
    specs: Mapping[int, tuple[Spec, ...]]


class Courier:
    """Sends and receives for one program of one actor.

    The first message over a boundary is preceded by a header with its shapes; they hold for the rest of the program.
    Gradients have the shapes of the floating values that they belong to, and their order in memory.

    group             the ranks of the pipeline; a stage's peer is ``placement[stage]`` in it
    num_microbatches  for tags
    """

    def __init__(self, group: Group | None, placement: tuple[int, ...], num_microbatches: int) -> None:
        self._group, self._placement, self._num_microbatches = group, placement, num_microbatches
        self._specs: dict[int, tuple[Spec, ...]] = {}  # of what the stage of this number hands to the next one
        self._floating: dict[int, tuple[Spec, ...]] = {}  # those of them that gradients come back for
        self._expected: dict[int, deque[Action]] = defaultdict(deque)  # by peer, not posted yet
        self._posted: dict[Action, tuple[list[Tensor], list[Handle]]] = {}
        self._sending: dict[int, deque[list[Handle]]] = defaultdict(deque)
        self._routes: dict[Action, Route] = {}

    def peer(self, action: Action) -> int | None:
        """The pipeline rank at the other end of a SEND or RECV; None for any other action."""
        return self._route(action).peer if action.op in SENDS or action.op in RECVS else None

    def expect(self, action: Action) -> None:
        """Post the buffers of a RECV that is to come, as soon as its shapes are known.

        Never before those of an earlier RECV from the same peer: a transport without tags delivers in order.
        """
        queue = self._expected[self._route(action).peer]
        queue.append(action)
        while queue and self._known(queue[0]):
            self._post(queue.popleft())

    def receive(self, action: Action) -> Values:
        """Wait for the values of a RECV, the next one of its peer."""
        if action not in self._posted:
            queue, route = self._expected[self._route(action).peer], self._route(action)
            if queue:
                assert queue.popleft() == action, "receives are taken in the order of the row"
            if not self._known(action):
                self._learn(route.boundary, self._read_header(route))
            self._post(action)
        buffers, handles = self._posted.pop(action)
        _wait_all(handles)
        return tuple(buffers)

    def _known(self, action: Action) -> bool:
        route = self._route(action)
        return route.boundary in route.specs

    def _post(self, action: Action) -> None:
        route = self._route(action)
        link, peer, tag = self._link(), route.peer, route.tag
        recv, device = link.recv, link.device
        specs = route.specs[route.boundary]
        buffers = [empty_in(spec.shape, spec.order, spec.dtype, device) for spec in specs]
        handles = [recv(_flat(buffers[i], specs[i]), peer, tag + 1 + i) for i in range(len(specs))]
        self._posted[action] = (buffers, handles)

    def send(self, action: Action, values: Values) -> None:
        """Start sending the values of a SEND; they are kept until they have been received."""
        route = self._route(action)
        queue = self._sending[route.peer]
        while len(queue) >= SEND_WINDOW:
            _wait_all(queue.popleft())
        handles = self._send_header(route, values) if action.op is Op.SEND_F else []
        send, peer, tag, specs = self._link().send, route.peer, route.tag, route.specs[route.boundary]
        handles += [send(_flat(values[i], specs[i]), peer, tag + 1 + i) for i in range(len(values))]
        queue.append(handles)

    def drain(self) -> None:
        """Wait until everything sent has been received."""
        for queue in self._sending.values():
            while queue:
                _wait_all(queue.popleft())

    def _learn(self, boundary: int, specs: tuple[Spec, ...]) -> None:
        self._specs[boundary] = specs
        self._floating[boundary] = tuple(spec for spec in specs if spec.dtype.is_floating_point)

    def _send_header(self, route: Route, values: Values) -> list[Handle]:
        known = self._specs.get(route.boundary)
        if known is not None and len(known) == len(values):
            pairs = zip(known, values, strict=True)
            if all(spec.shape == value.shape and spec.dtype == value.dtype for spec, value in pairs):
                return []
        specs = tuple(Spec(tuple(value.shape), value.dtype, order_of(value)) for value in values)
        if known is not None:
            raise ValueError(
                f"stage {route.boundary} returned {_list(specs)}, for an earlier microbatch {_list(known)}: "
                "what a stage returns must have one shape"
            )
        header = _pack(specs)
        self._learn(route.boundary, specs)
        return [self._link().host.send(header, route.peer, route.tag, count_as="send shapes")]

    def _read_header(self, route: Route) -> tuple[Spec, ...]:
        header = torch.empty(_HEADER, dtype=torch.int64)
        self._link().host.recv(header, route.peer, route.tag, count_as="recv shapes").wait()
        return _unpack(header)

    def _link(self) -> Group:
        assert self._group is not None
        return self._group

    def _route(self, action: Action) -> Route:
        route = self._routes.get(action)
        if route is None:
            route = self._routes[action] = self._find_route(action)
        return route

    def _find_route(self, action: Action) -> Route:
        stage, op, microbatch = action
        assert stage is not None and microbatch is not None
        backward = op in (Op.SEND_B, Op.RECV_B)
        other = stage + (1 if op in (Op.SEND_F, Op.RECV_B) else -1)
        source, boundary = (stage if op in SENDS else other), min(stage, other)
        tag = ((source * 2 + backward) * self._num_microbatches + microbatch) * (_MOST_TENSORS + 1)
        return Route(self._placement[other], tag, boundary, self._floating if backward else self._specs)


def _pack(specs: tuple[Spec, ...]) -> Tensor:
    numbers = [len(specs)]
    for shape, dtype, order in specs:
        if dtype not in _DTYPES:
            raise ValueError(f"a stage returned {dtype}: between stages go {', '.join(map(str, _DTYPES))}")
        places = sum(dim * _DIMS**place for place, dim in enumerate(order))
        numbers += [_DTYPES.index(dtype), len(shape), *shape, places]
    if len(specs) > _MOST_TENSORS or len(numbers) > _HEADER or any(len(spec.shape) > _DIMS - 1 for spec in specs):
        raise ValueError(
            f"a stage returned {len(specs)} tensors: at most {_MOST_TENSORS} of few dims can cross a boundary"
        )
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)))


def _unpack(header: Tensor) -> tuple[Spec, ...]:
    numbers = iter(header.tolist())
    specs = []
    for _ in range(next(numbers)):
        dtype, dims = _DTYPES[next(numbers)], next(numbers)
        shape, places = tuple(next(numbers) for _ in range(dims)), next(numbers)
        specs.append(Spec(shape, dtype, tuple(places // _DIMS**place % _DIMS for place in range(dims))))
    return tuple(specs)


def _flat(value: Tensor, spec: Spec) -> Tensor:
    """The same elements in their order in memory, so that nothing has to be copied to be sent."""
    return value if spec.plain else value.permute(spec.order)


def _list(specs: tuple[Spec, ...]) -> str:
    return ", ".join(map(str, specs))


def _wait_all(handles: list[Handle]) -> None:
    for handle in handles:
        handle.wait()
