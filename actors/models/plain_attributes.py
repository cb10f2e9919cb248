"""Plain attributes of modules, which nothing saves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from raypar.actors.autograd.torch_private import num_writes


def plain_attributes(names: Sequence[str], layers: Sequence[nn.Module]) -> Iterator[tuple[str, object]]:
    """Yield the plain attributes of the user's own modules, which are neither parameters nor buffers.

    Args:
        names: The names of the layers.
        layers: The layers.

    Yields:
        The name of each number, text or tensor, and its value; a tensor's value is its id and how often it was written
        to.
    """
    for layer, module in zip(names, layers, strict=True):
        for path, part in module.named_modules(prefix=layer):
            if type(part).__module__.startswith(("torch.", "raypar.")):
                continue
            for name, value in vars(part).items():
                if name.startswith("_") or name in ("training",):
                    continue
                if isinstance(value, Tensor):
                    yield f"{path}.{name}", (id(value), num_writes(value))
                elif isinstance(value, int | float | str):
                    yield f"{path}.{name}", value
