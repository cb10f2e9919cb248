"""Whether a tensor is here in part: its autograd graph tells, back to the layers that divide and put together."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

_KEY = "raypar.divided"


def mark(tensor: Tensor, *, divided: bool) -> Tensor:
    """Note in the graph that this member has a part of the tensor along its last dim, or all of it."""
    for one in (tensor, tensor._base):  # what changes a view in place leaves out the view's own node
        if one is not None and one.grad_fn is not None:
            _notes(one.grad_fn)[_KEY] = divided
    return tensor


def _notes(node: Node) -> dict[Any, Any]:
    notes: Any = node.metadata  # a dictionary; torch declares the function behind it
    return cast(dict[Any, Any], notes)


def is_divided(tensor: Tensor) -> bool | None:
    """Whether it was made of something that is here in part; None if the graph does not go back far enough."""
    if tensor.grad_fn is None:
        return None
    nodes, seen, known = [tensor.grad_fn], set[Node](), True
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        divided = _notes(node).get(_KEY)
        if divided:
            return True
        if divided is None:
            nodes += [before for before, _ in node.next_functions if before is not None]
            leaf = getattr(node, "variable", None)
            known = known and (leaf is None or isinstance(leaf, nn.Parameter))  # else given by another stage
    return False if known else None


def demand(module: nn.Module, *, divided: bool, otherwise: str) -> None:
    """Let the module look at the first tensor that it is given with a graph: ValueError if that is divided, or not,
    where it should be the other way round. ``otherwise`` says so, with the fix."""

    def look(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = [is_divided(x) for x in (*inputs, *named.values()) if isinstance(x, Tensor)]
        if any(given) if not divided else bool(given) and all(one is False for one in given):
            raise ValueError(otherwise)
        if torch.is_grad_enabled() and None not in given:
            hook.remove()

    hook = module.register_forward_pre_hook(look, with_kwargs=True)
