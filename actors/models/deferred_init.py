"""Build a model without its weights, then make the weights of some of its layers only.

``record`` runs the user's function with every new tensor on the meta device and writes down what was done to them;
``Recording.materialize`` does it again, for real, for chosen modules alone. Random ops are seeded by their place in the
recording, so a weight has the same bits whichever other layers are made.
"""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from raypar.actors.rng import derive

_META, _CPU = torch.device("meta"), torch.device("cpu")
_TRUNC_NORMAL = "_no_grad_trunc_normal_"
_PROCESS = threading.RLock()  # generators and patches are the process' own: one thread at a time may hold them
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]  # how a torch function mode sees the property read


@dataclass(frozen=True)
class _Call:
    """An op as it was called: meta tensors with the shape and storage they had then, copies of the real ones."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    draws: bool


class Recording:
    """The ops of a build, in order. Holds meta tensors, and copies of real ones that went into them."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an op on the meta device and write it down; ops among real tensors are just done.

        Raises RuntimeError for what can't be done again later.
        """
        if any(argument.name == "device" for argument in func._schema.arguments):
            kwargs["device"] = _META
        elif not any(_is_meta(value) for value in tree_iter((args, kwargs))):
            return func(*args, **kwargs)
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        targets = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        written = [value for name in targets for value in tree_iter(given.get(name)) if isinstance(value, Tensor)]
        if not all(map(_is_meta, written)):
            raise RuntimeError(f"{func} writes values that are not there yet to a tensor that is")
        then_args, then_kwargs = tree_map(_frozen, (args, kwargs))  # now: the op may change the shape of its arguments
        args, kwargs = tree_map(_on_meta, (args, kwargs))
        result = args[0] if _fills(func) else func(*args, **kwargs)
        outputs = tuple(value.detach() for value in tree_iter(result) if _is_meta(value))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self._add(func, then_args, then_kwargs, outputs, written, draws)
        return result

    def trunc_normal(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """torch.nn.init's truncated normal looks at what it draws: write it down as one op."""
        if not _is_meta(tensor):
            return func(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        window, *rest = tree_map(_frozen, (tensor, *args))
        self._add(func, (window, *rest), tree_map(_frozen, kwargs), (window,), [tensor], draws=True)
        return tensor

    def materialize(self, modules: Iterable[nn.Module], seed: int) -> None:
        """Replace the meta tensors of ``modules`` by real ones on the CPU, in place: parameters, buffers, and what is
        an attribute and neither of both."""
        parts = [part for module in modules for part in module.modules()]
        slots = [slot for part in parts for slot in slots_of(part) if slot[2].is_meta]
        whole = {id(tensor): tensor for _, _, tensor in slots}  # a parameter that two modules share stays one object
        made = {
            key: as_kind_of(whole[key], value)
            for key, value in zip(whole, self.values(whole.values(), seed), strict=True)
        }
        for table, name, tensor in slots:
            table[name] = made[id(tensor)]

    def values(self, tensors: Iterable[Tensor], seed: int) -> list[Tensor]:
        """What meta tensors stand for, on the CPU, each a window on a storage that it may share with others; real
        tensors are what they are."""
        tensors = list(tensors)
        real = self._replay({_storage(tensor) for tensor in tensors if tensor.is_meta}, seed)
        return [_window(tensor, real) if tensor.is_meta else tensor for tensor in tensors]

    def _add(
        self, func: Any, args: Any, kwargs: Any, outputs: tuple[Tensor, ...], written: Sequence[Tensor], draws: bool
    ) -> None:
        reads = frozenset(_storage(value) for value in tree_iter((args, kwargs)) if _is_meta(value))
        writes = frozenset(map(_storage, (*outputs, *written)))
        self._calls.append(_Call(func, args, kwargs, outputs, reads, writes, draws))

    def _replay(self, storages: set[int], seed: int) -> dict[int, Tensor]:
        needed, chosen = set(storages), []
        for ordinal in reversed(range(len(self._calls))):
            call = self._calls[ordinal]
            if call.writes & needed:
                needed |= call.reads
                chosen.append(ordinal)
        real: dict[int, Tensor] = {}
        with _PROCESS, torch.no_grad(), torch.random.fork_rng(devices=[]):
            for ordinal in reversed(chosen):
                call = self._calls[ordinal]
                if call.draws:
                    torch.default_generator.manual_seed(derive(seed, "init", ordinal))
                args, kwargs = tree_map(lambda value: _real(value, real), (call.args, call.kwargs))
                if "device" in kwargs:
                    kwargs["device"] = _CPU
                results = [value for value in tree_iter(call.func(*args, **kwargs)) if isinstance(value, Tensor)]
                for meta, result in zip(call.outputs, results, strict=True):
                    if _storage(meta) not in real:
                        real[_storage(meta)] = _laid_out(result, meta)
        return real


class _Mode(TorchDispatchMode):
    """Is never compiled: torch would import its compiler to make sure, which takes 3 s and 80 MiB."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _Recorder(_Mode):
    """Sends every op to a recording."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            return self._recording.call(func, args, dict(kwargs or {}))


class _NotMeta(TorchFunctionMode):
    """Tensors say that they are not meta: torch.nn.init does nothing to meta tensors (orthogonal_, dirac_, sparse_)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False if func == _IS_META else func(*args, **(kwargs or {}))


class _NoFilling(_Mode):
    """Draws nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if _fills(func) else func(*args, **(kwargs or {}))


def slots_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Each tensor of a module itself, a parameter, a buffer, or an attribute that it did not register: the table that
    it is in, its name there, and the tensor."""
    for table in (module._parameters, module._buffers, vars(module)):
        yield from ((table, name, value) for name, value in table.items() if isinstance(value, Tensor))


def as_kind_of(tensor: Tensor, value: Tensor) -> Tensor:
    """A value as a parameter, or as a plain tensor, that asks for gradients or not, as ``tensor`` is one; with what the
    user noted on it."""
    kind = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor.requires_grad_
    made = kind(value.detach(), tensor.requires_grad)
    vars(made).update(vars(tensor))
    return made


def on_meta(build: Callable[[], Iterable[nn.Module]]) -> list[nn.Module]:
    """What ``build`` makes, on the meta device."""
    with _META:
        return unfilled(build)


def unfilled(build: Callable[[], Iterable[nn.Module]]) -> list[nn.Module]:
    """What ``build`` makes, but nothing is drawn for its weights."""
    with _NoFilling():  # type: ignore[no-untyped-call]
        return list(build())


def record(build: Callable[[], Sequence[nn.Module]], seed: int) -> tuple[list[nn.Module], Recording]:
    """What ``build`` makes, on the meta device, and how to make it for real.

    Raises whatever ``build`` raises when its tensors have no values (it looks at one, say).
    """
    recording = Recording()
    # the seed is for values drawn with Python or numpy, which are there at once
    with seeded(derive(seed, "build")), _whole_trunc_normal(recording), _NotMeta(), _Recorder(recording):
        return list(build()), recording


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python, and put them back afterwards."""
    with _PROCESS, torch.random.fork_rng(devices=[]):
        python, arrays = random.getstate(), np.random.get_state()
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(arrays)


@contextmanager
def _whole_trunc_normal(recording: Recording) -> Iterator[None]:
    """Let ``recording`` see torch.nn.init.trunc_normal_ as one op, however it was imported."""
    with _PROCESS:
        original = getattr(nn.init, _TRUNC_NORMAL, None)
        setattr(nn.init, _TRUNC_NORMAL, lambda *args, **kwargs: recording.trunc_normal(original, *args, **kwargs))
        try:
            yield
        finally:
            setattr(nn.init, _TRUNC_NORMAL, original)


def _fills(func: Any) -> bool:
    """Whether an op fills its first argument with random values, of which a meta tensor has none.

    For that too torch would import its compiler.
    """
    return torch.Tag.nondeterministic_seeded in func.tags and str(func._schema.name).endswith("_")


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _frozen(value: Any) -> Any:
    """An argument as it is now, whatever becomes of it."""
    if isinstance(value, torch.Generator):
        raise RuntimeError("values are drawn from a generator of their own")  # whose state depends on earlier draws
    if not isinstance(value, Tensor):
        return value
    if value.is_conj() or value.is_neg():
        raise RuntimeError("a tensor is a lazy conjugate or negative")
    return value.detach() if _is_meta(value) else value.detach().clone()


def _on_meta(value: Any) -> Any:
    if not isinstance(value, Tensor) or _is_meta(value):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)


def _real(value: Any, real: dict[int, Tensor]) -> Any:
    if not isinstance(value, Tensor):
        return value
    return _window(value, real) if _is_meta(value) else value.clone()


def _window(meta: Tensor, real: dict[int, Tensor]) -> Tensor:
    """The real tensor for a meta one: the same window on the real storage."""
    storage = real[_storage(meta)].untyped_storage()
    window = torch.empty(0, dtype=meta.dtype)
    return window.set_(storage, meta.storage_offset(), meta.size(), meta.stride())


def _laid_out(result: Tensor, meta: Tensor) -> Tensor:
    """``result`` with the strides of ``meta``; a kernel for the CPU may choose others."""
    if (result.stride(), result.storage_offset()) == (meta.stride(), meta.storage_offset()):
        return result
    storage = torch.empty(meta.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
    window = torch.empty(0, dtype=meta.dtype).set_(storage, meta.storage_offset(), meta.size(), meta.stride())
    return window.copy_(result)


_MOST = 200_000  # things that are looked at: some tenths of a second


def has_strays(modules: Sequence[nn.Module]) -> bool:
    """Whether something in these modules keeps a meta tensor that is not registered with one of them, nor an attribute
    (a list, an object, a closure, a hook), or whether one that is has hooks, a class of its own, or a history.

    Also where there is too much in them to tell.
    """
    if any(_is_special(tensor) for module in modules for part in module.modules() for *_, tensor in slots_of(part)):
        return True
    coming, seen = list[Any](modules), set[int]()
    while coming and len(seen) < _MOST:
        thing = coming.pop()
        if id(thing) not in seen and not isinstance(thing, (type, ModuleType)):
            seen.add(id(thing))
            if issubclass(type(thing), Tensor) and thing.is_meta:
                return True
            coming += _things_in(thing)
    return bool(coming)


def _is_special(tensor: Tensor) -> bool:
    hooks = tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)
    return any(hooks) or type(tensor) not in (Tensor, nn.Parameter) or tensor.grad_fn is not None


def _things_in(thing: Any) -> Iterable[Any]:
    """What a thing refers to: a module but for its own tensors, a function but for the globals around it."""
    if isinstance(thing, nn.Module):
        known = {"_parameters", "_buffers"}
        if isinstance(thing, nn.RNNBase):  # lists its weights a second time, and does so again whenever it is moved
            known.add("_flat_weights")
        return [value for name, value in vars(thing).items() if name not in known and not isinstance(value, Tensor)]
    if isinstance(thing, FunctionType):
        return thing.__closure__, thing.__defaults__, thing.__kwdefaults__, vars(thing)
    return gc.get_referents(thing)
