"""What ``raypar calibrate`` has measured on a machine or cluster, and what it says of other sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, MinLen

from raypar.actors.bounds import Count, NotNegative, Positive
from raypar.actors.specs.types import DeviceKind

FORMAT = 1
_NEIGHBOURS = 4  # measured products from which one of another shape is interpolated

GroupOp = Literal["all_reduce", "all_gather", "p2p"]
Family = Literal["gpt", "llama"]


@dataclass(frozen=True)
class Origin:
    """Where a calibration comes from.

    Attributes:
        host: Name of the machine of the driver.
        processor: Its processor, or the first GPU of the nodes.
        cores: Its CPU cores.
        nodes: Number of nodes that were measured.
        date: When it was measured, in ISO 8601.
        seconds: How long that took.
        versions: Of raypar, Python, torch and Ray.
    """

    host: str
    processor: str
    cores: Count
    nodes: Count
    date: str
    seconds: NotNegative
    versions: dict[str, str | None]


@dataclass(frozen=True)
class Product:
    """The matrix product of a linear layer, (rows, inner) x (inner, columns), in fp32.

    Attributes:
        rows: Number of rows: tokens.
        inner: Length of an input.
        columns: Length of an output.
        forward: Seconds of the product.
        backward: Seconds of the two products of its backward.
    """

    rows: Count
    inner: Count
    columns: Count
    forward: Positive
    backward: Positive


@dataclass(frozen=True)
class AttentionTime:
    """The core of causal attention.

    Attributes:
        tokens: Tokens of a sequence.
        heads: Heads times samples.
        width: Width of a head.
        forward: Seconds of a forward.
        backward: Seconds of a backward.
    """

    tokens: Count
    heads: Count
    width: Count
    forward: Positive
    backward: Positive

    @property
    def flops(self) -> float:
        """FLOPs of the forward, as ``core_cost`` counts them."""
        return 4.0 * self.tokens**2 * self.heads * self.width


@dataclass(frozen=True)
class Layer:
    """What a block, and an action, take besides their products.

    Attributes:
        family: The kind of model.
        action_forward: Seconds of a forward of a stage, whatever its blocks.
        action_backward: Seconds of its backward, likewise.
        forward: Seconds of a block in a forward.
        backward: Seconds of a block in a backward.
        element_forward: Seconds for each element of the residual stream in a forward.
        element_backward: Seconds for each of them in a backward.
    """

    family: Family
    action_forward: NotNegative
    action_backward: NotNegative
    forward: NotNegative
    backward: NotNegative
    element_forward: NotNegative
    element_backward: NotNegative


@dataclass(frozen=True)
class Update:
    """What the update takes, with the vote and the norm before it.

    Attributes:
        step: Seconds of a STEP, whatever is updated.
        tensor: Seconds for each tensor.
        parameter: Seconds for each parameter.
    """

    step: NotNegative
    tensor: NotNegative
    parameter: NotNegative


@dataclass(frozen=True)
class GroupTime:
    """An operation of a group.

    Attributes:
        op: The operation; p2p is one way of a message between two members.
        members: Number of members.
        nodes: Number of nodes on which they are.
        bytes: Bytes of the whole tensor.
        seconds: How long it takes.
    """

    op: GroupOp
    members: Count
    nodes: Count
    bytes: Count
    seconds: Positive


@dataclass(frozen=True)
class Calibration:
    """Measured times of a machine or cluster.

    Attributes:
        format: Version of the file's format.
        origin: Where it comes from.
        device: What the actors computed on.
        threads: CPU threads of an actor.
        products: Matrix products by shape.
        attention: Cores of attention by shape.
        memory: Bytes per second that an actor reads and writes in large tensors.
        layers: What blocks take besides, by family.
        update: What the update takes.
        groups: Operations of groups.
        busy: How much longer an actor computes while as many compute as the machine has cores; 1 on GPUs.
        message: Seconds that an actor spends on a SEND or a RECV of a message that is there.
        call: Seconds between two steps that the driver takes.
    """

    format: Annotated[int, Ge(FORMAT)]
    origin: Origin
    device: DeviceKind
    threads: Count
    products: Annotated[tuple[Product, ...], MinLen(1)]
    attention: Annotated[tuple[AttentionTime, ...], MinLen(1)]
    memory: Positive
    layers: Annotated[tuple[Layer, ...], MinLen(1)]
    update: Update
    groups: tuple[GroupTime, ...]
    busy: Annotated[float, Ge(1)]
    message: NotNegative
    call: NotNegative

    def product(self, rows: float, inner: float, columns: float) -> tuple[float, float]:
        """Return the seconds of a product and of its backward, by the speed of measured ones of nearby shapes."""
        wanted = (rows, inner, columns)

        def distance(one: Product) -> float:
            measured = (one.rows, one.inner, one.columns)
            return sum(math.log(max(a, 1.0) / b) ** 2 for a, b in zip(wanted, measured, strict=True))

        near = sorted((distance(one), place) for place, one in enumerate(self.products))[:_NEIGHBOURS]
        weights = [(1 / (far + 1e-6), self.products[place]) for far, place in near]
        flops, total = rows * inner * columns, sum(weight for weight, _ in weights)
        forward, backward = (
            sum(weight * getattr(one, way) / (one.rows * one.inner * one.columns) for weight, one in weights) / total
            for way in ("forward", "backward")
        )
        return forward * flops, backward * flops

    def core(self, tokens: float, heads: float, width: float) -> tuple[float, float]:
        """Return the seconds of an attention core forwards and backwards, by the speed of the nearest length."""
        nearest = min(self.attention, key=lambda one: abs(math.log(tokens / one.tokens)))
        part = 4.0 * tokens**2 * heads * width / nearest.flops
        return nearest.forward * part, nearest.backward * part

    def layer(self, family: str) -> Layer:
        """Return what blocks of a family take; of one that was not measured, what those of the first one do."""
        return next((one for one in self.layers if one.family == family), self.layers[0])

    def group(self, op: GroupOp, members: int, bytes_: float) -> float:
        """Return the seconds of an operation of a group, between those of the measured sizes.

        Args:
            op: The operation.
            members: Number of members; those of the nearest number were measured.
            bytes_: Bytes of the whole tensor.
        """
        measured = [one for one in self.groups if one.op == op]
        if members < 2 or not measured or not bytes_:
            return 0.0
        nearest = min((one.members for one in measured), key=lambda count: abs(math.log(members / count)))
        points = sorted((one.bytes, one.seconds) for one in measured if one.members == nearest)
        return _between(points, bytes_)


def _between(points: Iterable[tuple[float, float]], at: float) -> float:
    """Return the value on the straight lines through points, beyond the last one in proportion."""
    before: tuple[float, float] | None = None
    for x, y in points:
        if at <= x:
            return y if before is None else before[1] + (y - before[1]) * (at - before[0]) / (x - before[0])
        before = x, y
    assert before is not None
    return before[1] * at / before[0]
