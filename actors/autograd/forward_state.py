"""What forwards change besides outputs: buffers, and frozen parameters such as the averaged teacher of BYOL or MoCo.

It gets back what it had where a forward is run again, or belongs to a step that is not taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from raypar.actors.autograd.torch_private import (
    DispatchMode,
    argument_names,
    leaves_of,
    num_writes,
    storage_id,
    written_arguments,
)
from raypar.actors.tensors import Values

log = logging.getLogger(__name__)

_IN_TIME = "let every forward write into them, at first with no effect, such as teacher.lerp_(student, 0.0)"
_Place = tuple[nn.Module, str]  # where a tensor is registered: the module, and the tensor's name in it
Then = dict[_Place, Tensor]  # the values of tensors at an earlier time


class FrozenWrites(DispatchMode):
    """Mode that notices which frozen parameters ops write into, and keeps what they had before the first write.

    It also sees writes into ``parameter.data``, which torch does not count.

    Args:
        modules: The modules that have the parameters.

    Attributes:
        first: What parameters had before the first write that was seen, by the parameter's ``id``.
    """

    only_looks = True

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self._modules = modules
        self._unwritten: dict[int, nn.Parameter] = {}  # by the id of the storage
        self.first: dict[int, Tensor] = {}

    @property
    def is_needed(self) -> bool:
        """Whether there are frozen parameters."""
        return any(not p.requires_grad for module in self._modules for p in module.parameters())

    def __enter__(self) -> Any:
        frozen = (p for module in self._modules for p in module.parameters() if not p.requires_grad)
        self._unwritten = {storage_id(parameter): parameter for parameter in frozen}
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if written := written_arguments(func):
            values = dict(zip(argument_names(func), args, strict=False)) | kwargs
            for tensor in leaves_of([values[name] for name in written if name in values]):
                parameter = self._unwritten.pop(storage_id(tensor), None) if isinstance(tensor, Tensor) else None
                if parameter is not None:
                    self.first[id(parameter)] = parameter.detach().clone()
        return func(*args, **kwargs)


class Before(NamedTuple):
    """The buffers and frozen parameters of modules at some time.

    Attributes:
        now: The buffers, and the frozen parameters that are known to change.
        clones: Copies of those that may change.
        writes: How often each was written to.
        frozen: Other frozen parameters: the parameter, how often it was written to, and its memory.
    """

    now: Then
    clones: Then
    writes: dict[_Place, int]
    frozen: dict[_Place, tuple[nn.Parameter, int, Tensor]]


NOTHING_BEFORE = Before({}, {}, {}, {})


class ForwardState:
    """Save what is about to change: by a forward that is run again, or in a step that may not be taken.

    The first time all buffers are saved, to find out which of them change. Later only those are. A frozen parameter is
    saved once it has been written into. One that is not written into by the first forward, but by a later one, is
    noticed behind that one: what it had before is lost then, and nothing may be computed from it.

    Args:
        *modules: The modules that are watched, with all submodules.
        writes: Has noticed the first writes into their frozen parameters.
    """

    def __init__(self, *modules: nn.Module, writes: FrozenWrites) -> None:
        self._modules, self._writes, self._changing = modules, writes, set[_Place]()
        self._known, self._lost = False, list[_Place]()  # what was found to change too late, of the last ``changed``

    def before(self) -> Before:
        """Save what may change, before something changes it."""
        now = self._now()
        asked = [place for place in now if place in self._changing or not self._known]
        clones = {place: now[place].detach().clone() for place in asked}
        frozen = {place: (p, num_writes(p), p.detach()) for place, p in self._frozen() if place not in self._changing}
        return Before(now, clones, {place: num_writes(tensor) for place, tensor in now.items()}, frozen)

    def changed(self, before: Before) -> Then:
        """Find out what has changed.

        Args:
            before: What ``before`` returned.

        Returns:
            The values before, as far as they were saved.
        """
        after = self._now()
        self._changing |= {
            place
            for place, tensor in before.now.items()
            if place not in self._changing
            and (
                after.get(place) is not tensor
                or num_writes(tensor) > before.writes[place]
                # batch_norm's writes are not counted
                or (place in before.clones and not torch.equal(tensor, before.clones[place]))
            )
        }
        self._known = True
        written = dict(self._written(before))
        self._changing |= written.keys()
        self._lost = [place for place, clone in written.items() if clone is None]
        values = {place: clone for place, clone in before.clones.items() if place in self._changing}
        return values | {place: clone for place, clone in written.items() if clone is not None}

    def put_back(self, before: Before) -> None:
        """Give the modules the tensors, and the values, that they had before.

        Args:
            before: What ``before`` returned.
        """
        with torch.no_grad():
            for (module, name), clone in self.changed(before).items():
                tensor = before.now[module, name] if (module, name) in before.now else before.frozen[module, name][0]
                tensor.copy_(clone)
                _table(module, name)[name] = tensor
        if self._lost:
            log.warning("%s, and keep what the forwards of a step that was not taken have made of them", self._late())

    def keep(self, forward: Callable[[], Values]) -> tuple[Values, Then]:
        """Run a forward.

        Args:
            forward: The forward, without arguments.

        Returns:
            The outputs, and, of all that the forward changes, the values before it.

        Raises:
            ValueError: It was the first to write into a frozen parameter, whose value before is lost.
        """
        before = self.before()
        outputs = forward()
        then = self.changed(before)
        if self._lost:
            raise ValueError(f"{self._late()}, so this forward can't be run again (recompute): {_IN_TIME}")
        return outputs, then

    @contextmanager
    def as_then(self, then: Then) -> Iterator[None]:
        """Replace what forwards change by copies with saved values, for the time of the context.

        Changes to the copies are dropped: the first forward has added the batch to running statistics already.

        Args:
            then: The saved values, from ``keep``. Tensors that are not in it get copies of their present values.
        """
        now, stand_ins = self._now(), dict[int, Tensor]()  # by id of the tensor: a shared one stays shared
        for place, tensor in now.items():
            if id(tensor) not in stand_ins:
                stand_in = then[place] if place in then else tensor.detach().clone()
                is_parameter = isinstance(tensor, nn.Parameter)
                stand_ins[id(tensor)] = nn.Parameter(stand_in, requires_grad=False) if is_parameter else stand_in
            module, name = place
            _table(module, name)[name] = stand_ins[id(tensor)]
        try:
            yield
        finally:
            for (module, name), tensor in now.items():
                _table(module, name)[name] = tensor

    def moved(self) -> set[int]:
        """Return the ids of the frozen parameters that forwards have changed."""
        return {id(p) for place, p in self._frozen() if place in self._changing}

    def note_moved(self, parameter: Tensor) -> None:
        """Take a frozen parameter for one that forwards change, as a checkpoint says."""
        self._changing |= {place for place, p in self._frozen() if p is parameter}

    def _late(self) -> str:
        names = ", ".join(sorted({f"{type(module).__name__}.{name}" for module, name in self._lost}))
        return f"frozen parameters ({names}) were first written into by a later forward than the first one"

    def _now(self) -> Then:
        """Return the present buffers of all modules, and the frozen parameters that are known to change."""
        buffers = {
            (part, name): buffer
            for module in self._modules
            for part in module.modules()
            for name, buffer in part._buffers.items()
            if buffer is not None
        }
        return buffers | {place: p for place, p in self._frozen() if place in self._changing}

    def _frozen(self) -> Iterator[tuple[_Place, nn.Parameter]]:
        """Yield the frozen parameters of all modules."""
        for module in self._modules:
            for part in module.modules():
                for name, parameter in part._parameters.items():
                    if parameter is not None and not parameter.requires_grad:
                        yield (part, name), parameter

    def _written(self, before: Before) -> Iterator[tuple[_Place, Tensor | None]]:
        """Yield the frozen parameters that were not known to change, and what they had before; None if that is lost."""
        for place, (parameter, writes, then) in before.frozen.items():
            module, name = place
            if module._parameters.get(name) is not parameter or parameter.data_ptr() != then.data_ptr():
                yield place, then
            elif id(parameter) in self._writes.first or num_writes(parameter) > writes:
                first = self._writes.first.get(id(parameter))
                yield place, None if first is None else first.clone()  # a forward that is run again writes into it


def _table(module: nn.Module, name: str) -> dict[str, Any]:
    """Return where a module keeps a tensor: among its buffers or its parameters."""
    return module._buffers if name in module._buffers else module._parameters
