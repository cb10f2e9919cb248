"""AdamW, SGD and Muon, learning rates, clipping and averages of weights, written from the papers in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

Named = dict[str, Tensor]


def rate_at(optim: Mapping[str, Any], step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0: warm-up, then cosine, linear or wsd.

    The decay ends one step after the last one, as in transformers. Cosine: Loshchilov & Hutter 2017, equation 5; wsd:
    Hu et al. 2024, section 4; its sqrt form: Haegele et al. 2024.
    """
    peak, warmup, final = optim["lr"], optim["warmup"], optim["final"]
    if step < warmup:
        return peak * (step + 1) / warmup
    if optim["decay"] == "constant":
        return peak
    begin = warmup
    if optim["decay"] == "wsd":
        length = optim["decay_steps"] if optim["decay_steps"] is not None else max(1, steps // 10)
        begin = max(warmup, steps - 1 - length)
        if step <= begin:
            return peak
    progress = min(1.0, (step - begin) / max(1, steps - begin))
    if optim["decay"] == "cosine":
        return peak * (final + (1 - final) * (1 + math.cos(math.pi * progress)) / 2)
    if optim["decay_form"] == "sqrt" and optim["decay"] == "wsd":
        return peak * (final + (1 - final) * (1 - math.sqrt(progress)))
    return peak * (final + (1 - final) * (1 - progress))


def global_norm(gradients: Named) -> float:
    """Return the norm of all gradients together: Pascanu et al. 2013, section 3.2."""
    return math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients.values()))


def clipped(gradients: Named, norm: float, limit: float | None) -> Named:
    """Return gradients whose norm is at most a limit."""
    if limit is None or norm <= limit:
        return gradients
    return {name: gradient * (limit / norm) for name, gradient in gradients.items()}


class Optimizer:
    """Updates weights in place, by the fields of an optimizer (kind, lr, betas and others).

    Args:
        optim: The fields.
        steps: Steps of the whole run.
    """

    def __init__(self, optim: Mapping[str, Any], steps: int) -> None:
        self._optim, self._steps = optim, steps
        self._state: dict[str, dict[str, Any]] = {}

    def update(self, weights: Named, gradients: Named, step: int) -> None:
        """Update the weights that have gradients, in a step counted from 0."""
        optim, rate = self._optim, rate_at(self._optim, step, self._steps)
        for name, gradient in gradients.items():
            weight, share = weights[name], 1.0
            for pattern, of_pattern in optim["rates"].items():
                if fnmatchcase(name, pattern):
                    share = of_pattern
                    break
            decays = weight.dim() >= 2 and not any(fnmatchcase(name, pattern) for pattern in optim["no_decay"])
            decay = optim["weight_decay"] if decays else 0.0
            state = self._state.setdefault(name, {})
            if optim["kind"] == "sgd":
                self._sgd(weight, gradient, state, rate * share, decay)
            elif optim["kind"] == "adamw":
                self._adamw(weight, gradient, state, rate * share, decay, optim["betas"], optim["eps"])
            elif weight.dim() == 2 and not any(fnmatchcase(name, pattern) for pattern in optim["adamw"]):
                self._muon(weight, gradient, state, rate * share, decay)
            else:
                own = rate if optim["adamw_lr"] is None else rate * optim["adamw_lr"] / optim["lr"]
                self._adamw(weight, gradient, state, own * share, decay, optim["adamw_betas"], optim["adamw_eps"])

    def _sgd(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], rate: float, decay: float) -> None:
        """Update with momentum (Sutskever et al. 2013, in torch's form) and an L2 penalty."""
        gradient = gradient + decay * weight
        if self._optim["momentum"]:
            state["m"] = self._optim["momentum"] * state["m"] + gradient if "m" in state else gradient.clone()
            gradient = state["m"]
        weight -= rate * gradient

    def _adamw(
        self,
        weight: Tensor,
        gradient: Tensor,
        state: dict[str, Any],
        rate: float,
        decay: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Update as Loshchilov & Hutter 2019, algorithm 2."""
        state["t"] = t = state.get("t", 0) + 1
        state["m"] = betas[0] * state.get("m", 0.0) + (1 - betas[0]) * gradient
        state["v"] = betas[1] * state.get("v", 0.0) + (1 - betas[1]) * gradient**2
        mean, square = state["m"] / (1 - betas[0] ** t), state["v"] / (1 - betas[1] ** t)
        weight -= rate * decay * weight
        weight -= rate * mean / (torch.sqrt(square) + eps)

    def _muon(self, weight: Tensor, gradient: Tensor, state: dict[str, Any], rate: float, decay: float) -> None:
        """Update as Jordan et al. 2024, with the scales of Liu et al. 2025, section 2.2."""
        optim = self._optim
        mu = optim["momentum"]
        state["m"] = mu * state.get("m", 0.0) + (1 - mu) * gradient
        ahead = mu * state["m"] + (1 - mu) * gradient if optim["nesterov"] else state["m"]
        rows, columns = weight.shape
        x = ahead / max(float(torch.sqrt((ahead**2).sum())), 1e-7)
        if rows > columns:
            x = x.T
        for _ in range(optim["iterations"]):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
        if rows > columns:
            x = x.T
        size = max(1.0, rows / columns) ** 0.5 if optim["scale"] == "original" else 0.2 * max(rows, columns) ** 0.5
        weight -= rate * decay * weight
        weight -= rate * size * x


class Average:
    """An exponential moving average of weights, which begins with those after the first update."""

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self.weights: Named = {}

    def update(self, weights: Named) -> None:
        """Take in the weights after an update."""
        for name, weight in weights.items():
            before = self.weights.get(name)
            self.weights[name] = weight.clone() if before is None else self._decay * before + (1 - self._decay) * weight
