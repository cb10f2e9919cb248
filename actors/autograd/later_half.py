"""Split a backward along autograd's graph, which is retained: gradients of inputs first, of parameters later."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from functools import partial
from itertools import chain

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from raypar.actors.autograd.torch_private import num_writes, run_backward


class LaterHalf:
    """The second half of a backward: the deferred gradients of some parameters.

    A border is a node of the graph from which some edges lead only to such parameters, and other edges to tensors whose
    gradients are computed in the first half. The first half does not follow the former edges, and saves the gradients
    of the border's outputs. The second half starts at the border with these, and computes only the parameters'
    gradients. Both call the same kernels on the same tensors as a whole backward. In between the whole graph is kept.

    Some parameters are not deferred: those below borders that are Python functions, which compute all of their
    gradients at once; those below several borders, whose sums would be added up in another order; and vectors without a
    matrix below the same border, such as those of norms, which take less time than running the border twice.

    Args:
        root: The scalar that the backward starts from.
        later: The parameters whose gradients may be deferred.

    Source: Qi et al. 2023, "Zero Bubble Pipeline Parallelism"; like torch.distributed.pipelining's _backward.py.
    """

    def __init__(self, root: Tensor, later: Collection[Tensor]) -> None:
        self._root: Tensor | None = root
        graph = _Graph(root)
        self._below, now = graph.divided(later)
        self._captured: dict[Node, tuple[Tensor | None, ...]] = {}
        self._versions: list[tuple[Tensor, int]] = []
        if not now:  # the first half has nothing to compute
            return
        hooks = [border.register_prehook(partial(self._keep, border)) for border in self._below]
        try:
            run_backward([root], [torch.ones_like(root)], now, keep=bool(hooks))
        finally:
            for hook in hooks:
                hook.remove()
        self._root = None

    @property
    def parameters(self) -> frozenset[Tensor]:
        """The parameters whose gradients are not complete yet."""
        return frozenset(leaf for leaves in self._below.values() for leaf in leaves)

    def compute(self) -> None:
        """Compute the deferred gradients, add them to the parameters' ``grad``, and free the graph.

        Raises:
            RuntimeError: A saved gradient was written to since the first half.
        """
        if any(num_writes(gradient) != writes for gradient, writes in self._versions):
            raise RuntimeError(
                "the gradient of a module's output was changed in place before the gradients of its parameters were "
                "made from it: write into a copy, or set Layers(halves=False)"
            )
        below, self._below = self._below, {}
        self._versions.clear()
        if self._root is not None:
            root, self._root = self._root, None
            run_backward([root], [torch.ones_like(root)], next(iter(below.values())))
            return
        for border, leaves in below.items():
            captured = self._captured.pop(border, ())
            given = {number: gradient for number, gradient in enumerate(captured) if gradient is not None}
            if given:
                run_backward([GradientEdge(border, number) for number in given], [*given.values()], leaves)

    def _keep(self, border: Node, gradients: tuple[Tensor | None, ...]) -> None:
        self._captured[border] = gradients
        self._versions += [(gradient, num_writes(gradient)) for gradient in gradients if gradient is not None]


class _Graph:
    """The nodes of an autograd graph.

    Args:
        root: The scalar from which a backward starts.

    Attributes:
        root: The node of the root.
        leaves: The leaves of the graph, each once.
    """

    def __init__(self, root: Tensor) -> None:
        assert root.grad_fn is not None
        self.root: Node = root.grad_fn
        self._nodes: list[Node] = []  # each after all its children
        self._children: dict[Node, list[Node]] = {}
        waiting: list[tuple[Node, bool]] = [(self.root, False)]
        while waiting:
            node, is_left = waiting.pop()
            if is_left:
                self._nodes.append(node)
            elif node not in self._children:
                self._children[node] = [child for child, _ in node.next_functions if child is not None]
                waiting.append((node, True))
                waiting += [(child, False) for child in self._children[node]]
        self._leaf = {node: node.variable for node in self._nodes if hasattr(node, "variable")}
        self.leaves = tuple(dict.fromkeys(self._leaf.values()))

    def divided(self, later: Collection[Tensor]) -> tuple[dict[Node, list[Tensor]], list[Tensor]]:
        """Divide the leaves into those of the second and of the first half.

        Args:
            later: The leaves that may be deferred.

        Returns:
            The deferred leaves by border, and the leaves of the first half.
        """
        wanted = set(later)
        if wanted.issuperset(self.leaves):
            return {self.root: [*self.leaves]}, []
        while True:
            below = self._below_borders(wanted)
            times = Counter(chain.from_iterable(below.values()))
            early = {leaf for leaf, count in times.items() if count > 1}
            for border, leaves in below.items():
                if isinstance(border, BackwardCFunction) or all(leaf.dim() < 2 for leaf in leaves):
                    early.update(leaves)
            if not early:
                return below, [leaf for leaf in self.leaves if leaf not in times]
            wanted -= early

    def _below_borders(self, wanted: set[Tensor]) -> dict[Node, list[Tensor]]:
        """Return, by border, the leaves below its edges that lead only to wanted leaves, each once."""
        pure = dict[Node, bool]()  # whether a node leads only to wanted leaves
        for node in self._nodes:
            leaf = self._leaf.get(node)
            children = self._children[node]
            pure[node] = leaf in wanted if leaf is not None else bool(children) and all(map(pure.__getitem__, children))
        found = dict[Node, list[Tensor]]()
        for node in self._nodes:
            below = [] if pure[node] else [child for child in self._children[node] if pure[child]]
            if below:
                found[node] = [*dict.fromkeys(self._leaves_below(below))]
        return found

    def _leaves_below(self, nodes: list[Node]) -> Iterator[Tensor]:
        """Yield the leaves below some nodes."""
        waiting, seen = [*nodes], set[Node]()
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self._leaf:
                yield self._leaf[node]
            waiting += self._children[node]
