"""Likely causes of a tensor that differs from the plain process: the usual errors of parallel programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from raypar.parity.case import Case
from raypar.parity.compare import are_alike, norm_of
from raypar.schedules.float_sum import float_sum

FIT = 1e-3  # relative residual below which an explanation fits
_FITS = 0.02  # relative residual below which an explanation about experts fits: auxiliary losses contribute little
_SEEN = 1e-5  # share of a gradient below which their part can't be distinguished from rounding
_ELEMENTS = 4  # least elements for each unknown; with fewer, anything would fit


def cause_of(case: Case) -> str:
    """Return the likely cause as a phrase: the first explanation that fits."""
    return next((says for explain in _EXPLANATIONS if (says := explain(case)) is not None), _UNKNOWN)


_UNKNOWN = "not a multiple of the right one, nor a part of it: look at what this layer does first"


class _Factor(NamedTuple):
    """The likely cause of a tensor that is ``size ** power`` times the right one.

    Attributes:
        size: The name of the size, as in ``Case.sizes``.
        power: 1 or -1.
        forward: The cause if the tensor is an output, or None if the factor is impossible there.
        backward: The cause if the tensor is a gradient.
    """

    size: str
    power: int
    forward: str | None
    backward: str

    @property
    def spelled(self) -> str:
        return self.size if self.power > 0 else f"1/{self.size}"

    def says(self, case: Case) -> str | None:
        if self.size == "ep" and not case.experts:
            return None
        return self.backward if case.backward else self.forward

    def is_in(self, r: float, case: Case, fit: float = FIT) -> bool:
        """Return whether the ratio ``r`` is this factor, but for a relative error below ``fit``."""
        size = case.sizes.get(self.size, 1)
        return size > 1 and abs(r / size**self.power - 1) < fit


_FACTORS = (
    _Factor("tp", 1, "summed over tp once too often", "equal on all of tp, and yet summed over tp: reduced twice"),
    _Factor(
        "tp", -1, "an all_reduce over tp is missing (Megatron's g)", "an all_reduce over tp is missing (Megatron's f)"
    ),
    _Factor("cp", 1, "summed over cp once too often", "equal on all of cp, and yet summed over cp: reduced twice"),
    _Factor("cp", -1, "not summed over cp", "not reduced over cp, or averaged over it twice"),
    _Factor("dp", 1, None, "summed over dp, and not averaged"),
    _Factor("dp", -1, None, "not reduced over dp, or averaged over it twice"),
    _Factor("ep", 1, None, "summed over ep, although all tokens of an expert come to it"),
    _Factor("ep", -1, None, "averaged over ep, although all tokens of an expert come to it"),
    _Factor("microbatches", 1, None, "summed over microbatches, and not averaged"),
    _Factor("microbatches", -1, None, "averaged over microbatches twice"),
)


def _nothing(case: Case) -> str | None:
    """Explain actors that have no tensor at all."""
    without = [piece.actor for piece in case.pieces if piece.ours is None]
    if not without:
        return None
    cut = "no gradient arrives here: the graph is cut after this layer, by a detach or no_grad"
    return f"{', '.join(without)}: {cut if case.backward else 'it made no such output'}"


def _misshapen(case: Case) -> str | None:
    """Explain a tensor of the wrong shape."""
    for piece in case.pieces:
        assert piece.ours is not None
        if piece.ours.shape != piece.wanted.shape:
            shapes = f"shape {list(piece.ours.shape)}, and should have {list(piece.wanted.shape)}"
            return f"{piece.actor} has {shapes}: not gathered, or divided twice"
    return None


def _not_finite(case: Case) -> str | None:
    """Explain infinite or NaN elements."""
    bad = [piece.actor for piece in case.pieces if piece.ours is not None and not piece.ours.isfinite().all()]
    return f"not finite on {', '.join(bad)}: an overflow, or a division by 0" if bad else None


def _zero(case: Case) -> str | None:
    """Explain a tensor that is 0 everywhere."""
    if float_sum(map(norm_of, case.ours)) > 1e-6 * float_sum(map(norm_of, case.wanted)):
        return None
    return "0 everywhere: detached, or masked"


def _multiple(case: Case) -> str | None:
    """Explain a tensor that is r times the right one."""
    products = float_sum(float((o.double() * w.double()).sum()) for o, w in zip(case.ours, case.wanted, strict=True))
    r = products / (float_sum(norm_of(wanted) ** 2 for wanted in case.wanted) or math.inf)
    if not r or not are_alike(case.ours, [r * wanted.double() for wanted in case.wanted], FIT):
        return None
    if abs(r - 1) < FIT:
        return "almost right: another precision, another eps, or another order of additions"
    if abs(r + 1) < FIT:
        return "the sign is wrong"
    factors = [factor for factor in _FACTORS if factor.is_in(r, case) and factor.says(case)]
    causes = [f"{factor.spelled} times the right one: {factor.says(case)}" for factor in factors]
    return "; or ".join(causes) or f"{r:.4g} times the right one: a factor is missing, or one too many"


def _parts_of_a_sum(case: Case) -> str | None:
    """Explain a sum of which each actor has only a part."""
    for axis in case.axes:
        groups = case.groups(axis)
        present = [[piece.ours.double() for piece in group if piece.ours is not None] for group in groups]
        sums = [torch.stack(parts).sum(0) for parts in present]
        several = all(len(group) > 1 for group in groups)
        if groups and several and are_alike(sums, [group[0].wanted for group in groups], FIT):
            return f"each member of {axis} has its own part of a sum: {_missing_sum(axis, case)}"
    return None


def _other_members(case: Case) -> str | None:
    """Explain a tensor whose parts are on the wrong actors."""
    equal = [_equal_parts(piece.ours, case.wanted) for piece in case.pieces]
    if not all(equal) or all(index in found for index, found in enumerate(equal)):
        return None
    index = next(index for index, found in enumerate(equal) if index not in found)
    wrong, right = case.pieces[index].actor, case.pieces[equal[index][0]].actor
    return f"{wrong} has the part of {right}: a gather or scatter in the wrong order"


def _other_order(case: Case) -> str | None:
    """Explain a tensor whose parts along one dim are in the wrong order."""
    for count in sorted(set(case.sizes.values()) | {2 * case.sizes.get("cp", 1)}):
        for dim in range(case.wanted[0].dim()):
            orders = [_order(piece.ours, piece.wanted, dim, count) for piece in case.pieces]
            order = next((order for order in orders if order and order != sorted(order)), None)
            if order and all(orders):
                listed = ", ".join(map(str, order))
                return f"the {count} parts of dim {dim} are in the order {listed}: a gather in the wrong order"
    return None


def _some_right(case: Case) -> str | None:
    """Explain a tensor that is right on some actors only."""
    right = [p.actor for p in case.pieces if p.ours is not None and are_alike([p.ours], [p.wanted], FIT)]
    wrong = [piece.actor for piece in case.pieces if piece.actor not in right]
    found = f"right on {', '.join(right)}, wrong on {', '.join(wrong)}: look at what only these do"
    return found if right and wrong else None


def _added(case: Case) -> str | None:
    """Explain a tensor to which a bias was added too often."""
    differences = [ours.double() - wanted.double() for ours, wanted in zip(case.ours, case.wanted, strict=True)]
    for name, vector in case.vectors.items():
        if any(difference.shape[-1:] != vector.shape for difference in differences) or not norm_of(vector):
            continue
        rows = [vector.double().expand_as(difference) for difference in differences]
        times = float_sum(float((d * row).sum()) for d, row in zip(differences, rows, strict=True))
        times /= float_sum(norm_of(row) ** 2 for row in rows)
        is_whole = round(times) and abs(times - round(times)) < 0.01
        if is_whole and are_alike(differences, [times * row for row in rows], 0.01):
            return f"{name} is added {round(times) + 1} times"
    return None


def _unlike(case: Case) -> str | None:
    """Explain actors that should have the same tensor but do not."""
    for axis in case.axes:
        for group in case.groups(axis):
            first, *others = [piece.ours for piece in group if piece.ours is not None]
            if not all(are_alike([other], [first], FIT) for other in others):
                return f"the members of {axis} should have the same, and do not: {_missing_sum(axis, case)}"
    return None


def _wrong_auxiliary(case: Case) -> str | None:
    """Explain a gradient to which auxiliary losses contribute nothing, or a multiple of the right part."""
    part = _flat(case.auxiliary)
    ours, wanted = _flat(case.ours), _flat(case.wanted)
    if not case.auxiliary or ours.shape != wanted.shape or norm_of(part) <= _SEEN * norm_of(wanted):
        return None
    contributed = ours - (wanted - part)
    r = float(contributed @ part / (part @ part))
    if norm_of(contributed - r * part) > _FITS * norm_of(part) or abs(r - 1) < _FITS:
        return None
    if abs(r) < _FITS:
        return "without the gradient of the auxiliary losses: attach them to an output that goes on (attach_loss)"
    if norm_of(wanted - part) < _FITS * norm_of(part):
        return None  # the gradient has no other part: other explanations find a factor of the whole
    known = [_Factor(size, power, None, "") for size in case.sizes for power in (1, -1)]
    factors = [factor.spelled for factor in known if factor.is_in(r, case, _FITS)]
    return (
        f"auxiliary losses contribute {' or '.join(factors) or f'{r:.3g}'} times what they should, and all the rest is "
        "right: each microbatch's count 1/(microbatches x dp), times the scale of the loss"
    )


def _other_experts(case: Case) -> str | None:
    """Explain the gradient of an expert that contains gradients of other experts."""
    ours, wanted = _flat(case.ours), _flat(case.wanted)
    if not case.experts or ours.shape != wanted.shape or len(ours) < _ELEMENTS * (1 + len(case.experts)):
        return None
    columns = [wanted, *(_flat(pieces) for pieces in case.experts.values())]
    table = torch.stack(columns, 1)
    shares = torch.linalg.lstsq(table.T @ table, table.T @ ours.unsqueeze(1), driver="gelsd").solution.flatten()
    if norm_of(table @ shares - ours) > _FITS * norm_of(ours):
        return None
    scale = float(shares.abs().max())
    mixed = [name for name, share in zip(case.experts, shares[1:].tolist(), strict=True) if abs(share) > _FITS * scale]
    if not mixed or not math.isfinite(scale):
        return None
    if abs(float(shares[0])) < _FITS * scale:
        return f"it is the gradient of {' and '.join(mixed)}: experts are in the wrong order, or tokens go to others"
    return f"the gradient of {' and '.join(mixed)} is in it: summed over a group whose members have other experts"


def _flat(pieces: object) -> Tensor:
    """Return pieces as one vector in fp64."""
    assert isinstance(pieces, (list, tuple))
    return torch.cat([piece.double().flatten() for piece in pieces]) if pieces else torch.zeros(0, dtype=torch.float64)


def _missing_sum(axis: str, case: Case) -> str:
    """Return the cause for the factor 1/axis, which is also the cause if each member of the axis has its own part."""
    missing = next((factor for factor in _FACTORS if (factor.size, factor.power) == (axis, -1)), None)
    return (missing and missing.says(case)) or f"not summed over {axis}"


_EXPLANATIONS: tuple[Callable[[Case], str | None], ...] = (
    _nothing,
    _misshapen,
    _not_finite,
    _wrong_auxiliary,
    _zero,
    _multiple,
    _other_experts,
    _parts_of_a_sum,
    _other_members,
    _other_order,
    _some_right,
    _added,
    _unlike,
)


def _equal_parts(ours: Tensor | None, wanted: Sequence[Tensor]) -> list[int]:
    """Return the indexes of the wanted tensors that are equal to this one."""
    assert ours is not None
    return [index for index, one in enumerate(wanted) if are_alike([ours], [one], FIT)]


def _order(ours: Tensor | None, wanted: Tensor, dim: int, count: int) -> list[int] | None:
    """Return the index of each of ``count`` parts along a dim in the right tensor; None if a part is not in it."""
    if ours is None or count < 2 or wanted.shape[dim] % count:
        return None
    right = wanted.chunk(count, dim)
    found = [next(iter(_equal_parts(part, right)), None) for part in ours.chunk(count, dim)]
    order = [index for index in found if index is not None]
    return order if sorted(order) == list(range(count)) else None
