"""GPT and Llama, written from the papers in plain torch and float64, as functions of tensors by name.

Shapes: B sequences, S tokens, D width of the model, d width of a head, N heads, K heads of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.oracle import experts, positions

Weights = Mapping[str, Tensor]


class Output(NamedTuple):
    """What a model makes of a microbatch.

    Attributes:
        logits: (B, S, V).
        auxiliary: The sum of all auxiliary losses, with their coefficients.
        loads: By the name of its block, how many choices fell on each expert.
        margin: See experts.Routed; the smallest of all blocks.
    """

    logits: Tensor
    auxiliary: Tensor
    loads: dict[str, list[int]]
    margin: float


def compute(
    weights: Weights,
    model: dict[str, Any],
    ids: Tensor,
    starts: Tensor | None = None,
    biases: Mapping[str, Sequence[float]] | None = None,
    lengths: Sequence[int] | None = None,
) -> Output:
    """Compute the logits of sequences.

    Args:
        weights: The weights by name, float64.
        model: Fields of the model: kind, layers, hidden, heads and others.
        ids: Tokens, (B, S).
        starts: By token the position at which its document begins, (B, S); None if a sequence is one document.
        biases: By the name of a block with experts, the bias of each expert.
        lengths: By sequence, how many tokens are not padding, which has no experts; None if all are.
    """
    batch, length = ids.shape
    at = torch.arange(length).expand(batch, length)
    if starts is not None:
        at = at - starts
    x = weights["embed.tokens.weight"][ids]
    if model.get("pad_id") is not None:  # the vector of padding does not learn from where it is an input
        x = torch.where((ids == model["pad_id"])[..., None], x.detach(), x)
    if model.get("scaled_embedding") or model["positions"] == "sinusoidal":
        x = x * math.sqrt(model["hidden"])
    x = x + _added(weights, model, at)
    auxiliary = torch.zeros((), dtype=torch.float64)
    loads: dict[str, list[int]] = {}
    layers: list[experts.Routed] = []
    margin = math.inf
    for index in range(model["layers"]):
        name = f"blocks.{index}"
        y = _attention(weights, model, f"{name}.attn", _norm(weights, model, f"{name}.norm1", x), index, starts)
        x = x + (_norm(weights, model, f"{name}.attn_norm", y) if model.get("post_norms") else y)
        y = _norm(weights, model, f"{name}.norm2", x)
        if (moe := model["moe"]) is not None and _has_experts(moe, index, model["layers"]):
            bias = None if biases is None else biases.get(name)
            y, routed = _experts(weights, model, f"{name}.mlp", y, bias, lengths)
            auxiliary = auxiliary + experts.auxiliary(routed, moe)
            loads[name], margin = routed.load, min(margin, routed.margin)
            layers.append(routed)
        else:
            y = _mlp(weights, model, f"{name}.mlp", y)
        x = x + (_norm(weights, model, f"{name}.mlp_norm", y) if model.get("post_norms") else y)
    if layers and model["moe"]["loss"] == "joint":
        auxiliary = auxiliary + experts.joint(layers, model["moe"])
    head = weights["embed.tokens.weight"] if model["tied"] else weights["head.out.weight"]
    logits = _capped(_norm(weights, model, "head.norm", x) @ head.T, model.get("logit_cap"))
    return Output(logits, auxiliary, loads, margin)


def _added(weights: Weights, model: dict[str, Any], at: Tensor) -> Tensor:
    """Return the vectors that are added to those of tokens, (B, S, D), or 0."""
    kind, rows = model["positions"], list(at)
    if kind == "learned":
        return weights["embed.positions.weight"][at]
    if kind == "hierarchical":
        return torch.stack([positions.hierarchical(weights["embed.positions.weight"], row) for row in rows])
    if kind == "sinusoidal":
        return torch.stack([positions.sinusoidal(row, model["hidden"]) for row in rows]).to(
            weights["embed.tokens.weight"]
        )
    return torch.zeros((), dtype=torch.float64)


def _norm(weights: Weights, model: dict[str, Any], name: str, x: Tensor) -> Tensor:
    """Return LayerNorm (Ba et al. 2016) of a GPT, RMSNorm (Zhang & Sennrich 2019) of a Llama or of a head."""
    eps = model["norm_eps"]
    if f"{name}.bias" in weights:
        centred = x - x.mean(-1, keepdim=True)
        scaled = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + eps)
        return scaled * weights[f"{name}.weight"] + weights[f"{name}.bias"]
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weights[f"{name}.weight"]


def _linear(weights: Weights, model: dict[str, Any], name: str, x: Tensor) -> Tensor:
    """Apply a linear layer, with its low-rank adapter (Hu et al. 2022, section 4.1) if it has one."""
    y = x @ weights[f"{name}.weight"].T
    if f"{name}.bias" in weights:
        y = y + weights[f"{name}.bias"]
    if f"{name}_lora.a.weight" in weights:
        lora = model["lora"]
        narrow = x @ weights[f"{name}_lora.a.weight"].T
        y = y + lora["alpha"] / lora["rank"] * (narrow @ weights[f"{name}_lora.b.weight"].T)
    return y


def _capped(x: Tensor, cap: float | None) -> Tensor:
    """Bend numbers below a cap: Gemma team 2024, "Gemma 2", section 2."""
    return x if cap is None else cap * torch.tanh(x / cap)


def _attention(
    weights: Weights, model: dict[str, Any], name: str, x: Tensor, block: int, starts: Tensor | None
) -> Tensor:
    """Attend to the token itself and those before it: (B, S, D) -> (B, S, D)."""
    batch, length = x.shape[:2]
    heads = model["heads"]
    d = model["head_width"] or model["hidden"] // heads
    kv = model.get("kv_heads") or heads
    q, k, v = (
        _linear(weights, model, f"{name}.{part}", x).view(batch, length, count, d).transpose(1, 2)
        for part, count in (("q", heads), ("k", kv), ("v", kv))
    )
    if model.get("qk_norm"):
        q, k = _norm(weights, model, f"{name}.q_norm", q), _norm(weights, model, f"{name}.k_norm", k)
    if model["positions"] == "rope":
        at = torch.arange(length)
        base, scaling = model["rope_base"], model["rope_scaling"]
        q, k = (positions.rotated(one, at, base, scaling, length) for one in (q, k))
    k, v = (one.repeat_interleave(heads // kv, dim=1) for one in (k, v))
    scores = _capped(q @ k.transpose(-1, -2) / math.sqrt(model.get("query_scale") or d), model.get("attention_cap"))
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    if model["positions"] == "alibi":
        slopes = torch.tensor(positions.alibi_slopes(heads)).to(scores)
        scores = scores - slopes[:, None, None] * (query - key)
    seen = key <= query
    if model["window"] is not None and block >= model["window_first"]:
        skips = model["window_skips"]
        if not (skips and (block + 1) % skips == 0):
            seen = seen & (query - key < model["window"])
    if starts is not None:
        seen = (seen & (key >= starts[:, :, None]))[:, None]
    mixed = torch.softmax(scores.masked_fill(~seen, -math.inf), -1) @ v
    return _linear(weights, model, f"{name}.out", mixed.transpose(1, 2).reshape(batch, length, heads * d))


def _mlp(weights: Weights, model: dict[str, Any], name: str, x: Tensor) -> Tensor:
    """Apply an MLP: with a GELU (Hendrycks & Gimpel 2016) of a GPT, gated (Shazeer 2020) of a Llama."""
    if model["kind"] == "gpt":
        return _linear(weights, model, f"{name}.down", _gelu(_linear(weights, model, f"{name}.up", x), model["gelu"]))
    gate, up = _linear(weights, model, f"{name}.gate", x), _linear(weights, model, f"{name}.up", x)
    if model["gate"] == "silu":
        gate = gate / (1 + torch.exp(-gate))
    else:
        gate = _gelu(gate, "tanh" if model["gate"] == "gelu_tanh" else "exact")
    return _linear(weights, model, f"{name}.down", gate * up)


def _gelu(x: Tensor, form: str) -> Tensor:
    if form == "tanh":
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + torch.erf(x / math.sqrt(2)))


def _has_experts(moe: dict[str, Any], block: int, layers: int) -> bool:
    first = moe["every"] - 1 if moe["first"] is None else moe["first"]
    return first <= block < layers and (block - first) % moe["every"] == 0


def _experts(
    weights: Weights,
    model: dict[str, Any],
    name: str,
    x: Tensor,
    bias: Sequence[float] | None,
    lengths: Sequence[int] | None,
) -> tuple[Tensor, experts.Routed]:
    """Apply the experts of a block, and what all tokens have beside them."""
    moe = model["moe"]
    routed = experts.route(x, weights[f"{name}.router.weight"], moe, bias, lengths)
    num_experts = len(weights[f"{name}.router.weight"])

    def expert(index: int) -> experts.Expert:
        return lambda one: _mlp(weights, model, f"{name}.experts.{index}", one)

    y = experts.combined(x, routed, [expert(index) for index in range(num_experts)], moe["capacity"])
    if moe["residual"]:  # Rajbhandari et al. 2022, section 4.1
        parts = torch.softmax(_linear(weights, model, f"{name}.mix", x), -1)
        y = y * parts[..., :1] + _mlp(weights, model, f"{name}.residual", x) * parts[..., 1:]
    if moe["shared"]:
        y = y + _mlp(weights, model, f"{name}.shared", x)
    return y, routed
