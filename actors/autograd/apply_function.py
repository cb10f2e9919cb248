"""Apply autograd functions."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function


def apply_function(function: type[Function], *args: Any) -> Tensor:
    """Return the output of an autograd function that has one. Torch types ``Function.apply`` as anything.

    Args:
        function: The function.
        args: The arguments of its ``forward``, after ``ctx``.
    """
    out: Tensor = function.apply(*args)
    return out
