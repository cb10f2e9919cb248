"""Find the chains of operators in a user's modules, on the shapes of a first batch without memory. Imports torch.

Layers one after the other are a chain, as are the modules of an ``nn.Sequential``. How another module calls its
modules can't be seen: its input and output are whole, and each sequence or linear layer in it is a chain of its own,
whose input and output are whole.

The cheapest strategies of a chain of operators, by dynamic programming over the placements between them.

The rest of a chain depends only on the placement of an operator's output, so the cheapest way to each placement is
enough: with k strategies and p placements a chain of n operators takes n k p steps instead of k^n.

Source: Bellman 1957; as intra-operator search in Jia et al. 2019, "FlexFlow" and Zheng et al. 2022, "Alpa", where an
integer program serves graphs that are no chains.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from raypar.actors.autograd.torch_private import has_call_hooks
from raypar.actors.models.module_tree import modules_named
from raypar.actors.models.own.plan_kinds import SHORT, kind_of
from raypar.actors.models.own.user_plan import unfit
from raypar.actors.models.skip_connections import Skipped, Skips
from raypar.actors.tensors import Values, as_values
from raypar.planner.operators.operator import Aim, Chain, Operator, OperatorKind
from raypar.planner.operators.prices import Prices
from raypar.planner.operators.strategies import OperatorStrategy, choices

_ACTIVATIONS = (
    nn.Identity,
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softsign,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.LogSigmoid,
    nn.Tanhshrink,
)
_DIMS = {  # modules that compute each sample by itself, and how many dims the samples of a batch have
    **dict.fromkeys((nn.Conv1d, nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d), 2),
    **dict.fromkeys((nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d), 3),
    **dict.fromkeys((nn.Conv3d, nn.MaxPool3d, nn.AvgPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d), 4),
}
_KINDS: Mapping[type[nn.Module], OperatorKind] = {nn.Dropout: "dropout", nn.LayerNorm: "norm", nn.RMSNorm: "norm"}
_LISTS = (nn.ModuleList, nn.ModuleDict)


class SearchableChain(NamedTuple):
    """The chains of a model, and the annotated modules outside of them.

    Attributes:
        chains: The chains.
        kept: The kinds of annotated modules that are in none, by name; they stay as they are annotated.
        order: The position of each module in the model, by name.
    """

    chains: tuple[Chain, ...]
    kept: Mapping[str, str]
    order: Mapping[str, int]


class _Call(NamedTuple):
    """The shapes of a call of a module."""

    taken: tuple[int, ...]
    made: tuple[int, ...]


def chains_of(
    layers: Mapping[str, nn.Module], values: Values, plan: Mapping[str, str], skips: Skips = ()
) -> SearchableChain:
    """Find the chains of a model.

    Args:
        layers: The model's layers by logical name, without memory, which nothing else uses.
        values: The first batch's inputs, without memory.
        plan: The user's annotations, checked: a kind for each pattern of names.
        skips: Pairs of layers, of which the second one takes what the first one returns, too.

    Raises:
        Exception: The error of a layer that can't compute on the meta device.
    """
    annotated = {
        f"{layer}.{inner}".rstrip("."): text
        for pattern, text in plan.items()
        for layer, module in layers.items()
        for inner, _ in modules_named(module, layer, pattern)
    }
    finder = _Finder(layers, annotated, _recorded(layers, values, skips))
    if skips:
        chains = [chain for name, layer in layers.items() for chain in finder.sequence({name: layer}, learns=True)]
    else:
        chains = [*finder.sequence(layers, learns=False)]
    inside = {one.name for chain in chains for one in chain}
    kept = {name: text for name, text in annotated.items() if name not in inside}
    every = (
        name
        for layer, module in layers.items()
        for name, _ in module.named_modules(prefix=layer, remove_duplicate=False)
    )
    return SearchableChain(tuple(chains), kept, {name: position for position, name in enumerate(every)})


def _recorded(layers: Mapping[str, nn.Module], values: Values, skips: Skips) -> dict[nn.Module, list[_Call | None]]:
    """Call the layers, and return the shapes of each call of each module; None where it takes or makes several."""
    calls: dict[nn.Module, list[_Call | None]] = {}

    def called(module: nn.Module, inputs: tuple[object, ...], named: dict[str, object], output: object) -> None:
        given = (*inputs, *named.values())
        single = len(given) == 1 and isinstance(given[0], Tensor) and isinstance(output, Tensor)
        shapes = (tuple(given[0].shape), tuple(output.shape)) if single else ((), ())  # type: ignore[attr-defined]
        calls.setdefault(module, []).append(_Call(*shapes) if single else None)

    hooks = [
        module.register_forward_hook(called, with_kwargs=True)
        for module in dict.fromkeys(part for layer in layers.values() for part in layer.modules())
    ]
    skipped = Skipped(skips, tuple(layers))
    try:
        with torch.no_grad():
            for index, layer in enumerate(layers.values()):
                values = as_values(layer(*skipped.inputs(index, values)))
                skipped.keep(index, values)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


class _Finder:
    """Walks through the modules of a model."""

    def __init__(
        self,
        layers: Mapping[str, nn.Module],
        annotated: Mapping[str, str],
        calls: Mapping[nn.Module, list[_Call | None]],
    ) -> None:
        self._annotated, self._calls = annotated, calls
        every = [part for layer in layers.values() for _, part in layer.named_modules(remove_duplicate=False)]
        self._places = Counter(every)
        uses = Counter(id(p) for part in dict.fromkeys(every) for p in part.parameters(recurse=False))
        self._tied = {one for one, count in uses.items() if count > 1}

    def sequence(self, modules: Mapping[str, nn.Module], *, learns: bool) -> Iterator[Chain]:
        """Yield the chain of modules that are called one after the other, and those inside of them."""
        chain, inner = list[Operator](), list[Chain]()
        for name, module in self._flat(modules):
            one = self._operator(name, module, learns=learns)
            learns = learns or one.weights > 0
            if one.kind == "whole" and name not in self._annotated:
                parts = self._seen_inside(name, module)
                inner += parts
                one = one._replace(weights=one.weights - sum(part.weights for each in parts for part in each))
            chain.append(one)
        yield tuple(chain)
        yield from inner

    def _flat(self, modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, nn.Module]]:
        """Yield modules, and instead of each nn.Sequential its modules."""
        for name, module in modules.items():
            if self._is_open(name, module):
                yield from self._flat({f"{name}.{child}": part for child, part in module.named_children()})
            else:
                yield name, module

    def _is_open(self, name: str, module: nn.Module) -> bool:
        return type(module) is nn.Sequential and name not in self._annotated and not has_call_hooks(module)

    def _seen_inside(self, name: str, module: nn.Module) -> list[Chain]:
        """Return the chains in a module whose code can't be seen; none if the user has annotated what is between."""
        found = [*self._inside(name, module)]
        seen = {one.name for chain in found if len(chain) > 1 for one in chain}
        return [] if any(one.startswith(f"{name}.") and one not in seen for one in self._annotated) else found

    def _inside(self, name: str, module: nn.Module) -> Iterator[Chain]:
        """Yield the chains in a module."""
        if type(module).__module__.startswith("torch.") and type(module) not in (nn.Sequential, *_LISTS):
            return  # torch's own, which may read weights of theirs without a call
        for child, part in module.named_children():
            path = f"{name}.{child}"
            if self._is_open(path, part) and self._is_called(part):
                yield from self.sequence({path: part}, learns=True)
            elif type(part) not in (nn.Linear, nn.Embedding):
                yield from self._inside(path, part)
            elif self._is_called(part):
                yield (self._operator(path, part, learns=True),)

    def _is_called(self, module: nn.Module) -> bool:
        """Return whether a module is called once, with one tensor, and makes one."""
        calls = self._calls.get(module, [])
        return len(calls) == 1 and calls[0] is not None and self._places[module] == 1

    def _operator(self, name: str, module: nn.Module, *, learns: bool) -> Operator:
        """Return a module as an operator of the search."""
        call = next((one for one in self._calls.get(module, []) if one is not None), None)
        text = self._annotated.get(name, "")
        kind = "whole" if call is None else self._kind(name, module, call, bool(text))
        taken, made = call or _Call((), ())
        parameters = [(inner, p.numel()) for inner, p in module.named_parameters()]
        weights = sum(count for _, count in parameters)
        bias = sum(count for inner, count in parameters if inner == "bias")
        rigid = call is None or self._places[module] > 1 or (has_call_hooks(module) and not text)
        one = Operator(
            name,
            kind,
            taken,
            made,
            weights=weights,
            bias=bias,
            splits=_splits(kind, module, taken, made),
            learns=learns and kind != "embedding",
            rigid=rigid,
        )
        return _as_annotated(one, text)._replace(rigid=call is None) if text else one

    def _kind(self, name: str, module: nn.Module, call: _Call, is_named: bool) -> OperatorKind:
        """Return the kind of a module; it is searched if it is called once and shares no weights."""
        tied = any(id(p) in self._tied for p in module.parameters())
        once = self._is_called(module) and not tied and not has_call_hooks(module)
        if type(module) in _ACTIVATIONS and not has_call_hooks(module):
            return "activation"
        if not once and not is_named:
            return "whole"
        if type(module) is nn.Linear and not unfit("column", name, module):
            return "linear"
        if type(module) is nn.Embedding and not unfit("embedding", name, module):
            return "embedding"
        if type(module) in _KINDS:
            return _KINDS[type(module)]
        if _is_view(module):
            return "view"
        is_of_samples = type(module) is nn.GroupNorm or len(call.taken) == _DIMS.get(type(module), -2) + 1
        return "samples" if is_of_samples else "whole"


def _as_annotated(one: Operator, text: str) -> Operator:
    """Return an operator with the user's annotation: a strategy, and perhaps placements."""
    kind = kind_of(text)
    assert kind is not None
    words = SHORT.get(text, text).split(" ")
    given = kind.given if "from" in words else ""
    goes = kind.made if "to" in words else ""
    splits = one.splits or tuple(range(max(0, len(one.taken) - 1)))
    return one._replace(strategy=kind.name, given=given, goes=goes, splits=splits)


def _splits(kind: OperatorKind, module: nn.Module, taken: tuple[int, ...], made: tuple[int, ...]) -> tuple[int, ...]:
    """Return the dims along which a module may be split."""
    if kind == "norm":
        assert isinstance(module, nn.LayerNorm | nn.RMSNorm)
        return tuple(range(len(taken) - len(module.normalized_shape)))
    if kind == "samples":
        return (0,)
    return tuple(range(len(made) - 1)) if kind in ("linear", "embedding") else ()


def _is_view(module: nn.Module) -> bool:
    """Return whether a module gives each sample of a batch another shape."""
    if type(module) is nn.Flatten:
        return module.start_dim >= 1
    return type(module) is nn.Unflatten and isinstance(module.dim, int) and module.dim >= 1


class Way(NamedTuple):
    """The strategies of a chain, with their price.

    Attributes:
        price: The sums that are minimised, the most important first.
        choices: By operator.
    """

    price: tuple[int, int, int]
    choices: tuple[OperatorStrategy, ...]


def cheapest_strategies(chain: Sequence[Operator], prices: Prices, aim: Aim) -> Way | str:
    """Find the cheapest strategies of a chain, whose first input and last output are whole.

    Args:
        chain: The operators.
        prices: The costs of computing and messages.
        aim: Whether seconds are minimised first, and then memory, or the reverse.

    Returns:
        The way; or the name of the first operator that can't be what the user has annotated, after what is before it.
    """
    ways = {"R": Way((0, 0, 0), ())}
    for number, one in enumerate(chain):
        following: dict[str, Way] = {}
        for given, way in ways.items():
            for choice in choices(one, given, prices):
                price = _more(way.price, choice, aim)
                if number + 1 == len(chain) and choice.made != "R":
                    continue
                if choice.made not in following or price < following[choice.made].price:
                    following[choice.made] = Way(price, (*way.choices, choice))
        if not following:
            return one.name
        ways = following
    return ways["R"]


def _more(price: tuple[int, int, int], choice: OperatorStrategy, aim: Aim) -> tuple[int, int, int]:
    first, second = (choice.cost, choice.held) if aim == "speed" else (choice.held, choice.cost)
    return price[0] + first, price[1] + second, price[2] + choice.words
