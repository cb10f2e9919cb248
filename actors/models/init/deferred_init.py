"""Build a model without its weights, then make the weights of only some of its layers.

``record`` runs the user's function with every new tensor on the meta device, and records the ops on these tensors.
``Recording.materialize`` replays on the CPU the ops that chosen modules depend on. Each random op is seeded by its
index in the recording, so a weight has the same bits whichever other layers are made. Running an op on the meta device
must not import torch's compiler: the cost is in autograd/torch_private.py.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from raypar.actors.autograd.torch_private import (
    DispatchMode,
    argument_names,
    leaves_of,
    map_leaves,
    op_name,
    replaced_trunc_normal,
    storage_id,
    without_torch_function,
    written_arguments,
)
from raypar.actors.rng import derive

_META, _CPU = torch.device("meta"), torch.device("cpu")
_PROCESS = threading.RLock()  # random generators and patches belong to the process: one thread at a time
_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]  # the function that a mode gets when is_meta is read


@dataclass(frozen=True)
class _Call:
    """One recorded op.

    Attributes:
        func: The op.
        args, kwargs: Its arguments as they were at the call: detached meta tensors, and copies of real tensors.
        outputs: The meta tensors that it returned.
        reads, writes: The storages of its meta arguments, and of the meta tensors that it returned or wrote to.
        draws: Whether it draws random numbers.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: tuple[Tensor, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    draws: bool


class Recording:
    """The ops of a build in order, with their meta tensors and copies of the real tensors that they read."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on the meta device and record it. An op that has only real tensors is run and not recorded.

        Args:
            func: The op.
            args: Its positional arguments.
            kwargs: Its arguments by name. "device" is changed to the meta device, in place.

        Returns:
            What the op returned.

        Raises:
            RuntimeError: The op can't be replayed later: it writes meta values to a real tensor, draws from a generator
                of the user's, or reads a lazy conjugate or negative tensor.
        """
        names = argument_names(func)
        if "device" in names:
            kwargs["device"] = _META
        elif not any(_is_meta(value) for value in leaves_of((args, kwargs))):
            return func(*args, **kwargs)
        given = dict(zip(names, args, strict=False)) | kwargs
        targets = written_arguments(func)
        written = [value for name in targets for value in leaves_of(given.get(name)) if isinstance(value, Tensor)]
        if not all(map(_is_meta, written)):
            raise RuntimeError(f"{func} writes values of a meta tensor to a real one")
        then_args, then_kwargs = map_leaves(_frozen, (args, kwargs))  # before the op runs: it may reshape its arguments
        args, kwargs = map_leaves(_on_meta, (args, kwargs))
        result = args[0] if _fills(func) else func(*args, **kwargs)
        outputs = tuple(value.detach() for value in leaves_of(result) if _is_meta(value))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        self._add(func, then_args, then_kwargs, outputs, written, draws)
        return result

    def trunc_normal(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Record ``torch.nn.init.trunc_normal_`` as one op, because it reads the values that it draws.

        Args:
            func: torch's own implementation.
            tensor: The tensor to fill, of any shape. A real one is filled at once, and nothing is recorded.
            *args: The other positional arguments of ``trunc_normal_``.
            **kwargs: Its arguments by name.

        Returns:
            ``tensor``.
        """
        if not _is_meta(tensor):
            return func(tensor, *args, **kwargs)  # type: ignore[no-any-return]
        window, *rest = map_leaves(_frozen, (tensor, *args))
        self._add(func, (window, *rest), map_leaves(_frozen, kwargs), (window,), [tensor], draws=True)
        return tensor

    def materialize(self, modules: Iterable[nn.Module], seed: int) -> None:
        """Replace the meta tensors of modules by real ones on the CPU, in place.

        These are the parameters, the buffers, and other tensors that are attributes of a module.

        Args:
            modules: The modules, with all their submodules.
            seed: The run's seed.
        """
        parts = [part for module in modules for part in module.modules()]
        slots = [slot for part in parts for slot in slots_of(part) if slot[2].is_meta]
        whole = {id(tensor): tensor for _, _, tensor in slots}  # a parameter that two modules share stays one object
        values = self.values(whole.values(), seed)
        made = {key: as_kind_of(whole[key], value) for key, value in zip(whole, values, strict=True)}
        for table, name, tensor in slots:
            table[name] = made[id(tensor)]

    def draws(self, tensors: Sequence[Tensor]) -> list[frozenset[int]]:
        """Return which random ops the values of meta tensors depend on, by the ops' indices; none for a real tensor."""
        of = dict[int, frozenset[int]]()
        for ordinal, call in enumerate(self._calls):
            found = [of[key] for key in call.reads | call.writes if key in of]
            if call.draws:
                found.append(frozenset((ordinal,)))
            if found:
                of |= dict.fromkeys(call.writes, frozenset().union(*found))
        return [of.get(storage_id(tensor), frozenset()) if tensor.is_meta else frozenset() for tensor in tensors]

    def values(self, tensors: Iterable[Tensor], seed: int) -> list[Tensor]:
        """Compute the real tensors for meta tensors, on the CPU.

        Args:
            tensors: Meta tensors of the recording, of any shapes and dtypes. Real tensors are returned unchanged.
            seed: The run's seed.

        Returns:
            The real tensors, in order, with the shapes, strides and dtypes of the meta tensors. Tensors that share a
            storage on the meta device share one here.
        """
        tensors = list(tensors)
        real = self._replay({storage_id(tensor) for tensor in tensors if tensor.is_meta}, seed)
        return [_window(tensor, real) if tensor.is_meta else tensor for tensor in tensors]

    def _add(
        self, func: Any, args: Any, kwargs: Any, outputs: tuple[Tensor, ...], written: Sequence[Tensor], draws: bool
    ) -> None:
        reads = frozenset(storage_id(value) for value in leaves_of((args, kwargs)) if _is_meta(value))
        writes = frozenset(map(storage_id, (*outputs, *written)))
        self._calls.append(_Call(func, args, kwargs, outputs, reads, writes, draws))

    def _replay(self, storages: set[int], seed: int) -> dict[int, Tensor]:
        """Replay the ops that some storages depend on, and return a real tensor for each meta storage involved."""
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
                args, kwargs = map_leaves(lambda value: _real(value, real), (call.args, call.kwargs))
                if "device" in kwargs:
                    kwargs["device"] = _CPU
                results = [value for value in leaves_of(call.func(*args, **kwargs)) if isinstance(value, Tensor)]
                for meta, result in zip(call.outputs, results, strict=True):
                    if storage_id(meta) not in real:
                        real[storage_id(meta)] = _laid_out(result, meta)
        return real


class _Recorder(DispatchMode):
    """Dispatch mode that sends every op to a recording."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_torch_function():
            return self._recording.call(func, args, dict(kwargs or {}))


class _NotMeta(TorchFunctionMode):
    """Function mode in which ``is_meta`` is False: nn.init's orthogonal_, dirac_ and sparse_ skip meta tensors."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False if func == _IS_META else func(*args, **(kwargs or {}))


class Unfilled(DispatchMode):
    """Dispatch mode that skips ops that fill a tensor with random values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if _fills(func) else func(*args, **(kwargs or {}))


def slots_of(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Yield each tensor of a module as (the dict that holds it, its name in that dict, the tensor).

    These are the parameters, the buffers, and unregistered tensors that are attributes. Submodules are left out.
    """
    for table in (module._parameters, module._buffers, vars(module)):
        yield from ((table, name, value) for name, value in table.items() if isinstance(value, Tensor))


def named_slots(prefix: str, layer: nn.Module) -> list[tuple[dict[str, Any], str, str, Tensor]]:
    """Return each tensor of a layer as (the module's dict that holds it, its name there, its full name, the tensor).

    Args:
        prefix: The name of the layer; "" for names in the layer.
        layer: The layer.
    """
    return [
        (table, inner, f"{path}.{inner}".lstrip("."), tensor)
        for path, module in layer.named_modules(prefix=prefix)
        for table, inner, tensor in slots_of(module)
    ]


def as_kind_of(tensor: Tensor, value: Tensor) -> Tensor:
    """Make a value the same kind of tensor as another one.

    Args:
        tensor: The model for the result: a parameter or a plain tensor, that requires gradients or not, and that may
            have attributes which the user set.
        value: The elements, of the shape and dtype of the result.

    Returns:
        ``value`` with the kind, the ``requires_grad`` and the attributes of ``tensor``.
    """
    kind = nn.Parameter if isinstance(tensor, nn.Parameter) else Tensor.requires_grad_
    made = kind(value.detach(), tensor.requires_grad)
    vars(made).update(vars(tensor))
    return made


@contextmanager
def on_meta() -> Iterator[None]:
    """Make the modules of the context on the meta device."""
    with _META, Unfilled():
        yield


def record(build: Callable[[], Sequence[nn.Module]], seed: int) -> tuple[list[nn.Module], Recording]:
    """Run a function that builds modules, on the meta device, and record its ops.

    Args:
        build: The function.
        seed: The run's seed, for what ``build`` draws from Python's or numpy's generator.

    Returns:
        The modules on the meta device, and the recording that makes their tensors real.

    Raises:
        Exception: Whatever ``build`` raises because its tensors have no values, for example if it reads one.
    """
    recording = Recording()
    # values drawn by Python's or numpy's generator are real at once and not replayed, so seed those generators
    with seeded(derive(seed, "build")), _whole_trunc_normal(recording), _NotMeta(), _Recorder(recording):
        return list(build()), recording


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of torch, numpy and Python for the time of the context, then restore their states."""
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
    """Patch torch.nn.init so that ``recording`` gets trunc_normal_ as one op, however the user imported it."""
    with _PROCESS, replaced_trunc_normal(recording.trunc_normal):
        yield


def _fills(func: Any) -> bool:
    """Return whether an op fills its first argument with random values.

    Such an op changes nothing on a meta tensor. It is skipped, because torch would import its compiler to run it.
    """
    return torch.Tag.nondeterministic_seeded in func.tags and op_name(func).endswith("_")


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.device.type == "meta"


def _frozen(value: Any) -> Any:
    """Return an argument as it is now, so that later changes to it don't reach the recording.

    Raises RuntimeError for a generator, and for a lazy conjugate or negative tensor.
    """
    if isinstance(value, torch.Generator):
        raise RuntimeError("it draws values from a separate generator")  # its state would depend on earlier draws
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
    """Return the real tensor for a meta tensor: the same shape, strides and offset, on the real storage."""
    storage = real[storage_id(meta)].untyped_storage()
    window = torch.empty(0, dtype=meta.dtype)
    return window.set_(storage, meta.storage_offset(), meta.size(), meta.stride())


def _laid_out(result: Tensor, meta: Tensor) -> Tensor:
    """Return ``result`` with the strides and the offset of ``meta``: the CPU's kernel may have chosen others."""
    if (result.stride(), result.storage_offset()) == (meta.stride(), meta.storage_offset()):
        return result
    storage = torch.empty(meta.untyped_storage().nbytes(), dtype=torch.uint8).untyped_storage()
    window = torch.empty(0, dtype=meta.dtype).set_(storage, meta.storage_offset(), meta.size(), meta.stride())
    return window.copy_(result)
