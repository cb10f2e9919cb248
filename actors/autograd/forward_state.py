"""State that forwards change: buffers, and frozen parameters such as the averaged teacher of BYOL or MoCo.

It is restored if a forward is repeated, or if its step is not taken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
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
_Slot = tuple[nn.Module, str]  # the module in which a tensor is registered, and its name there
Then = dict[_Slot, Tensor]  # the values of tensors at an earlier time


def submodules(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Return modules and all that are in them, each once; it takes a third of the time of ``modules()``."""
    found = [*modules]
    seen = {*found}
    for part in found:
        for one in part._modules.values():
            if one is not None and one not in seen:
                seen.add(one)
                found.append(one)
    return found


class FrozenWrites(DispatchMode):
    """Mode that records which frozen parameters ops write into, and saves their values before the first write.

    It also records writes into ``parameter.data``, which torch does not count.

    Args:
        modules: The modules that have the parameters.

    Attributes:
        first: The values of parameters before the first recorded write, by the parameter's ``id``.
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
        writes: Number of writes to each.
        frozen: Other frozen parameters: the parameter, its number of writes, and its memory.
    """

    now: Then
    clones: Then
    writes: dict[_Slot, int]
    frozen: dict[_Slot, tuple[nn.Parameter, int, Tensor]]


NOTHING_BEFORE = Before({}, {}, {}, {})


class ForwardState:
    """Saves and restores the state that forwards change, for forwards that are repeated and steps that are not taken.

    The first time all buffers are saved, to find out which of them change. Later only those are saved. A frozen
    parameter is saved after the first forward that writes into it. If that is not the first forward of all, its value
    before is lost, and nothing may be computed from it.

    Args:
        *modules: The modules, with all submodules.
        writes: The record of the first writes into their frozen parameters.
    """

    def __init__(self, *modules: nn.Module, writes: FrozenWrites) -> None:
        self._modules, self._writes, self._changing = modules, writes, set[_Slot]()
        self._known, self._lost = False, list[_Slot]()  # values that the last ``changed`` found to be lost

    def before(self) -> Before:
        """Save the state that may change."""
        now, parameters = self._tensors()
        saved = [slot for slot in now if slot in self._changing or not self._known]
        clones = {slot: now[slot].detach().clone() for slot in saved}
        frozen = {slot: (p, num_writes(p), p.detach()) for slot, p in parameters.items()}
        return Before(now, clones, {slot: num_writes(tensor) for slot, tensor in now.items()}, frozen)

    def changed(self, before: Before) -> Then:
        """Find the state that has changed.

        Args:
            before: The result of ``before``.

        Returns:
            Its saved values.
        """
        self._changing |= {
            slot
            for slot, tensor in before.now.items()
            if slot not in self._changing
            and (
                _table(*slot).get(slot[1]) is not tensor
                or num_writes(tensor) > before.writes[slot]
                # batch_norm's writes are not counted
                or (slot in before.clones and not torch.equal(tensor, before.clones[slot]))
            )
        }
        self._known = True
        written = dict(self._written(before))
        self._changing |= written.keys()
        self._lost = [slot for slot, clone in written.items() if clone is None]
        values = {slot: clone for slot, clone in before.clones.items() if slot in self._changing}
        return values | {slot: clone for slot, clone in written.items() if clone is not None}

    def put_back(self, before: Before) -> None:
        """Restore the modules' tensors and their values.

        Args:
            before: The result of ``before``.
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
            The outputs, and the values before the forward of all state that it changes.

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
        """Return a context in which the state that forwards change is replaced by copies with saved values.

        Changes to the copies are dropped: the first forward has added the batch to running statistics already.

        Args:
            then: The saved values, from ``keep``. Other tensors are replaced by copies of their present values.
        """
        now, stand_ins = self._tensors()[0], dict[int, Tensor]()  # by id of the tensor: a shared one stays shared
        for slot, tensor in now.items():
            if id(tensor) not in stand_ins:
                stand_in = then[slot] if slot in then else tensor.detach().clone()
                is_parameter = isinstance(tensor, nn.Parameter)
                stand_ins[id(tensor)] = nn.Parameter(stand_in, requires_grad=False) if is_parameter else stand_in
            module, name = slot
            _table(module, name)[name] = stand_ins[id(tensor)]
        try:
            yield
        finally:
            for (module, name), tensor in now.items():
                _table(module, name)[name] = tensor

    def moved(self) -> set[int]:
        """Return the ids of the frozen parameters that forwards change."""
        return {id(p) for p in self._tensors()[0].values() if isinstance(p, nn.Parameter)}

    def note_moved(self, parameter: Tensor) -> None:
        """Mark a frozen parameter as one that forwards change, by a checkpoint."""
        self._changing |= {slot for slot, p in self._tensors()[1].items() if p is parameter}

    def _late(self) -> str:
        names = ", ".join(sorted({f"{type(module).__name__}.{name}" for module, name in self._lost}))
        return f"frozen parameters ({names}) were first written into by a later forward than the first one"

    def _tensors(self) -> tuple[Then, dict[_Slot, nn.Parameter]]:
        """Return the buffers and the frozen parameters known to change of all modules, and other frozen parameters."""
        now, others = Then(), dict[_Slot, nn.Parameter]()
        for part in submodules(self._modules):
            now |= {(part, name): buffer for name, buffer in part._buffers.items() if buffer is not None}
            for name, parameter in part._parameters.items():
                if parameter is not None and not parameter.requires_grad:
                    slot = (part, name)
                    if slot in self._changing:
                        now[slot] = parameter
                    else:
                        others[slot] = parameter
        return now, others

    def _written(self, before: Before) -> Iterator[tuple[_Slot, Tensor | None]]:
        """Yield the frozen parameters newly found to change, with their values before; None if these are lost."""
        for slot, (parameter, writes, then) in before.frozen.items():
            module, name = slot
            if module._parameters.get(name) is not parameter or parameter.data_ptr() != then.data_ptr():
                yield slot, then
            elif id(parameter) in self._writes.first or num_writes(parameter) > writes:
                first = self._writes.first.get(id(parameter))
                yield slot, None if first is None else first.clone()  # a repeated forward writes into it


def _table(module: nn.Module, name: str) -> dict[str, Any]:
    """Return the table of a module that has a tensor: its buffers or its parameters."""
    return module._buffers if name in module._buffers else module._parameters
