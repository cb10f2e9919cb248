"""Find tensors that modules use without registering them: in lists, closures, hooks, or modules inside of these.

And plain attributes of modules, which no checkpoint saves.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from raypar.actors.autograd.torch_private import has_gradient_hooks, num_writes, storage_id
from raypar.actors.models.init.deferred_init import named_slots, slots_of

_MOST = 1_000_000  # most Python objects to search: this takes about a second
_FIRST = (nn.Module, Tensor, FunctionType, MethodType, CellType)  # they are searched before all others
_LIBRARIES = frozenset({"numpy", "ray", "raypar", "torch", "transformers"}) | sys.stdlib_module_names
# Packages whose objects may hold users' tensors; objects of other libraries (loggers, locks) are not searched.
_HOLDERS = frozenset(
    {"_collections", "_weakrefset", "builtins", "collections", "functools", "itertools", "torch", "transformers"}
    | {"types", "weakref"}
)


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

    On another actor such a tensor would be missing, or would keep its initial values. Tensors that share the memory of
    another layer's trainable parameter, without being that parameter, are included.

    Args:
        modules: All layers of a model.
    """
    registered = [{storage_id(tensor): name for *_, name, tensor in named_slots("", module)} for module in modules]
    owners = {key: (index, name) for index, tensors in enumerate(registered) for key, name in tensors.items()}
    found: dict[tuple[int, int], Borrowed] = {}
    tensorless = _tensorless(modules)
    for index, module in enumerate(modules):
        for tensor in unregistered([module], tensorless):
            key = storage_id(tensor)
            if key in owners and key not in registered[index]:
                owner, name = owners[key]
                found.setdefault((index, owner), Borrowed(index, owner, name))
    for alias in _aliases(modules):
        found.setdefault((alias.layer, alias.owner), alias)
    return list(found.values())


def held_apart(modules: Sequence[nn.Module]) -> list[Borrowed]:
    """Return trainable parameters that layers refer to without registering them; each pair of layers once.

    A list, a closure, or an attribute that was set past ``nn.Module`` would keep such a parameter when another one
    replaces it.

    Args:
        modules: Layers of a model.
    """
    owners = {
        storage_id(parameter): (index, name)
        for index, module in reversed(list(enumerate(modules)))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    }
    found: dict[tuple[int, int], Borrowed] = {}
    tensorless = _tensorless(modules)
    for index, module in enumerate(modules):
        attributes = (value for part in module.modules() for value in vars(part).values())
        tensors = (value for value in attributes if isinstance(value, Tensor) and value.requires_grad)
        for tensor in chain(tensors, unregistered([module], tensorless)):
            if (key := storage_id(tensor)) in owners:
                owner, name = owners[key]
                found.setdefault((index, owner), Borrowed(index, owner, name))
    return list(found.values())


def unsearched(modules: Sequence[nn.Module]) -> list[int]:
    """Return the layers that refer to more objects than are searched, so that ``borrowed`` may have missed tensors.

    Args:
        modules: All layers of a model.
    """
    tensorless = _tensorless(modules)
    return [at for at, module in enumerate(modules) if any(one is None for one in _reached([module], tensorless))]


def shared_buffers(modules: Sequence[nn.Module]) -> list[tuple[tuple[int, str], tuple[int, str]]]:
    """Return the buffers that several layers register, as the running mean of a BatchNorm that two layers use.

    On different actors each layer has a separate one. Buffers that checkpoints leave out are constants, and not listed.

    Args:
        modules: All layers of a model.

    Returns:
        For each such buffer, layer and name in its first layer, and in another one; each pair of layers once.
    """
    first_uses: dict[int, tuple[int, str]] = {}
    found: dict[tuple[int, int], tuple[tuple[int, str], tuple[int, str]]] = {}
    for index, module in enumerate(modules):
        stored = module.state_dict()
        for name, buffer in module.named_buffers():
            if name in stored:
                first = first_uses.setdefault(storage_id(buffer), (index, name))
                if first[0] != index:
                    found.setdefault((first[0], index), (first, (index, name)))
    return list(found.values())


def has_strays(modules: Sequence[nn.Module]) -> bool:
    """Return whether the modules hold a meta tensor that ``Recording.materialize`` could not replace.

    This is a tensor that is held by something other than a registered module (a list, an object, a closure, a hook, or
    a module in one of them), or a module's tensor that has hooks, a class of its own, or a history in autograd. Such a
    tensor would stay on the meta device, and torch's CPU matrix product computes with it without an error, and wrongly.
    True also if the modules refer to more objects than are searched.
    """
    if any(_is_special(tensor) for module in modules for part in module.modules() for *_, tensor in slots_of(part)):
        return True
    return any(tensor is None or tensor.is_meta for tensor in _reached(modules))


def demand_real(modules: Sequence[nn.Module], replaced: Iterable[Tensor] = ()) -> None:
    """Check the unregistered tensors that modules reach, after the modules got their weights.

    Args:
        modules: The layers of this actor.
        replaced: Tensors of these layers that were replaced by this actor's part of them.

    Raises:
        ValueError: They reach a tensor that was replaced, or one on the meta device, which another actor has.
    """
    own = set(map(storage_id, replaced))
    for tensor in unregistered(modules):
        if storage_id(tensor) in own:
            raise ValueError(
                "a layer refers to one of its own modules or weights through a closure, a hook or a nested container, "
                "where raypar can't replace the whole by this actor's part: refer to it as an attribute (or a list, "
                "tuple or dict of modules), or leave the layer out of the plan and set mesh.tp to 1"
            )
        if tensor.is_meta:
            raise ValueError(
                "a layer uses a weight of another actor's layer without registering it (through a list, a closure or a "
                "hook): make the module or the parameter an attribute of the layer that uses it, or keep both in one "
                "stage"
            )


def _aliases(modules: Sequence[nn.Module]) -> Iterator[Borrowed]:
    """Yield the tensors of layers that would not follow another layer's trainable parameter.

    They are views of it, or the parameter itself as an attribute that was set past ``nn.Module``.
    """
    first_uses: dict[tuple[int, int], tuple[int, str, Tensor]] = {}
    for index, module in enumerate(modules):
        tied = set(map(id, module.parameters()))
        for *_, name, tensor in named_slots("", module):
            key = storage_id(tensor), int(tensor.storage_offset())
            owner, known, first = first_uses.setdefault(key, (index, name, tensor))
            trains = isinstance(first, nn.Parameter) and first.requires_grad
            if owner != index and trains and (first is not tensor or id(tensor) not in tied):
                yield Borrowed(index, owner, known)


def unregistered(modules: Sequence[nn.Module], tensorless: Iterable[int] = ()) -> Iterator[Tensor]:
    """Yield the tensors that modules reach without registering them, as far as they are searched.

    Args:
        modules: The modules.
        tensorless: Ids of objects that reach no tensor.
    """
    return (tensor for tensor in _reached(modules, tensorless) if tensor is not None)


def _reached(modules: Sequence[nn.Module], tensorless: Iterable[int] = ()) -> Iterator[Tensor | None]:
    """Yield the tensors that modules reach without registering them; a last None if not all objects were searched.

    Args:
        modules: The modules.
        tensorless: Ids of objects that reach no tensor.
    """
    return _walk(modules, {id(part) for module in modules for part in module.modules()}, set(tensorless))


def _tensorless(modules: Sequence[nn.Module]) -> set[int]:
    """Return the ids of all objects that the modules' classes reach, for the classes that reach no tensor."""
    tensorless = set[int]()
    for kind in dict.fromkeys(type(part) for module in modules for part in module.modules()):
        seen = tensorless.copy()
        if id(kind) not in seen and not any(True for _ in _walk([kind], set(), seen)):
            tensorless = seen
    return tensorless


def _walk(things: Iterable[Any], parts: set[int], seen: set[int]) -> Iterator[Tensor | None]:
    """Yield the tensors that some objects reach; a last None if not all objects were searched.

    Modules, tensors and functions are followed first, so that a large table hides none of them. Objects
    without references (numbers, strings, and tuples and dicts of these) do not count: they are not tracked by gc.

    Args:
        things: The objects.
        parts: Ids of the modules whose own tensors are not yielded.
        seen: Ids of the objects to leave out; searched objects are added.
    """
    first, rest, most = deque(things), deque[Any](), len(seen) + _MOST
    while first or rest:
        if len(seen) >= most:
            yield None
            return
        thing = (first or rest).popleft()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if issubclass(type(thing), Tensor):
            yield thing
        for found in _things_in(thing, registered=id(thing) in parts):
            if gc.is_tracked(found) and id(found) not in seen:
                (first if issubclass(type(found), _FIRST) else rest).append(found)


def _is_special(tensor: Tensor) -> bool:
    return has_gradient_hooks(tensor) or type(tensor) not in (Tensor, nn.Parameter) or tensor.grad_fn is not None


def _things_in(thing: Any, *, registered: bool) -> Iterable[Any]:
    """Return the objects that an object refers to, without a registered module's own tensors.

    A function refers to the globals that it names. Python modules, and objects of libraries that hold no user's
    tensors, are not searched.
    """
    kind = type(thing)
    if issubclass(kind, nn.Module):
        if not registered:
            return [kind, *thing._parameters.values(), *thing._buffers.values(), *vars(thing).values()]
        known = {"_parameters", "_buffers"}
        if issubclass(kind, nn.RNNBase):  # it has other lists of its weights, which it renews before it computes
            known |= {"_flat_weights", "_flat_weight_refs"}
        return [kind, *(v for name, v in vars(thing).items() if name not in known and not issubclass(type(v), Tensor))]
    if kind is FunctionType:
        return thing.__closure__, thing.__defaults__, thing.__kwdefaults__, vars(thing), *_globals_of(thing)
    if issubclass(kind, weakref.ref):
        return [thing()]
    if kind in weakref.ProxyTypes:
        try:
            return [thing.__repr__.__self__]  # a proxy forwards the attribute access to its object
        except ReferenceError:
            return []
    if issubclass(kind, type):
        return [] if _root(thing.__module__) in _LIBRARIES else gc.get_referents(thing)
    if issubclass(kind, ModuleType) or _root(kind.__module__) in _LIBRARIES - _HOLDERS:
        return []
    return gc.get_referents(thing)


def _globals_of(function: FunctionType) -> Iterator[Any]:
    """Yield the globals that a user's function and its inner functions name, in its module and in modules it names."""
    if _root(function.__module__) in _LIBRARIES:
        return
    codes: list[CodeType] = [function.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    names = {name for code in codes for name in code.co_names}
    spaces = [function.__globals__]
    spaces += [vars(sys.modules[name]) for name in names & sys.modules.keys() if _root(name) not in _LIBRARIES]
    known = set(map(id, spaces))
    for space in spaces:
        for name in names & space.keys():
            value = space[name]
            if not issubclass(type(value), ModuleType):
                yield value
            elif _root(value.__name__) not in _LIBRARIES and id(vars(value)) not in known:
                known.add(id(vars(value)))
                spaces.append(vars(value))


def _root(module: object) -> str:
    """Return the name of the package that a module belongs to."""
    return str(module).partition(".")[0]


def plain_attributes(names: Sequence[str], layers: Sequence[nn.Module]) -> Iterator[tuple[str, object]]:
    """Yield the plain attributes of the user's own modules, which are neither parameters nor buffers.

    Args:
        names: The names of the layers.
        layers: The layers.

    Yields:
        The name of each number, text or tensor, and its value; a tensor's value is its id and how often it was written
        to.
    """
    for layer, module in zip(names, layers, strict=True):
        for path, part in module.named_modules(prefix=layer):
            if type(part).__module__.startswith(("torch.", "raypar.")):
                continue
            for name, value in vars(part).items():
                if name.startswith("_") or name in ("training",):
                    continue
                if isinstance(value, Tensor):
                    yield f"{path}.{name}", (id(value), num_writes(value))
                elif isinstance(value, int | float | str):
                    yield f"{path}.{name}", value
