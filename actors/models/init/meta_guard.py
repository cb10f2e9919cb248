"""Refuse ops that mix real tensors and meta tensors, which have no values: some CPU kernels of torch accept them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from raypar.actors.autograd.torch_private import leaves_of

NO_VALUES = (
    "a weight or buffer is used that has no values here: another actor's layer has it, or it is reached through a "
    "global or a context variable; make it, or its module, an attribute of the layer that uses it"
)


class MetaGuard(TorchFunctionMode):
    """Mode in which an op that gets a meta tensor beside a real one raises ValueError.

    The matrix product of torch's CPU kernels computes with a meta tensor without an error, and wrongly.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = {value.is_meta for value in leaves_of((args, kwargs)) if isinstance(value, Tensor)}
        if len(kinds) == 2:
            raise ValueError(NO_VALUES)
        return func(*args, **(kwargs or {}))
