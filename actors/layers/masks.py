"""Which keys a query sees, as functions for ``flex_attention`` and ``chunked_attention``.

A mask takes the positions of some queries (S, 1) and of some keys (1, T), int64, and returns (S, T) bool: whether the
query sees the key. A function of your own may do the same, or be a ``mask_mod`` of torch's FlexAttention: it takes the
indices of one sample, one head, one query and one key, each a tensor without dims, and returns one bool. All heads have
the same mask, since an actor does not know which of them it has.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from raypar.actors.errors import MaskError

Mask: TypeAlias = Callable[[Tensor, Tensor], Tensor]
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def causal(queries: Tensor, keys: Tensor) -> Tensor:
    """Let a query see its own and earlier tokens."""
    return queries >= keys


def every(queries: Tensor, keys: Tensor) -> Tensor:
    """Let a query see all tokens."""
    return torch.ones_like(queries + keys, dtype=torch.bool)


def sliding_window(size: int) -> Mask:
    """Return the mask with which a query sees its own token and the ``size - 1`` before it.

    Source: Beltagy et al. 2020, "Longformer", section 3.1.
    """
    return lambda queries, keys: (queries >= keys) & (queries - keys < size)


def butterfly(block: int) -> Mask:
    """Return the causal mask of a flat block butterfly.

    Block i of the queries sees block j of the keys if i = j, or if i and j, written in binary, differ in one digit. Of
    n blocks a query thus sees about log2(n) instead of n.

    Args:
        block: Number of tokens in a block.

    Source: Chen et al. 2021, "Pixelated Butterfly", section 3.2.
    """

    def mask(queries: Tensor, keys: Tensor) -> Tensor:
        differ = (queries // block) ^ (keys // block)
        return ((differ & (differ - 1)) == 0) & (queries >= keys)

    return mask


def prefix(length: int) -> Mask:
    """Return the mask with which a query sees the first tokens, its own and earlier ones.

    Args:
        length: Number of tokens that all see.

    Source: Raffel et al. 2020, "T5", section 3.2.1: prefix language models.
    """
    return lambda queries, keys: (queries >= keys) | (keys < length)


def documents(ids_BS: Tensor, within: Mask = causal) -> MaskMod:
    """Return the mask with which a query sees keys of its own document only.

    Args:
        ids_BS: The number of each token's document (B, S), integers.
        within: Which of these keys a query sees.
    """

    def mask(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (ids_BS[sample, query] == ids_BS[sample, key]) & within(query, key)

    return mask


def is_mask_mod(mask: Mask | MaskMod) -> bool:
    """Return whether a mask takes a sample, a head, a query and a key, and not only the last two."""
    return _num_arguments(mask) == 4


def demand_mask(mask: Mask | MaskMod, device: torch.device) -> None:
    """Try a mask on the first queries and keys.

    Args:
        mask: The mask.
        device: Where it is called.

    Raises:
        MaskError: If it takes other arguments than masks do, depends on the head, asks Python whether a tensor is true,
            or returns no bool.
    """
    if (count := _num_arguments(mask) if callable(mask) else 0) not in (2, 4):
        what = f"the mask takes {count} arguments" if callable(mask) else f"the mask is {mask!r}"
        raise MaskError(f"{what}: give a function of (queries, keys), or of (sample, head, query, key)")
    if not is_mask_mod(mask):
        positions = torch.arange(2, device=device)
        with _saying_how():
            _demand_bool(cast("Mask", mask)(positions[:, None], positions[None]))
        return
    from torch.nn.attention.flex_attention import create_mask  # the import takes seconds, and no other mask needs it

    head = torch.zeros((), dtype=torch.int64, device=device).as_subclass(_Head)

    def tried(sample: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return _demand_bool(cast("MaskMod", mask)(sample, head, query, key))

    with _saying_how():
        create_mask(tried, 1, 1, 1, 1, str(device))


@contextmanager
def _saying_how() -> Iterator[None]:
    """Within this context, a mask that asks whether a tensor is true raises a MaskError."""
    try:
        yield
    except RuntimeError as error:
        if not re.search("data-dependent control flow|Boolean value of Tensor", str(error)):
            raise
        fix = "use &, | and torch.where instead of and, or and if"
        raise MaskError(f"the mask asks Python whether a tensor is true: {fix}") from error


def _demand_bool(seen: object) -> Tensor:
    if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
        what = str(seen.dtype).removeprefix("torch.") if isinstance(seen, Tensor) else repr(seen)
        raise MaskError(f"the mask returns {what}: return a bool tensor, as queries >= keys is one")
    return seen


def _num_arguments(mask: Mask | MaskMod) -> int:
    """Return the number of arguments that a mask requires."""
    return sum(
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
        for parameter in inspect.signature(mask).parameters.values()
    )


def seen_by(mask: Mask | MaskMod, queries: slice, num_keys: int, samples: int, device: torch.device) -> Tensor:
    """Return which keys some queries see: (S, T) bool, or (B, 1, S, T) if the mask is one of samples.

    Args:
        mask: The mask.
        queries: The positions of the queries.
        num_keys: Number of keys.
        samples: Number of samples.
        device: Where the mask is called.
    """
    first, count = queries.start, queries.stop - queries.start
    if not is_mask_mod(mask):
        positions = torch.arange(max(queries.stop, num_keys), device=device)
        return cast("Mask", mask)(positions[queries, None], positions[None, :num_keys]).broadcast_to(count, num_keys)
    from torch.nn.attention.flex_attention import create_mask

    per_sample = cast("MaskMod", mask)

    def later(sample: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return per_sample(sample, head, query + first, key)

    return create_mask(later, samples, 1, count, num_keys, str(device))


class _Head(Tensor):
    """The index of a head, with which every operation raises a MaskError."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        raise MaskError(
            "the mask depends on the head, and with tensor parallelism each actor has some of the heads: give all heads"
            " the same mask, and heads with another one a separate layer"
        )
