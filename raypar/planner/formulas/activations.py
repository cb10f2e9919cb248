"""How many bytes of activations a layer of a GPT keeps for its backward, in half precision and with dropout."""

from __future__ import annotations

from typing import Literal

ActivationForm = Literal["whole", "tensor", "sequence", "selective", "full"]


def layer_activation_bytes(
    form: ActivationForm, hidden: int, heads: int, seq: int, samples: int = 1, tensor_ranks: int = 1
) -> float:
    """Return the bytes that an actor keeps of a layer and a microbatch.

    Args:
        form: How they are kept, with t tensor ranks:
            ``whole``, on one actor: s b h (34 + 5 a s / h);
            ``tensor``, by tensor parallelism: s b h (10 + 24 / t + 5 a s / h t);
            ``sequence``, by sequence parallelism too: s b h (34 + 5 a s / h) / t;
            ``selective``, and scores computed again: 34 s b h / t;
            ``full``, all computed again but the layer's input, which each rank has whole: 2 s b h.
        hidden: Width h.
        heads: Number of heads a.
        seq: Tokens of a sequence s.
        samples: Sequences of a microbatch b.
        tensor_ranks: Number of tensor ranks t.

    Source: Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", table 2.

    Examples:
        >>> [round(layer_activation_bytes(form, 12288, 96, 2048, 1, 8) / 1e9, 2) for form in ("whole", "tensor")]
        [2.87, 0.58]
        >>> [round(layer_activation_bytes(form, 12288, 96, 2048, 1, 8) / 1e9, 2) for form in ("sequence", "selective")]
        [0.36, 0.11]
    """
    sbh, scores, t = seq * samples * hidden, 5 * heads * seq / hidden, tensor_ranks
    each = {
        "whole": 34 + scores,
        "tensor": 10 + (24 + scores) / t,
        "sequence": (34 + scores) / t,
        "selective": 34 / t,
        "full": 2,
    }
    return sbh * each[form]
