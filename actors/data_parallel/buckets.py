"""Group the gradients, or the weights, of several parameters into one flat tensor, so that one message moves them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from types import MappingProxyType

import torch
from torch import Tensor, nn

from raypar.actors.data_parallel.cut_layout import CutLayout, ReplicaCut
from raypar.actors.portions import portions_by_kind
from raypar.actors.tensors import dense_strides, nbytes, sum_dtype


@dataclass(eq=False)
class Bucket:
    """Parameters of one stage and one dtype whose gradients are communicated as one flat tensor.

    The flat tensor holds all gradients, and after them one flag for each parameter: 1 if the parameter has a gradient,
    else 0. The flags are summed over the replicas with the gradients. They distinguish a parameter that no replica used
    (its gradient stays None, as in one process) from a parameter whose gradient is zero.

    Attributes:
        stage: Number of the stage.
        channel: Index of the Reducer's channel that the gradients go to.
        parameters: The parameters by logical name, in the order of the flat tensor.
        strides: The strides of the gradients of sharded parameters; they are known only while a parameter is gathered.
        elements: Number of elements of all parameters together, without the flags.
    """

    stage: int
    channel: int
    parameters: Mapping[str, nn.Parameter]
    strides: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._like: Tensor = next(iter(self.parameters.values()))
        *starts, self.elements = accumulate((p.numel() for p in self.parameters.values()), initial=0)
        dense = {name: dense_strides(p) for name, p in self.parameters.items()}  # even where p is not
        self._flagged: Sequence[str] = tuple(self.parameters)
        self._where = {
            name: (start, self.strides.get(name, dense[name])) for name, start in zip(dense, starts, strict=True)
        }

    @property
    def size(self) -> int:
        """Number of elements of the flat tensor: the gradients and one flag for each parameter."""
        return self.elements + len(self._flagged)

    @property
    def sum_size(self) -> int:
        """Number of elements of what an actor gets of the sum: the gradients that it gets, and their flags."""
        return self.size

    @property
    def summed(self) -> Collection[str]:
        """Logical names of the parameters of whose gradients an actor that gets the sum has a part, or all."""
        return self.parameters.keys()

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients together."""
        return self.elements * self.grad_dtype.itemsize

    @property
    def sum_bytes(self) -> int:
        """Bytes of the gradients of which an actor gets the sum."""
        return self.num_bytes

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the weights."""
        return self._like.dtype

    @property
    def grad_dtype(self) -> torch.dtype:
        """dtype in which the gradients are accumulated."""
        return sum_dtype(self._like)

    @torch.no_grad()
    def move_in(self, name: str, flat: Tensor) -> None:
        """Copy a parameter's gradient into the flat tensor and make ``parameter.grad`` a view of it.

        Does nothing if the parameter has no gradient, or if its gradient is that view already.

        Args:
            name: Logical name of the parameter.
            flat: The bucket's flat tensor (size,).
        """
        parameter, view = self.parameters[name], self.view(name, flat)
        if parameter.grad is not None and parameter.grad.data_ptr() != view.data_ptr():
            parameter.grad = view.copy_(parameter.grad)

    @torch.no_grad()
    def fill(self, flat: Tensor) -> None:
        """Complete the flat tensor (size,) for the reduction: set the flags, and fill missing gradients with zeros.

        Afterwards every ``parameter.grad`` is a view of ``flat``.
        """
        flags = torch.tensor([float(self.parameters[name].grad is not None) for name in self._flagged])
        flat[self.elements :].copy_(flags, non_blocking=True)  # don't block: a GPU still runs the backward
        for name, parameter in self.parameters.items():
            if parameter.grad is None:
                parameter.grad = self.view(name, flat).zero_()
            else:
                self.move_in(name, flat)

    def zeros(self) -> Tensor:
        """Return a flat tensor (size,) of zeros: no parameter has a gradient."""
        return self._like.new_zeros(self.size)

    def adopt(self, flat: Tensor, uses: Sequence[float]) -> None:
        """Make the gradients views of a flat tensor (size,) that was summed over the replicas.

        A parameter that no replica used gets the gradient None.

        Args:
            flat: The flat tensor.
            uses: Its ``flags``, on the host.
        """
        for name, gradient in self.gradients(flat, uses):
            self.parameters[name].grad = gradient

    def flags(self, flat: Tensor) -> Tensor:
        """Return the flags of the parameters that an actor gets in a flat tensor (size,), in the order of ``summed``.

        Summed over the replicas, a flag is 0 if no replica used the parameter.
        """
        return flat[self.elements :]

    def gradients(self, flat: Tensor, uses: Sequence[float]) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the gradients in a flat tensor (size,) that was summed over the replicas: (logical name, view).

        The gradient of a parameter that no replica used is None.

        Args:
            flat: The flat tensor.
            uses: Its ``flags``, on the host.
        """
        for name, count in zip(self.parameters, uses, strict=True):
            yield name, self.view(name, flat) if count else None

    def empty_weights(self) -> Tensor:
        """Return an uninitialised flat tensor (elements,) for the weights."""
        return self._like.new_empty(self.elements)

    def weights(self) -> Tensor:
        """Return a new flat tensor (elements,) with a copy of the weights."""
        flat = self.empty_weights()
        self.read_into(flat)
        return flat

    @torch.no_grad()
    def read_into(self, flat: Tensor) -> None:
        """Copy the weights into a flat tensor (elements,)."""
        for name, parameter in self.parameters.items():
            self.view(name, flat).copy_(parameter)

    @torch.no_grad()
    def move_weights(self, flat: Tensor) -> None:
        """Move the weights into a flat tensor (elements,): each parameter's data becomes a view of it."""
        for name, parameter in self.parameters.items():
            parameter.data = self.view(name, flat).copy_(parameter)

    def drop_gradients(self) -> None:
        """Set all gradients to None, because another actor holds their sum."""
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def load(self, flat: Tensor) -> None:
        """Copy the weights from a flat tensor (elements,) into the parameters."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self.view(name, flat))

    def view(self, name: str, flat: Tensor) -> Tensor:
        """Return a parameter's part of a flat tensor, as a view in the parameter's shape.

        It has the strides that torch would allocate for the gradient, because optimizers rely on them.
        """
        start, stride = self._where[name]
        return flat.as_strided(self.parameters[name].shape, stride, start)


@dataclass(eq=False)
class CutBucket(Bucket):
    """A bucket of parameters whose elements the replicas divide among them.

    Its flat tensor has a flag for each parameter and each replica that holds a part of it: see ``CutLayout``.

    Attributes:
        cuts: How the replicas divide each parameter, by logical name.
    """

    cuts: Mapping[str, ReplicaCut] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layout = CutLayout(self.parameters, self.cuts)
        self.elements, self._flagged = self.layout.elements, self.layout.flagged
        self._where = {name: (self.layout.starts[name], stride) for name, (_, stride) in self._where.items()}

    @property
    def num_bytes(self) -> int:
        """Bytes of all gradients together."""
        return sum(p.numel() for p in self.parameters.values()) * self.grad_dtype.itemsize

    @property
    def sum_size(self) -> int:
        return self.layout.summed_count

    @property
    def summed(self) -> Collection[str]:
        return self.layout.own.keys()

    @property
    def sum_bytes(self) -> int:
        return self.layout.count * self.grad_dtype.itemsize

    def flags(self, flat: Tensor) -> Tensor:
        return flat[self.layout.count :] if self._is_packed(flat) else self.layout.own_flags(flat)

    def gradients(self, flat: Tensor, uses: Sequence[float]) -> Iterator[tuple[str, Tensor | None]]:
        """Yield this actor's parts of the summed gradients: (logical name, view (elements,)).

        That of a parameter that no replica used is None.

        Args:
            flat: The flat tensor (size,), in which this actor's part is the sum; or this part alone, packed.
            uses: Its ``flags``, on the host.
        """
        part = self.layout.part if self._is_packed(flat) else self.layout.span
        for name, count in zip(self.layout.own, uses, strict=True):
            yield name, part(name, flat) if count else None

    def _is_packed(self, flat: Tensor) -> bool:
        return flat.numel() != self.size


def pack(
    stage: int,
    parameters: Mapping[str, nn.Parameter],
    channel_of: Mapping[str, int],
    limit: int,
    strides: Mapping[str, Sequence[int]] = MappingProxyType({}),
    cuts: Mapping[str, ReplicaCut] = MappingProxyType({}),
) -> list[Bucket]:
    """Group the parameters of a stage into buckets.

    The buckets of one channel do not depend on the parameters of other ones, so a parameter server, which has only the
    parameters that it owns, builds the same buckets as the workers.

    Args:
        stage: Number of the stage.
        parameters: The stage's parameters by logical name, in the order in which the forward uses them. A backward
            computes their gradients from last to first, so the buckets are filled in that order.
        channel_of: The channel of each parameter. All parameters of a bucket have one channel and one dtype.
        limit: Largest size of a bucket's gradients in bytes. A parameter larger than this is a bucket by itself.
        strides: The strides of the gradients of sharded parameters.
        cuts: How replicas divide the elements of parameters, by logical name: of all or none of a channel's.

    Returns:
        The buckets, in the order in which they were filled.
    """
    found: list[Bucket] = []
    for (channel, _), names in portions_by_kind(
        reversed(list(parameters)),
        lambda name: (channel_of[name], parameters[name].dtype),
        lambda name: nbytes(parameters[name]),
        limit,
    ):
        held = {name: parameters[name] for name in names}
        is_cut = not cuts.keys().isdisjoint(held)
        found.append(
            CutBucket(stage, channel, held, strides, cuts) if is_cut else Bucket(stage, channel, held, strides)
        )
    return found
