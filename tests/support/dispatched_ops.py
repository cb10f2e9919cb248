"""Counts of the ops that torch dispatches: on a GPU most are launches of a kernel by the host."""

from __future__ import annotations

from collections import Counter

from raypar.actors.autograd.torch_private import DispatchMode

_NO_KERNELS = frozenset({"aten::lift_fresh", "aten::empty", "aten::new_empty", "aten::empty_like"})


class DispatchedOps(DispatchMode):
    """While it is active, ``ops`` counts what runs a kernel, by its name; views and allocations are left out."""

    def __init__(self):
        super().__init__()
        self.ops = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if runs_a_kernel(func):
            self.ops[str(func)] += 1
        return func(*args, **kwargs or {})


def runs_a_kernel(func):
    """Whether an op is neither a view nor an allocation, nor a mark of the profiler."""
    name = func._schema.name
    is_view = func.is_view or name in ("aten::detach", "aten::_unsafe_view")
    return not is_view and name not in _NO_KERNELS and not name.startswith("profiler::")


def ops_of_a_step(team, number=1):
    """The ops of each kind of action in a step of the first actor of a team; ``begin`` and ``end`` enclose them."""

    def counted(actor):
        found, row = {}, program.rows[team.world.row(team.all.index(actor))]
        calls = [("begin", lambda: actor.start_step(number, 0))]
        calls += [(action.op.name, lambda action=action: actor.act(action)) for action in row]
        for name, call in (*calls, ("end", lambda: actor.end_step(number))):
            with DispatchedOps() as mode:
                call()
            found[name] = found.get(name, Counter()) + mode.ops
        return found

    program = team.programs["train"]
    first, *others = team.each(counted)
    errors = [one for one in (first, *others) if isinstance(one, Exception)]
    if errors:
        raise errors[0]
    return first
