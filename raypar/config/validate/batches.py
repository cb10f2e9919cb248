"""Check what the user's batch functions return. Imports torch."""

from __future__ import annotations

from collections.abc import Iterator

from raypar.actors.data.batches import pair_of
from raypar.actors.specs.data import Batches


def batches_faults(data: Batches) -> Iterator[str]:
    """Yield a fault for each batch function whose first microbatch is no pair of tensors, or tuples of tensors.

    A function that fails is no fault here: its files may be where only the actors are.
    """
    for name, fn in (("data.fn", data.fn), ("data.validate", data.validate)):
        try:
            batch = None if fn is None else fn(0, 0, 0)
        except Exception:
            continue
        if fn is not None:
            try:
                pair_of(batch)
            except TypeError as error:
                yield f"{name}: {error}"
