"""Styles of a user's plan that redistribute inputs and outputs of modules, or split them along samples or tokens.

Each redistribution sends the fewest bytes between two placements, in the forward and in the backward.

Source: Xu et al. 2021, "GSPMD", section 3.5 and 4.5; MindSpore's semi-automatic mode inserts such redistributions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

from torch import Tensor, nn

from raypar.actors.collective.group import Group
from raypar.actors.collective.redistribution import redistribute
from raypar.actors.layers.dropout import sharded_dropout
from raypar.actors.models.parallel_style import Applied, ParallelStyle
from raypar.actors.models.placed_step import FEATURES, PlacedStep
from raypar.actors.sharding import Pieces, Sharding
from raypar.actors.tensor_parallel.linear import RowParallelLinear, VocabParallelEmbedding, shard_of
from raypar.actors.tensor_parallel.plan_guard import demand, mark
from raypar.actors.tensor_parallel.plan_styles import SharedInput
from raypar.actors.tensor_parallel.sequence import SharedCopy


def placed_styles(group: Group) -> Callable[[PlacedStep], ParallelStyle]:
    """Return a function that returns the style of a step over a group; equal steps have one style.

    Args:
        group: The tensor-parallel group.
    """

    @cache
    def style(step: PlacedStep) -> ParallelStyle:
        match step.what:
            case "input":
                return SharedInput(SharedCopy(partial(moved, group=group, step=step)))
            case "output":
                return OutputTo(group, step)
            case "row" | "vocab":
                return SummedTo(group, step)
            case "split":
                return SplitAlong(group, int(step.before[1:]))

    return style


def moved(x: Tensor, group: Group, step: PlacedStep) -> Tensor:
    """Redistribute a tensor by a step, and mark whether this member then holds only a part of it."""
    before, after, gradient = (_of(placement, x) for placement in step[1:])
    out = redistribute(x, [group], [before], [after], [gradient])
    return mark(out, divided=after != "R")


def _of(placement: str, x: Tensor) -> str:
    """Return a placement in which "features" is replaced by the tensor's last dim."""
    return f"S{x.dim() - 1}" if placement == FEATURES else placement


def _sharding(group: Group, placement: str) -> Sharding:
    """Return the sharding of a tensor at a placement."""
    return Sharding() if placement == "R" else Sharding({int(placement[1:]): Pieces.at(group.rank, group.size)})


@dataclass(frozen=True)
class OutputTo(ParallelStyle):
    """Redistribute the output of a module.

    Attributes:
        group: The members.
        step: The redistribution.
    """

    group: Group
    step: PlacedStep

    def apply(self, name: str, module: nn.Module) -> Applied:
        """Register a hook that redistributes the output."""
        module.register_forward_hook(lambda _, inputs, out: moved(out, self.group, self.step), prepend=True)
        return Applied(module, outputs={"": _sharding(self.group, self.step.after)})


@dataclass(frozen=True)
class SummedTo(ParallelStyle):
    """Shard a linear layer by inputs, or an embedding by ids, and reduce-scatter its output.

    Attributes:
        group: The members.
        step: The redistribution of the partial sum.
    """

    group: Group
    step: PlacedStep

    def apply(self, name: str, module: nn.Module) -> Applied:
        """Replace the module. A bias is sharded if the output's features are, else its gradients are partial."""
        leave, outputs = partial(moved, group=self.group, step=self.step), _sharding(self.group, self.step.after)
        if isinstance(module, nn.Embedding):
            table = shard_of(module.weight.shape, 0, self.group)
            made: nn.Module = VocabParallelEmbedding(module, table, leave)
            return Applied(made, {"weight": table}, outputs={"": outputs})
        assert isinstance(module, nn.Linear)
        shards = {"weight": shard_of(module.weight.shape, 1, self.group)}
        made = RowParallelLinear(module, shards["weight"], leave, name)
        made.register_forward_hook(_note_part, prepend=True)
        if made.bias is None:
            return Applied(made, shards, outputs={"": outputs})
        if self.step.after != FEATURES:
            return Applied(made, shards, {"bias": (self.group,)}, outputs={"": outputs})
        shards["bias"] = shard_of(made.bias.shape, 0, self.group)
        made.bias = nn.Parameter(made.bias.new_empty(shards["bias"].shape))
        return Applied(made, shards, outputs={"": outputs})


def _note_part(_: nn.Module, inputs: Any, out: Tensor) -> None:
    """Mark the sum as a part, after the layer has marked it as whole."""
    mark(out, divided=True)


def _note_split(_: nn.Module, inputs: Any, out: Tensor) -> None:
    """Mark the output as a part, unless it was redistributed."""
    mark(out, divided=True, anew=False)


@dataclass(frozen=True)
class SplitAlong(ParallelStyle):
    """Let each member apply a module to its part of the input along a dim.

    Weights are whole on every member, and each member's gradients of them are partial. A dropout has the mask of one
    process, of which a member takes its part.

    Attributes:
        group: The members.
        dim: The dim.
    """

    group: Group
    dim: int

    def apply(self, name: str, module: nn.Module) -> Applied:
        """Keep the module, but replace a dropout."""
        sharding = _sharding(self.group, f"S{self.dim}")
        made = sharded_dropout(module, sharding) if isinstance(module, nn.Dropout) else module
        kind = f"split{self.dim}"
        what = f"{name} is {kind!r} in the plan, but its input is whole on every actor of tp: use '{kind} from R'"
        demand(made, divided=True, otherwise=what)
        made.register_forward_hook(_note_split, prepend=True)
        whole = [inner for inner, _ in made.named_parameters()]
        return Applied(made, partial=dict.fromkeys(whole, (self.group,)), outputs={"": sharding})
