"""What the members of a group compute together, as one function of the logical tensors: for gradcheck."""

from __future__ import annotations

import torch

from tests.support.local_groups import local_groups
from tests.support.threads import in_threads


class Together(torch.autograd.Function):
    """``work(group, *tensors)`` on every member, in threads, forwards and backwards.

    ins  the dim along which each input is divided, None for a replicated one; out likewise for the output
    """

    @staticmethod
    def forward(ctx, work, size, ins, out, *inputs):
        ctx.groups, ctx.ins, ctx.out = local_groups("tp", size), ins, out

        pairs = list(zip(inputs, ins, strict=True))

        def one(group):
            leaves = [part(x, dim, group).requires_grad_(x.is_floating_point()) for x, dim in pairs]
            with torch.enable_grad():
                return leaves, work(group, *leaves)

        ctx.leaves, outputs = zip(*in_threads(ctx.groups, one), strict=True)
        ctx.outputs = outputs
        return whole([output.detach() for output in outputs], out)

    @staticmethod
    def backward(ctx, gradient):
        def one(group):
            leaves = [leaf for leaf in ctx.leaves[group.rank] if leaf.requires_grad]
            own = part(gradient, ctx.out, group)
            return iter(torch.autograd.grad(ctx.outputs[group.rank], leaves, own, retain_graph=True))

        made = in_threads(ctx.groups, one)
        back = [
            whole([next(each) for each in made], dim) if leaf.requires_grad else None
            for leaf, dim in zip(ctx.leaves[0], ctx.ins, strict=True)
        ]
        return None, None, None, None, *back


def together(work, size, ins, out, *inputs):
    """The logical output of ``work`` on ``size`` members for logical inputs."""
    return Together.apply(work, size, ins, out, *inputs)


def part(tensor, dim, group):
    own = tensor if dim is None else tensor.tensor_split(group.size, dim)[group.rank]
    return own.detach().clone()


def whole(parts, dim):
    """Divided parts joined; of replicated ones the first, and they must all have the same bits."""
    if dim is not None:
        return torch.cat(parts, dim)
    assert all(torch.equal(parts[0], other) for other in parts[1:]), "the members disagree"
    return parts[0].clone()
