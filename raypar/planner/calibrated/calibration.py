"""The measurements of ``raypar calibrate`` on a machine or cluster, and their interpolation to other sizes.

The fit by least squares is plain Python, so that predictions import neither numpy nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal, get_args

from annotated_types import Ge, Gt, Le, MinLen

from raypar.actors.bounds import Count
from raypar.actors.specs.types import DeviceKind
from raypar.schedules.float_sum import float_sum

FORMAT = 4


SomeSeconds = Annotated[float, Ge(0), Le(3600)]  # may be 0


Seconds = Annotated[float, Ge(1e-12), Le(3600)]


Size = Annotated[int, Ge(1), Le(10**15)]  # bytes, or elements of a tensor


GroupOp = Literal["all_reduce", "all_gather", "p2p"]


Family = Literal["gpt", "llama"]


Kind = Literal[
    Family,
    "tensor",
    "sequence",
    "context",
    "experts",
    "expert parallel",
    "reduced",
    "shared",
    "lent",
    "gathered",
    "split",
    "pipeline",
    "head",
]
#: Kinds whose size is the parameters of a block.
OF_PARAMETERS: frozenset[Kind] = frozenset(("reduced", "lent", "gathered"))
_BUSY = 0.5  # load of others, by core, from which on a calibration measures them too
_RIDGE = 1e-12  # added to the diagonal of normal equations of columns between 0 and 1: few points, no division by zero


def relative_fit(terms: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the coefficients whose sums of terms are nearest to values, an error counting as a part of its value.

    Args:
        terms: For each value its terms, which are not negative.
        values: The positive values.

    Returns:
        The coefficient of each term.
    """
    count = len(terms[0])
    rows = [[term / value for term in each] for each, value in zip(terms, values, strict=True)]
    sizes = [max(row[place] for row in rows) or 1.0 for place in range(count)]
    scaled = [[one / size for one, size in zip(row, sizes, strict=True)] for row in rows]
    equations = [
        [
            *(float_sum(row[i] * row[j] for row in scaled) + (_RIDGE if i == j else 0.0) for j in range(count)),
            float_sum(row[i] for row in scaled),
        ]
        for i in range(count)
    ]
    return [one / size for one, size in zip(_solved(equations), sizes, strict=True)]


def _solved(equations: list[list[float]]) -> list[float]:
    """Solve linear equations, each a row of coefficients and its right side, by elimination with pivots."""
    count = len(equations)
    for place in range(count):
        pivot = max(range(place, count), key=lambda row: abs(equations[row][place]))
        equations[place], equations[pivot] = equations[pivot], equations[place]
        for row in range(place + 1, count):
            part = equations[row][place] / equations[place][place]
            for column in range(place, count + 1):
                equations[row][column] -= part * equations[place][column]
    found = [0.0] * count
    for place in reversed(range(count)):
        known = float_sum(equations[place][column] * found[column] for column in range(place + 1, count))
        found[place] = (equations[place][count] - known) / equations[place][place]
    return found


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
        load: The machine's load average before it began: processes of others that wanted a core.
    """

    host: str
    processor: str
    cores: Count
    nodes: Count
    date: str
    seconds: Annotated[float, Ge(0), Le(1e6)]
    versions: dict[str, str | None]
    load: Annotated[float, Ge(0), Le(1e6)] = 0.0

    @property
    def busy(self) -> str:
        """A warning if it was measured on a busy machine; "" if not."""
        return busy_with(self.load, self.cores)


def busy_with(load: float, cores: int) -> str:
    """Return a warning if other programs use so many cores that measured times are too long; "" if not."""
    return f"measured on a busy machine (load {load:.1f} on {cores} cores)" if load > _BUSY * cores else ""


@dataclass(frozen=True)
class MeasuredProduct:
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
    forward: Seconds
    backward: Seconds


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
    forward: Seconds
    backward: Seconds

    @property
    def flops(self) -> float:
        """FLOPs of the forward, as ``core_cost`` counts them."""
        return 4.0 * self.tokens**2 * self.heads * self.width


@dataclass(frozen=True)
class Beside:
    """The additional seconds of a block, besides its products and messages.

    Attributes:
        kind: Of a family of models, besides its products; of an axis or of experts, what these add to that besides
            their products and messages; of gradients in buckets ("lent") and of gathered weights, what every
            pass over a block adds; of gradients that replicas sum once a step ("reduced"), under ``backward`` what the
            backwards of a step take longer together; of an update that replicas share out ("shared"), what the STEP
            takes longer; of a backward that is split, under ``forward`` what the forward and both halves take
            longer than whole, under ``backward`` what its W takes beyond the products of weights' gradients; of a stage
            of several ("pipeline"), what it takes longer because microbatches wait and messages come and go; of the
            last stage ("head"), what the head without its product and the loss take, once.
        size: Elements of the residual stream of a microbatch; of the kinds in OF_PARAMETERS, parameters of the block;
            of "shared", those of the actor; of "head", logits.
        forward: Seconds of a forward.
        backward: Seconds of a backward.
    """

    kind: Kind
    size: Size
    forward: SomeSeconds
    backward: SomeSeconds


@dataclass(frozen=True)
class MeasuredUpdate:
    """The seconds of an update, with the vote and the norm before it.

    Attributes:
        step: Seconds of a STEP, whatever is updated.
        tensor: Seconds for each tensor.
        parameter: Seconds for each parameter.
    """

    step: SomeSeconds
    tensor: SomeSeconds
    parameter: SomeSeconds


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
    bytes: Size
    seconds: Seconds


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
        besides: Additional seconds of blocks, by kind and size.
        action_forward: Seconds of a forward of a stage, whatever its blocks.
        action_backward: Seconds of its backward, whatever its blocks.
        update: What the update takes.
        groups: Operations of groups.
        busy: How much longer an actor computes while as many compute as the machine has cores; 1 on GPUs.
        message: Seconds that an actor spends on a SEND or a RECV of a message that is there.
        call: Seconds between two steps that the driver takes.
        process: Bytes of an actor's process without a run.
    """

    format: Annotated[int, Ge(FORMAT)]
    origin: Origin
    device: DeviceKind
    threads: Count
    products: Annotated[tuple[MeasuredProduct, ...], MinLen(1)]
    attention: Annotated[tuple[AttentionTime, ...], MinLen(1)]
    memory: Annotated[float, Gt(0), Le(1e15)]
    besides: tuple[Beside, ...]
    action_forward: SomeSeconds
    action_backward: SomeSeconds
    update: MeasuredUpdate
    groups: tuple[GroupTime, ...]
    busy: Annotated[float, Ge(1), Le(3600)]
    message: SomeSeconds
    call: SomeSeconds
    process: Size

    def product(self, rows: float, inner: float, columns: float) -> tuple[float, float]:
        """Return the seconds of a product and of its backward: a call, FLOPs, and elements that are read and written.

        The coefficients are those that fit the measured products best. Nothing is faster than the fastest of these.
        """
        terms = _terms(rows, inner, columns)
        found = (float_sum(each * term for each, term in zip(fit, terms, strict=True)) for fit in self._fits)
        forward, backward = (
            max(seconds, terms[1] * least) for seconds, least in zip(found, self._fastest, strict=True)
        )
        return forward, backward

    @cached_property
    def _fits(self) -> tuple[Sequence[float], Sequence[float]]:
        """The coefficients of a product's terms, forwards and backwards."""
        terms = [_terms(one.rows, one.inner, one.columns) for one in self.products]
        forward = relative_fit(terms, [one.forward for one in self.products])
        return forward, relative_fit(terms, [one.backward for one in self.products])

    @cached_property
    def _fastest(self) -> tuple[float, float]:
        """The seconds of a multiplication in the fastest measured product, forwards and backwards."""
        each = [(one, one.rows * one.inner * one.columns) for one in self.products]
        return min(one.forward / size for one, size in each), min(one.backward / size for one, size in each)

    def core(self, tokens: float, heads: float, width: float) -> tuple[float, float]:
        """Return the seconds of an attention core forwards and backwards, by its speed between the measured lengths.

        Beyond these it is that of the nearest one.
        """
        measured = sorted((1 / one.tokens, one.forward / one.flops, one.backward / one.flops) for one in self.attention)
        at = min(max(1 / tokens, measured[0][0]), measured[-1][0])  # a FLOP's seconds go in a line with 1 / tokens
        forward, backward = (_between(((one[0], one[way]) for one in measured), at) for way in (1, 2))
        flops = 4.0 * tokens**2 * heads * width
        return flops * forward, flops * backward

    def beside(self, kind: Kind, size: float) -> tuple[float, float]:
        """Return the seconds of a block forwards and backwards besides what is counted, between the measured sizes.

        For a family that was not measured they are those of the other one; for any other kind, 0.
        """
        found = [one for one in self.besides if one.kind == kind]
        if not found and kind in get_args(Family):
            found = [one for one in self.besides if one.kind in get_args(Family)]
        if not found:
            return 0.0, 0.0
        forward, backward = (sorted((one.size, getattr(one, way)) for one in found) for way in ("forward", "backward"))
        return _between(forward, size), _between(backward, size)

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


def _terms(rows: float, inner: float, columns: float) -> tuple[float, ...]:
    """Return the terms of a product's time: a call, multiplications, and elements of its three matrices."""
    return 1.0, rows * inner * columns, rows * inner, inner * columns, rows * columns


def _between(points: Iterable[tuple[float, float]], at: float) -> float:
    """Return the value on the straight lines through points, beyond the last one in proportion."""
    before: tuple[float, float] | None = None
    for x, y in points:
        if at <= x:
            return y if before is None else before[1] + (y - before[1]) * (at - before[0]) / (x - before[0])
        before = x, y
    assert before is not None
    return before[1] * at / before[0]
