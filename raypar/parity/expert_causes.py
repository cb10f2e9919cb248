"""Likely causes of wrong gradients where there are experts: their auxiliary losses, and the groups that sum them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from raypar.parity.case import Case
from raypar.parity.compare import norm_of

_FITS = 0.02  # relative residual below which an explanation fits: what auxiliary losses contribute is small
_SEEN = 1e-5  # share of a gradient below which their part can't be told from rounding
_ROOM = 4  # elements for each unknown, without which anything would fit


def wrong_auxiliary(case: Case) -> str | None:
    """Explain a gradient to which auxiliary losses contribute nothing, or a multiple of what they should."""
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
        return None  # there is nothing else in it: any factor is told of the whole
    told = [
        size if power > 0 else f"1/{size}"
        for size, count in case.sizes.items()
        for power in (1, -1)
        if count > 1 and abs(r / count**power - 1) < _FITS
    ]
    return (
        f"auxiliary losses contribute {' or '.join(told) or f'{r:.3g}'} times what they should, and all the rest is "
        "right: each microbatch's count 1/(microbatches x dp), times the scale of the loss"
    )


def other_experts(case: Case) -> str | None:
    """Explain the gradient of an expert in which there are gradients of other experts."""
    ours, wanted = _flat(case.ours), _flat(case.wanted)
    if not case.experts or ours.shape != wanted.shape or len(ours) < _ROOM * (1 + len(case.experts)):
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
        return f"it is the gradient of {' and '.join(mixed)}: experts stand in the wrong order, or tokens go to others"
    return f"the gradient of {' and '.join(mixed)} is in it: summed over a group whose members have other experts"


def _flat(pieces: object) -> Tensor:
    """Return pieces as one vector in fp64."""
    assert isinstance(pieces, (list, tuple))
    return torch.cat([piece.double().flatten() for piece in pieces]) if pieces else torch.zeros(0, dtype=torch.float64)
