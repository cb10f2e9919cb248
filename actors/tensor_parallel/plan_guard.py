"""Detection of mistakes in a user's tensor-parallel plan that cause no error of shapes.

Layers that shard a tensor, and layers that gather it, mark that in the autograd graph. Searching the graph backwards
finds whether this member holds only a part of a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from raypar.actors.autograd.torch_private import notes_of, viewed_tensor

_KEY = "raypar.divided"


def mark(tensor: Tensor, *, divided: bool, anew: bool = True) -> Tensor:
    """Mark in the autograd graph whether this member holds only a part of a tensor.

    Args:
        tensor: The tensor.
        divided: Whether it is a part, along any dim.
        anew: Whether to replace an earlier mark.

    Returns:
        The same tensor.
    """
    for one in (tensor, viewed_tensor(tensor)):  # an in-place op on a view changes the graph of its base
        if one is not None and one.grad_fn is not None:
            notes = notes_of(one.grad_fn)
            notes[_KEY] = divided if anew else notes.get(_KEY, divided)
    return tensor


def is_divided(tensor: Tensor) -> bool | None:
    """Return whether a tensor was computed from a part of another; None if the graph does not reach a mark."""
    if tensor.grad_fn is None:
        return None
    nodes, seen, known = [tensor.grad_fn], set[Node](), True
    while nodes:
        node = nodes.pop()
        if node in seen:
            continue
        seen.add(node)
        divided = notes_of(node).get(_KEY)
        if divided:
            return True
        if divided is None:
            nodes += [before for before, _ in node.next_functions if before is not None]
            leaf = getattr(node, "variable", None)
            known = known and (leaf is None or isinstance(leaf, nn.Parameter))  # other leaves are inputs of the stage
    return False if known else None


def demand(module: nn.Module, *, divided: bool, otherwise: str) -> None:
    """Add a check of a module's inputs, until the first call with an autograd graph.

    Args:
        module: The module; it raises ValueError if the check fails.
        divided: Whether this member must hold only a part of the input; else it must be whole.
        otherwise: The error message, with the fix.
    """

    def look(_: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        given = [is_divided(x) for x in (*inputs, *named.values()) if isinstance(x, Tensor)]
        if any(given) if not divided else bool(given) and all(one is False for one in given):
            raise ValueError(otherwise)
        if torch.is_grad_enabled() and None not in given:
            hook.remove()

    hook = module.register_forward_pre_hook(look, with_kwargs=True)


def demand_whole_loss(loss: Tensor) -> None:
    """Raise ValueError if a loss is computed from only a part of the last layer's outputs."""
    if is_divided(loss):
        raise ValueError(
            "the loss is computed from outputs that are divided over tp: end the model with a module that the plan "
            "calls 'row' or 'column_gather_output', or that goes 'to R'"
        )
