"""Attention under any mask by torch's FlexAttention where it trains, and in chunks elsewhere.

Shapes: B samples, N query heads, K heads of keys and values, S queries, T keys, d width of a head.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from raypar.actors.layers.attention.chunked_attention import chunked_attention, demand_fitting_shapes
from raypar.actors.layers.masks import Mask, MaskMod, causal, demand_mask, is_mask_mod

_LEAST_WIDTH = 16  # narrowest head for which torch's kernel can be compiled


def flex_attention(q_BNSd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, mask: Mask | MaskMod = causal) -> Tensor:
    """Compute softmax(q k^T / sqrt(d)) v over the keys that each query sees.

    On CUDA it is torch's FlexAttention, compiled, which skips blocks of keys that no query sees. It has no backward
    on CPUs, and no float64: then, and for heads narrower than 16, it is ``chunked_attention``.

    Args:
        q_BNSd: Queries (B, N, S, d), any float dtype.
        k_BKTd: Keys (B, K, T, d). N is a multiple of K.
        v_BKTd: Values (B, K, T, d).
        mask: Which keys a query sees; see ``raypar.masks``. It may be a ``mask_mod`` of torch's, alike for all heads.

    Returns:
        The outputs (B, N, S, d); 0 for a query that sees no key.

    Raises:
        ValueError: If the shapes do not fit, or the mask is invalid (a MaskError).

    Source: Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention Kernels".
    """
    if q_BNSd.device.type != "cuda" or q_BNSd.dtype == torch.float64 or q_BNSd.shape[3] < _LEAST_WIDTH:
        return chunked_attention(q_BNSd, k_BKTd, v_BKTd, mask=mask)
    return by_torch(_compiled(), q_BNSd, k_BKTd, v_BKTd, mask)


def by_torch(kernel: Any, q_BNSd: Tensor, k_BKTd: Tensor, v_BKTd: Tensor, mask: Mask | MaskMod) -> Tensor:
    """Compute the same with torch's kernel, compiled or not.

    Args:
        kernel: torch.nn.attention.flex_attention.flex_attention, or its compiled form.
        q_BNSd: The queries.
        k_BKTd: The keys.
        v_BKTd: The values.
        mask: Which keys a query sees.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    demand_fitting_shapes(q_BNSd, k_BKTd, v_BKTd)
    demand_mask(mask, q_BNSd.device)
    length, keys, device = q_BNSd.shape[2], k_BKTd.shape[2], q_BNSd.device
    if is_mask_mod(mask):
        blocks = create_block_mask(cast("MaskMod", mask), q_BNSd.shape[0], None, length, keys, device=device)
    else:
        seen = cast("Mask", mask)
        blocks = create_block_mask(lambda b, h, q, k: seen(q, k), None, None, length, keys, device=device)
    out: Tensor = kernel(q_BNSd, k_BKTd, v_BKTd, block_mask=blocks, enable_gqa=q_BNSd.shape[1] != k_BKTd.shape[1])
    return out


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention as kernel

    return torch.compile(kernel, dynamic=False)
