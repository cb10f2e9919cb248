"""How many floating-point operations a GPT takes. A multiplication and an addition are two."""

from __future__ import annotations

from typing import Literal

Recomputed = Literal["none", "selective", "full"]


def forward_flops(layers: int, hidden: int, seq: int, vocab: int, samples: int = 1) -> dict[str, int]:
    """Return the FLOPs of the matrix products of a forward, l (24 b s h^2 + 4 b s^2 h) + 2 b s h V, by part.

    Args:
        layers: Number of layers l.
        hidden: Width h.
        seq: Tokens of a sequence s.
        vocab: Number of tokens V.
        samples: Number of sequences b.

    Returns:
        Of all layers ``qkv`` (6 b s h^2), ``scores`` and ``values`` (2 b s^2 h each), ``out`` (2 b s h^2) and ``mlp``
        (16 b s h^2); and of the ``head``.

    Source: Narayanan et al. 2021, appendix.

    Examples:
        >>> sum(forward_flops(2, 8, 4, 10).values()) == 2 * (24 * 4 * 64 + 4 * 16 * 8) + 2 * 4 * 8 * 10
        True
    """
    bshh, bssh = samples * seq * hidden**2, samples * seq**2 * hidden
    return {
        "qkv": layers * 6 * bshh,
        "scores": layers * 2 * bssh,
        "values": layers * 2 * bssh,
        "out": layers * 2 * bshh,
        "mlp": layers * 16 * bshh,
        "head": 2 * samples * seq * hidden * vocab,
    }


def training_flops(
    layers: int, hidden: int, seq: int, vocab: int, samples: int = 1, *, recomputed: Recomputed = "none"
) -> int:
    """Return the FLOPs of a forward, its backward (twice as many), and the recomputation.

    Args:
        layers: Number of layers l.
        hidden: Width h.
        seq: Tokens of a sequence s.
        vocab: Number of tokens V.
        samples: Number of sequences b.
        recomputed: What the backward computes again: nothing, the scores and their product with the values, or layers.

    Source: Narayanan et al. 2021, equation 3: with "full", 96 b s l h^2 (1 + s / 6h + V / 16 l h), but for the head,
    which is not computed again.

    Examples:
        >>> training_flops(1, 64, 64, 1, recomputed="full") - training_flops(1, 64, 64, 1)
        7340032
    """
    parts = forward_flops(layers, hidden, seq, vocab, samples)
    again = {"none": (), "selective": ("scores", "values"), "full": tuple(name for name in parts if name != "head")}
    return 3 * sum(parts.values()) + sum(parts[name] for name in again[recomputed])
