"""A user's plan of dividing modules, by patterns of their names: what it comes to, and what can be wrong with it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn

from raypar.actors.models.division import matches
from raypar.actors.models.model import Kind, TensorPlan


class Divisible(NamedTuple):
    """A kind of plan.

    of     the modules that it is for
    steps  what becomes of them
    dims   along which dim each of their parameters is cut
    size   the attribute of a module that says how many there are to divide
    """

    of: type[nn.Module]
    steps: tuple[Kind, ...]
    dims: Mapping[str, int] = {}
    size: str = ""


_COLUMN = {"weight": 0, "bias": 0}
_KINDS: Mapping[str, Divisible] = {
    "column": Divisible(nn.Linear, ("column", "copy"), _COLUMN, "out_features"),
    "row": Divisible(nn.Linear, ("row",), {"weight": 1}, "in_features"),
    "column_gather_output": Divisible(nn.Linear, ("column", "copy", "gather"), _COLUMN, "out_features"),
    "embedding": Divisible(nn.Embedding, ("vocab",), {"weight": 0}, "num_embeddings"),
    "dropout": Divisible(nn.Dropout, ("dropout",)),
    "shared": Divisible(nn.Module, ("shared",)),
}


def tensor_plan_of(plan: Mapping[str, str]) -> TensorPlan:
    """What becomes of which modules, in the order of application; kinds that are not known are left out."""
    return tuple((pattern, step) for pattern, kind in plan.items() if kind in _KINDS for step in _KINDS[kind].steps)


def plan_faults(plan: Mapping[str, str], layers: Mapping[str, nn.Module], tp: int) -> Iterator[str]:
    """Everything that keeps ``layers``, which have names and shapes only, from being divided ``tp`` ways by a plan."""
    names = {f"{layer}.{inner}".rstrip("."): one for layer, m in layers.items() for inner, one in m.named_modules()}
    known: dict[str, str] = {}  # by the name of a module: its kind
    for pattern, kind in plan.items():
        if kind not in _KINDS:
            yield f"model.plan: {pattern!r} is {kind!r}, which is no kind: use {_near(kind, _KINDS)}"
            continue
        named = [name for name in names if matches(name, pattern)]
        if not named:
            yield f"model.plan: {pattern!r} names no module: {_nearest_names(pattern, names)}"
        wrong = [fault for name in named if (fault := _unfit(kind, names[name]))]
        if wrong:
            one = next(name for name in named if _unfit(kind, names[name]))
            yield f"model.plan: {pattern!r} is {kind!r}, but {one} {wrong[0]}"
        if twice := [name for name in named if name in known]:
            yield f"model.plan: {pattern!r} names {twice[0]}, which another pattern names, too: change one of them"
        known |= {name: kind for name in named if name not in known and not wrong}
    yield from _size_faults(known, names, tp)
    yield from _tie_faults(known, layers)


def _unfit(kind: str, module: nn.Module) -> str | None:
    """Why a module can't be divided as a plan says, with the fix."""
    wanted = _KINDS[kind].of
    if wanted is nn.Module:
        return None
    if type(module) is not wanted:
        return f"is a {type(module).__name__}: name an nn.{wanted.__name__}, inside of it perhaps"
    if extra := {name for name, _ in module.named_parameters()} - {"weight", "bias"}:
        return f"has the parameter {min(extra)!r}: leave it out of the plan"
    if isinstance(module, nn.Embedding):
        for option, reason in (
            ("max_norm", "which writes into weights while others read them"),
            ("scale_grad_by_freq", "which counts ids that other actors have"),
            ("sparse", "whose gradients can't be summed here"),
        ):
            if getattr(module, option):
                return f"has {option}, {reason}: leave it out of the plan, or {option} out of the embedding"
    return None


def _size_faults(known: Mapping[str, str], names: Mapping[str, nn.Module], tp: int) -> Iterator[str]:
    """What can't be divided ``tp`` ways, and what would be divided unequally where that won't do."""
    dropping = {_layer(name) for name, kind in known.items() if kind == "dropout"}
    for name, kind in known.items():
        if not (attribute := _KINDS[kind].size):
            continue
        size = int(getattr(names[name], attribute))
        equal = kind == "column_gather_output" or (kind == "column" and _layer(name) in dropping)
        if size < tp:
            fix = f"set it to {size} at most, or leave it out of the plan"
            yield f"mesh.tp is {tp}, but {name} has {attribute} {size}: {fix}"
        elif equal and size % tp:
            reason = "its outputs are gathered" if kind != "column" else "there is dropout in its layer"
            fix = f"use {size // tp * tp} or {size // tp * tp + tp}, or leave it out of the plan"
            yield f"mesh.tp {tp} does not divide {name}'s {attribute} {size}, and {reason}: {fix}"


def _layer(name: str) -> str:
    return ".".join(name.split(".")[:2])


def _tie_faults(known: Mapping[str, str], layers: Mapping[str, nn.Module]) -> Iterator[str]:
    """One weight in several places that the plan treats in different ways."""
    first: dict[int, tuple[str, object]] = {}
    told = set[int]()
    for layer, whole in layers.items():
        for inner, parameter in whole.named_parameters(remove_duplicate=False):
            name = f"{layer}.{inner}"
            how = _how(known, name)
            home, other = first.setdefault(id(parameter), (name, how))
            if how != other and id(parameter) not in told:
                told.add(id(parameter))
                yield (
                    f"model.plan: {home} and {name} are one weight, but it is {_said(known, home)} and "
                    f"{_said(known, name)}: divide both alike, an embedding by ids and a linear layer by columns, say"
                )


def _how(known: Mapping[str, str], parameter: str) -> object:
    """How a parameter is divided: along which dim, or that its gradients are summed."""
    module, _, last = parameter.rpartition(".")
    kind = known.get(module)
    if kind is not None and (dims := _KINDS[kind].dims):
        return dims.get(last)
    above = [".".join(module.split(".")[:end]) for end in range(1, module.count(".") + 2)]
    return "shared" if any(known.get(name) == "shared" for name in above) else None


def _said(known: Mapping[str, str], parameter: str) -> str:
    how = _how(known, parameter)
    return "not divided" if how is None else how if isinstance(how, str) else f"divided along dim {how}"


def _near(word: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return repr(close[0]) if close else " or ".join(map(repr, known))


def _nearest_names(pattern: str, names: Mapping[str, nn.Module]) -> str:
    """The names that are most like a pattern, with ``*`` for numbers."""
    starred = dict.fromkeys(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name) for name in names)
    close = difflib.get_close_matches(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", pattern), starred, n=3, cutoff=0.3)
    return f"use {' or '.join(map(repr, close or list(starred)[:3]))}"
