"""Build a model without its weights, then make the weights of some of its layers only.

``record`` runs the user's function with every new tensor on the meta device and writes down what was done to them;
``Recording.materialize`` does it again, for real, for chosen modules alone. Random ops are seeded by their place in the
recording, so a weight has the same bits whichever other layers are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from raypar.actors.seeds import derive


@dataclass(frozen=True)
class _Call:
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]

    def reads(self) -> set[int]:
        return {_storage(t) for t in tree_iter((self.args, self.kwargs)) if _is_meta(t)}

    def writes(self) -> set[int]:
        made = {_storage(t) for t in self.outputs}
        return made | self.reads() if self.func._schema.is_mutable else made


class Recording:
    """The ops of a build, in order. Holds meta tensors only."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def add(self, call: _Call) -> None:
        self._calls.append(call)

    def materialize(self, modules: Iterable[nn.Module], seed: int) -> None:
        """Replace the meta parameters and buffers of ``modules`` by real ones on the CPU, in place."""
        owners = [owner for module in modules for owner in module.modules()]
        slots = [
            (table, name, tensor)
            for owner in owners
            for table in (owner._parameters, owner._buffers)
            for name, tensor in table.items()
            if tensor is not None and tensor.is_meta
        ]
        real = self._replay({_storage(tensor) for _, _, tensor in slots}, seed)
        made: dict[int, Any] = {}  # a parameter that two modules share stays one object
        for table, name, tensor in slots:
            if id(tensor) not in made:
                value = _real(tensor, real)
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
            table[name] = made[id(tensor)]

    def _replay(self, storages: set[int], seed: int) -> dict[int, Tensor]:
        needed, chosen = set(storages), []
        for ordinal in reversed(range(len(self._calls))):
            call = self._calls[ordinal]
            if call.writes() & needed:
                needed |= call.reads()
                chosen.append(ordinal)
        real: dict[int, Tensor] = {}
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for ordinal in reversed(chosen):
                call = self._calls[ordinal]
                if torch.Tag.nondeterministic_seeded in call.func.tags:
                    torch.default_generator.manual_seed(derive(seed, "init", ordinal))
                args, kwargs = tree_map(lambda t: _real(t, real) if _is_meta(t) else t, (call.args, call.kwargs))
                if "device" in kwargs:
                    kwargs["device"] = torch.device("cpu")
                results = [t for t in tree_iter(call.func(*args, **kwargs)) if isinstance(t, Tensor)]
                for meta, result in zip(call.outputs, results, strict=True):
                    real.setdefault(_storage(meta), result)
        return real


class _Recorder(TorchDispatchMode):
    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = torch.device("meta")
        result = func(*args, **kwargs)
        outputs = tuple(t for t in tree_iter(result) if _is_meta(t))
        if outputs or any(_is_meta(t) for t in tree_iter((args, kwargs))):
            self._recording.add(_Call(func, args, kwargs, outputs))
        return result


def record(build: Callable[[], Sequence[nn.Module]], seed: int) -> tuple[list[nn.Module], Recording]:
    """What ``build`` makes, on the meta device, and how to make it for real.

    Raises whatever ``build`` raises when its tensors have no values (it looks at one, say).
    """
    recording = Recording()
    with torch.random.fork_rng(devices=[]), _Recorder(recording):
        torch.manual_seed(derive(seed, "build"))  # for tensors made from Python or numpy values, which stay real
        return list(build()), recording


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _real(meta: Tensor, real: dict[int, Tensor]) -> Tensor:
    """The real tensor for a meta one: the same window on the real storage."""
    storage = real[_storage(meta)].untyped_storage()
    window = torch.empty(0, dtype=meta.dtype)
    return window.set_(storage, meta.storage_offset(), meta.size(), meta.stride())
