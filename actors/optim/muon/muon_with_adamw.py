"""Muon: an optimizer that orthogonalizes the momentum of matrices before it updates the weights.

torch.optim.Muon is not used: its Newton-Schulz iterations are always in bfloat16. There a relative change of 1e-7 of a
gradient, as from another order of additions, changes the update by 6e-3 to 2e-2 of its norm, in float32 by 1e-6 to
2e-5 (2026-11-24, matrices of 256 x 256 to 3072 x 768, of full rank and of rank 16; float32 takes about twice as long on
an AMD EPYC). With ``precision="bf16"`` the bits are those of torch.optim.Muon, which a test compares.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from raypar.actors.machine.offload_storage import OffloadStorage
from raypar.actors.optim.muon.matrix_exchange import MatrixExchange
from raypar.actors.specs.optim import Muon, MuonScale

_A, _B, _C = 3.4445, -4.7750, 2.0315  # of the quintic a x + b x^3 + c x^5, whose slope at 0 is large
_SMALLEST = 1e-7  # norm below which a matrix counts as zero
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Optimizer(Protocol):
    """The interface of torch's optimizers, which Muon with AdamW has too.

    Attributes:
        param_groups: The parameter groups; each has ``params``, ``lr``, and ``rate``, the factor of the run's rate.
        state: The state of each parameter, by key.
    """

    param_groups: list[dict[str, Any]]
    state: defaultdict[Tensor, Any]

    def step(self) -> Any: ...


@dataclass(eq=False)
class MuonWithAdamW:
    """Muon over matrices, and AdamW over all other weights, as one optimizer.

    If several actors divide a matrix, each keeps the momentum of its part. In every step one of them gets all parts,
    orthogonalizes the whole matrix, on its device, and sends each its part of that, to add to its part of the weight.

    Attributes:
        spec: Settings of the optimizer.
        matrices: Parameter groups of matrices: dictionaries with ``params``, ``lr`` and ``weight_decay``.
        others: AdamW over all other weights; None if there are none.
        names: Logical names of the matrices.
        exchanges: The exchanges of the matrices with other actors; each matrix is in one of them.
        storage: Storage of the matrices, their gradients and their momentum. Off the device, an actor accesses one
            matrix at a time.
        param_groups: All parameter groups. A change of one has effect from the next step on.
        state: The state of each parameter: for a matrix the ``momentum_buffer``, else what AdamW keeps.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks".
    """

    spec: Muon
    matrices: Sequence[dict[str, Any]]
    others: Optimizer | None
    names: Mapping[Tensor, str]
    exchanges: Sequence[MatrixExchange]
    storage: OffloadStorage

    def __post_init__(self) -> None:
        self.param_groups = [*self.matrices, *(self.others.param_groups if self.others else ())]
        self.state: defaultdict[Tensor, Any] = self.others.state if self.others else defaultdict(dict)

    @torch.no_grad()
    def step(self) -> None:
        """Update every weight that has a gradient."""
        updated = {self.names[p]: (p, group) for group in self.matrices for p in group["params"] if p.grad is not None}

        def part(name: str) -> Tensor:
            return self._ahead(updated[name][0])

        for exchange in self.exchanges:
            names = [name for name in exchange.slices if name in updated]
            for name, update in exchange.results(names, part, self._result, self._dtype):
                weight, group = updated[name]
                scale = scale_of(self.spec.scale, *exchange.whole(name))
                with self.storage.accessible([weight], writes=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(update.to(weight.device), alpha=-group["lr"] * scale)
        if self.others is not None:
            self.others.step()

    def _ahead(self, weight: Tensor) -> Tensor:
        """Update the momentum of this actor's part of a matrix, and return what is orthogonalized of it."""
        momentum, state, gradient = self.spec.momentum, self.state[weight], weight.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = self.storage.moved(torch.zeros_like(gradient))
        mean: Tensor = state["momentum_buffer"]
        with self.storage.accessible([mean], writes=True), self.storage.accessible([gradient]):
            mean.lerp_(gradient, 1 - momentum)
            if self.spec.nesterov:
                return gradient.lerp(mean, momentum)
            return mean.clone() if self.storage.is_off_device else mean

    def _result(self, matrix: Tensor) -> Tensor:
        return orthogonalized(matrix, self.spec.iterations, self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return _DTYPES[self.spec.precision]


def scale_of(scale: MuonScale, rows: int, columns: int) -> float:
    """Return the factor of the orthogonalized update of a matrix, in addition to the learning rate.

    Args:
        scale: The rule: "original" of Jordan et al. 2024; "match_rms_adamw" of Liu et al. 2025, equation 4.
        rows: Rows of the matrix, its outputs.
        columns: Columns of the matrix.
    """
    return math.sqrt(max(1.0, rows / columns)) if scale == "original" else 0.2 * math.sqrt(max(rows, columns))


def orthogonalized(matrix: Tensor, iterations: int, dtype: torch.dtype) -> Tensor:
    """Bring all singular values of a matrix near 1 (0.7 to 1.2), and keep its singular vectors.

    Args:
        matrix: The matrix (rows, columns).
        iterations: Number of Newton-Schulz iterations.
        dtype: Their dtype.

    Returns:
        The matrix (rows, columns) in this dtype; zero if ``matrix`` is zero.

    Source: Jordan et al. 2024, "Muon", section "Newton-Schulz"; with its coefficients.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix).to(dtype, copy=True)
    x.div_(x.norm().clamp(min=_SMALLEST))
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.T if tall else x
