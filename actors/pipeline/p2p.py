"""Point-to-point messages between stages on different ranks: receives are posted early, sends do not block."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.actors.collective.group import Group, Handle, wait_all
from raypar.actors.specs.types import SEND_WINDOW
from raypar.actors.tensors import Order, Values, empty_in, memory_order
from raypar.schedules.action import RECVS, SENDS, Action, Op

_MOST_TENSORS = 15  # for each boundary: a message's tag has one base-16 digit for the header (0) and the tensors
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
_HEADER = 128  # int64s in a header: number of tensors, then dtype, number of dims, shape and order of each
_DIMS = 16  # base of the number that encodes an order of dims, with one digit for each dim

Crossing = tuple[int, int, int]


class Spec(NamedTuple):
    """Shape, dtype and memory order of a tensor that crosses a boundary between stages.

    The order of the dims in memory is preserved because the order in which kernels sum depends on it, and so do the
    last bits of their results.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    order: Order

    @property
    def plain(self) -> bool:
        """Whether the dims are in their usual order, that is, the tensor is contiguous."""
        return self.order == tuple(range(len(self.shape)))

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class ValueRoute(NamedTuple):
    """The peers, the tag and the shapes of a SEND or RECV.

    Attributes:
        peers: The members of the group at the other end: one for a RECV, none or more for a SEND.
        tag: Tag of the header; tensor i has the tag ``tag + 1 + i``. Both ends compute the same tag, and the tags of a
            step are unique.
        crossing: The stage before the boundary, which sends the forward values over it; the stage at the end of a skip,
            else 0; and the microbatch, if shapes vary between microbatches, else 0.
        specs: The known shapes of the values, by crossing.
    """

    peers: tuple[int, ...]
    tag: int
    crossing: Crossing
    specs: Mapping[Crossing, tuple[Spec, ...]]


@dataclass(eq=False)
class Courier:
    """Sends and receives the values of one program (training or evaluation) for one actor.

    Before the first message over a boundary, a header sends the shapes to the receiver. They hold for the rest of the
    program, or (``varies``) for the microbatch, so that a header precedes every forward value. Gradients have the
    shapes and memory orders of their floating-point values, so they need no header.

    Attributes:
        group: The ranks of the pipeline; None if there is only one.
        peers: Returns the receivers of a SEND, or the sender of a RECV, as members of the group.
        num_microbatches: Number of microbatches, for the tags.
        varies: Whether shapes may change between microbatches and steps.
        first_learning: The first stage whose backwards compute gradients; earlier stages get none.
        num_stages: Number of stages, for the tags of skips.
        skips: Pairs of stages between which there are skips.
    """

    group: Group | None
    peers: Callable[[Action], tuple[int, ...]]
    num_microbatches: int
    varies: bool = False
    first_learning: int = 0
    num_stages: int = 0
    skips: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        # A skip has the tags of an additional stage.
        self._tags = {pair: self.num_stages + number for number, pair in enumerate(self.skips)}
        self._specs: dict[Crossing, tuple[Spec, ...]] = {}  # of the forward values
        self._floating: dict[Crossing, tuple[Spec, ...]] = {}  # of the forward values that get gradients
        self._exchanged = set[tuple[Crossing, int]]()  # crossing and peer whose header was sent or received
        self._expected: dict[int, deque[Action]] = defaultdict(deque)  # by peer: RECVs not posted yet
        self._posted: dict[Action, tuple[list[Tensor], list[Handle]]] = {}
        self._sending: dict[int, deque[list[Handle]]] = defaultdict(deque)
        self._routes: dict[Action, ValueRoute] = {}

    def begin(self) -> None:
        """Begin a step, whose shapes may differ from those of the last one."""
        if self.varies:
            self._specs.clear()
            self._floating.clear()
            self._exchanged.clear()

    def peer(self, action: Action) -> int | None:
        """Return the first member at the other end of a SEND or RECV; None if there is none."""
        return next(iter(self._route(action).peers), None) if action.op in SENDS or action.op in RECVS else None

    def expect(self, action: Action) -> None:
        """Announce a future RECV. Its buffers are posted as soon as its shapes are known.

        They are never posted before those of an earlier RECV from the same peer, because a transport without tags
        delivers in order.
        """
        queue = self._expected[self._route(action).peers[0]]
        queue.append(action)
        while queue and self._known(queue[0]):
            self._post(queue.popleft())

    def receive(self, action: Action) -> Values:
        """Wait for the values of a RECV and return them. A peer's RECVs must come in the order of ``expect``."""
        if action not in self._posted:
            queue, route = self._expected[self._route(action).peers[0]], self._route(action)
            if action in queue:  # false if it is received again, for a repeated update
                assert queue.popleft() == action, "receives are taken in the order of the row"
            if not self._known(action):
                specs, known = self._read_header(route), self._specs.get(route.crossing)
                if known is not None and specs != known:  # known from another replica
                    raise _other_shapes(route.crossing, specs, known)
                self._record(route.crossing, specs)
                self._exchanged.add((route.crossing, route.peers[0]))
            self._post(action)
        buffers, handles = self._posted.pop(action)
        wait_all(handles)
        return tuple(buffers)

    def _known(self, action: Action) -> bool:
        route = self._route(action)
        if action.op is Op.RECV_B:
            return route.crossing in route.specs
        return (route.crossing, route.peers[0]) in self._exchanged

    def _post(self, action: Action) -> None:
        """Allocate the buffers of a RECV whose shapes are known, and start receiving into them."""
        route = self._route(action)
        link, peer, tag = self._link(), route.peers[0], route.tag
        recv, device = link.recv, link.device
        specs = route.specs[route.crossing]
        buffers = [empty_in(spec.shape, spec.order, spec.dtype, device) for spec in specs]
        handles = [recv(_flat(buffers[i], specs[i]), peer, tag + 1 + i) for i in range(len(specs))]
        self._posted[action] = (buffers, handles)

    def send(self, action: Action, values: Values) -> None:
        """Start sending the values of a SEND, and keep them alive until they are received.

        Blocks only while SEND_WINDOW earlier messages to the same peer are not received.

        Raises:
            ValueError: The stage returned other shapes or dtypes than for an earlier microbatch, or something that
                can't cross a boundary (too many tensors or dims, or an unsupported dtype).
        """
        route = self._route(action)
        if action.op is Op.SEND_F:
            self._check_shapes(route.crossing, values)
        send, tag, specs = self._link().send, route.tag, route.specs[route.crossing]
        for peer in route.peers:
            queue = self._sending[peer]
            while len(queue) >= SEND_WINDOW:
                wait_all(queue.popleft())
            handles = self._send_header(route, peer) if action.op is Op.SEND_F else []
            handles += [send(_flat(values[i], specs[i]), peer, tag + 1 + i) for i in range(len(values))]
            queue.append(handles)

    def drain(self) -> None:
        """Wait until everything that was sent has been received."""
        for queue in self._sending.values():
            while queue:
                wait_all(queue.popleft())

    def _record(self, crossing: Crossing, specs: tuple[Spec, ...]) -> None:
        self._specs[crossing] = specs
        learns = crossing[0] >= self.first_learning
        self._floating[crossing] = tuple(spec for spec in specs if learns and spec.dtype.is_floating_point)

    def _check_shapes(self, crossing: Crossing, values: Values) -> None:
        """Record the shapes of forward values that are sent over a boundary.

        Raises ValueError if the values have other shapes than recorded before.
        """
        known = self._specs.get(crossing)
        if known is not None and len(known) == len(values):
            pairs = zip(known, values, strict=True)
            if all(spec.shape == value.shape and spec.dtype == value.dtype for spec, value in pairs):
                return
        specs = tuple(Spec(tuple(value.shape), value.dtype, memory_order(value)) for value in values)
        if known is not None:
            raise _other_shapes(crossing, specs, known)
        self._record(crossing, specs)

    def _send_header(self, route: ValueRoute, peer: int) -> list[Handle]:
        """Start sending the shapes of forward values, unless the receiver has those of the boundary already."""
        if (route.crossing, peer) in self._exchanged:
            return []
        header = _pack(self._specs[route.crossing])
        self._exchanged.add((route.crossing, peer))
        return [self._link().host.send(header, peer, route.tag, count_as="send shapes")]

    def _read_header(self, route: ValueRoute) -> tuple[Spec, ...]:
        header = torch.empty(_HEADER, dtype=torch.int64)
        self._link().host.recv(header, route.peers[0], route.tag, count_as="recv shapes").wait()
        return _unpack(header)

    def _link(self) -> Group:
        assert self.group is not None
        return self.group

    def _route(self, action: Action) -> ValueRoute:
        route = self._routes.get(action)
        if route is None:
            route = self._routes[action] = self._find_route(action)
        return route

    def _find_route(self, action: Action) -> ValueRoute:
        """Compute the route of a SEND or RECV.

        Its tag encodes the sending stage, or the number of the skip, the direction and the microbatch.
        """
        stage, op, microbatch, peer = action
        assert stage is not None and microbatch is not None
        backward = op in (Op.SEND_B, Op.RECV_B)
        other = peer if peer is not None else stage + (1 if op in (Op.SEND_F, Op.RECV_B) else -1)
        pair = min(stage, other), max(stage, other)
        source = self._tags[pair] if peer is not None else stage if op in SENDS else other
        tag = ((source * 2 + backward) * self.num_microbatches + microbatch) * (_MOST_TENSORS + 1)
        crossing = pair[0], pair[1] if peer is not None else 0, microbatch if self.varies else 0
        return ValueRoute(self.peers(action), tag, crossing, self._floating if backward else self._specs)


def _other_shapes(crossing: Crossing, specs: tuple[Spec, ...], known: tuple[Spec, ...]) -> ValueError:
    """Return the error of a stage's outputs that have other shapes than before."""
    return ValueError(
        f"stage {crossing[0]} returned {_list(specs)}, for an earlier microbatch {_list(known)}: "
        "give batches of one shape, or say Batches(..., varying=True)"
    )


def _pack(specs: tuple[Spec, ...]) -> Tensor:
    """Write specs into a header, (_HEADER,) int64. Raises ValueError if they don't fit or a dtype is unsupported."""
    numbers = [len(specs)]
    for shape, dtype, order in specs:
        if dtype not in _DTYPES:
            raise ValueError(f"a stage returned {dtype}: between stages go {', '.join(map(str, _DTYPES))}")
        encoded = sum(dim * _DIMS**digit for digit, dim in enumerate(order))
        numbers += [_DTYPES.index(dtype), len(shape), *shape, encoded]
    if len(specs) > _MOST_TENSORS or len(numbers) > _HEADER or any(len(spec.shape) > _DIMS - 1 for spec in specs):
        raise ValueError(
            f"a stage returned {len(specs)} tensors: at most {_MOST_TENSORS} of few dims can cross a boundary"
        )
    return torch.tensor(numbers + [0] * (_HEADER - len(numbers)))


def _unpack(header: Tensor) -> tuple[Spec, ...]:
    """Read the specs that ``_pack`` wrote."""
    numbers = iter(header.tolist())
    specs = []
    for _ in range(next(numbers)):
        dtype, dims = _DTYPES[next(numbers)], next(numbers)
        shape, encoded = tuple(next(numbers) for _ in range(dims)), next(numbers)
        specs.append(Spec(shape, dtype, tuple(encoded // _DIMS**digit % _DIMS for digit in range(dims))))
    return tuple(specs)


def _flat(value: Tensor, spec: Spec) -> Tensor:
    """Return a contiguous view of the value, with its dims in memory order, so that sending needs no copy."""
    return value if spec.plain else value.permute(spec.order)


def _list(specs: tuple[Spec, ...]) -> str:
    return ", ".join(map(str, specs))
