"""Tensors of a build that could not be given values: who keeps them would not know the new ones."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Sequence
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from raypar.actors.deferred import slots_of

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
