"""Check what the user's batch functions return. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from traceback import extract_tb
from typing import Any

from raypar.actors.data.batches import pair_of
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers

_MISTAKES = (TypeError, NameError, AttributeError, IndexError, ZeroDivisionError)


def batches_faults(data: Batches) -> Iterator[str]:
    """Yield a fault for each batch function whose first microbatch is no pair of tensors, or tuples of tensors.

    A mistake in a function is a fault too. Other exceptions of it are none here: its files may be where only the
    actors are.
    """
    for name, fn in (("data.fn", data.fn), ("data.validate", data.validate)):
        if fn is not None and not takes(fn, 3):
            yield f"{name} can't be called with (step, microbatch, dp): give a function of these three"
            continue
        try:
            batch = None if fn is None else fn(0, 0, 0)
        except _MISTAKES as error:
            at = extract_tb(error.__traceback__)[-1]
            yield f"{name} fails at {at.filename}:{at.lineno}, {type(error).__name__}: {error}"
            continue
        except Exception:
            continue
        if fn is not None:
            try:
                pair_of(batch)
            except TypeError as error:
                yield f"{name}: {error}"


def takes(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function can be called with so many arguments; True if its signature is not known."""
    try:
        signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a builtin may have none
        return True
    return True


def loss_faults(model: Layers) -> Iterator[str]:
    """Yield a fault if the loss can't be called with an output and a target, as a class can't."""
    if isinstance(model.loss, type):
        yield f"model.loss is a class, {model.loss.__name__}: give an object of it, {model.loss.__name__}()"
    elif not takes(model.loss, 2):
        yield "model.loss can't be called with (output, target): give a function of these two"
