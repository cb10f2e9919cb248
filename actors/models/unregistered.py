"""Find tensors that modules use without registering them: in lists, closures, hooks, or modules kept in such."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from raypar.actors.autograd.torch_private import has_gradient_hooks, storage_id
from raypar.actors.models.deferred_init import slots_of

_MOST = 200_000  # Python objects to look at, at most: this takes some tenths of a second
_ATOMS = (str, bytes, int, float, complex, bool, type(None))  # they refer to nothing, and are not counted


class Borrowed(NamedTuple):
    """A tensor that a layer uses although only another layer registers it.

    Attributes:
        layer: Index of the layer that uses it.
        owner: Index of the layer that registers it.
        name: Name of the tensor in its owner.
    """

    layer: int
    owner: int
    name: str


def borrowed(modules: Sequence[nn.Module]) -> list[Borrowed]:
    """Return the tensors that layers use although only other layers register them; each pair of layers once.

    On another actor such a tensor would not be there, or would keep its initial values. A tensor that shares the memory
    of another layer's trainable parameter, without being that parameter, is one of them.

    Args:
        modules: All layers of a model.
    """
    registered = [_registered(module) for module in modules]
    owners = {key: (index, name) for index, tensors in enumerate(registered) for key, name in tensors.items()}
    found: dict[tuple[int, int], Borrowed] = {}
    for index, module in enumerate(modules):
        for tensor in _unregistered([module]):
            key = storage_id(tensor)
            if key in owners and key not in registered[index]:
                owner, name = owners[key]
                found.setdefault((index, owner), Borrowed(index, owner, name))
    for alias in _aliases(modules):
        found.setdefault((alias.layer, alias.owner), alias)
    return list(found.values())


def shared_buffers(modules: Sequence[nn.Module]) -> list[tuple[tuple[int, str], tuple[int, str]]]:
    """Return the buffers that several layers register, as the running mean of a BatchNorm that two layers use.

    On different actors each has one of its own. Buffers that a checkpoint leaves out are constants, and not listed.

    Args:
        modules: All layers of a model.

    Returns:
        For each such buffer, layer and name in its first layer, and in another one; each pair of layers once.
    """
    homes: dict[int, tuple[int, str]] = {}
    found: dict[tuple[int, int], tuple[tuple[int, str], tuple[int, str]]] = {}
    for index, module in enumerate(modules):
        stored = module.state_dict()
        for name, buffer in module.named_buffers():
            if name in stored:
                home = homes.setdefault(storage_id(buffer), (index, name))
                if home[0] != index:
                    found.setdefault((home[0], index), (home, (index, name)))
    return list(found.values())


def has_strays(modules: Sequence[nn.Module]) -> bool:
    """Return whether the modules hold a meta tensor that ``Recording.materialize`` could not replace.

    This is a tensor that is held by something other than a registered module (a list, an object, a closure, a hook, or
    a module in one of them), or a module's tensor that has hooks, a class of its own, or a history in autograd. Such a
    tensor would stay on the meta device, and torch's CPU matrix product computes with it without an error, and wrongly.
    The answer is also True if the modules refer to more objects than can be looked at.
    """
    if any(_is_special(tensor) for module in modules for part in module.modules() for *_, tensor in slots_of(part)):
        return True
    return any(tensor is None or tensor.is_meta for tensor in _reached(modules))


def demand_real(modules: Sequence[nn.Module], replaced: Iterable[Tensor] = ()) -> None:
    """Check what modules reach without registering it, after they were given their weights.

    Args:
        modules: The layers of this actor.
        replaced: Tensors of these layers that were replaced by this actor's part of them.

    Raises:
        ValueError: They reach a tensor that was replaced, or one on the meta device, which another actor has.
    """
    own = set(map(storage_id, replaced))
    for tensor in _unregistered(modules):
        if storage_id(tensor) in own:
            raise ValueError(
                "a layer refers to one of its own modules or weights through a closure, a hook or a nested container, "
                "where its part of it can't be put in the place of the whole: refer to it as an attribute (or a list, "
                "tuple or dict of modules), or leave the layer out of the plan and set mesh.tp to 1"
            )
        if tensor.is_meta:
            raise ValueError(
                "a layer uses a weight of another actor's layer without registering it (through a list, a closure or a "
                "hook): make the module or the parameter an attribute of the layer that uses it, or keep both in one "
                "stage"
            )


def _registered(module: nn.Module) -> dict[int, str]:
    """Return the names of a layer's tensors by their memory."""
    return {
        storage_id(tensor): f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        for _, name, tensor in slots_of(part)
    }


def _aliases(modules: Sequence[nn.Module]) -> Iterator[Borrowed]:
    """Yield the registered tensors that are views of another layer's trainable parameter: they would not follow it."""
    homes: dict[tuple[int, int], tuple[int, str, Tensor]] = {}
    for index, module in enumerate(modules):
        for path, part in module.named_modules():
            for _, name, tensor in slots_of(part):
                key, own = (
                    (storage_id(tensor), int(tensor.storage_offset())),
                    (index, f"{path}.{name}".lstrip("."), tensor),
                )
                owner, known, home = homes.setdefault(key, own)
                trains = isinstance(home, nn.Parameter) and home.requires_grad
                if owner != index and home is not tensor and trains:
                    yield Borrowed(index, owner, known)


def _unregistered(modules: Sequence[nn.Module]) -> Iterator[Tensor]:
    """Yield the tensors that modules reach without registering them, as far as can be looked."""
    return (tensor for tensor in _reached(modules) if tensor is not None)


def _reached(modules: Sequence[nn.Module]) -> Iterator[Tensor | None]:
    """Yield the tensors that modules reach without registering them; a last None if there is more to look at."""
    parts = {id(part) for module in modules for part in module.modules()}
    coming, seen = deque[Any](modules), set[int]()
    while coming:
        if len(seen) >= _MOST:
            yield None
            return
        thing = coming.popleft()
        if id(thing) not in seen and not isinstance(thing, (type, ModuleType, *_ATOMS)):
            seen.add(id(thing))
            if issubclass(type(thing), Tensor):
                yield thing
            coming += _things_in(thing, registered=id(thing) in parts)


def _is_special(tensor: Tensor) -> bool:
    return has_gradient_hooks(tensor) or type(tensor) not in (Tensor, nn.Parameter) or tensor.grad_fn is not None


def _things_in(thing: Any, *, registered: bool) -> Iterable[Any]:
    """Return the objects that an object refers to, without a registered module's own tensors.

    Of a function's globals these are the modules and tensors that it names.
    """
    if isinstance(thing, nn.Module):
        if not registered:
            return [*thing._parameters.values(), *thing._buffers.values(), *vars(thing).values(), *_of_class(thing)]
        known = {"_parameters", "_buffers"}
        if isinstance(thing, nn.RNNBase):  # it has a second list of its weights, and renews it when it is moved
            known.add("_flat_weights")
        own = [value for name, value in vars(thing).items() if name not in known and not isinstance(value, Tensor)]
        return [*own, *_of_class(thing)]
    if isinstance(thing, FunctionType):
        named = (thing.__globals__.get(name) for name in thing.__code__.co_names)
        used = [value for value in named if isinstance(value, (nn.Module, Tensor))]
        return thing.__closure__, thing.__defaults__, thing.__kwdefaults__, vars(thing), used
    if isinstance(thing, weakref.ref):
        return [thing()]
    return gc.get_referents(thing)


def _of_class(module: nn.Module) -> Iterator[Any]:
    """Yield what the user's own classes of a module refer to: their methods, and their attributes."""
    for kind in type(module).__mro__:
        if not kind.__module__.startswith("torch.") and kind is not object:
            yield from vars(kind).values()
