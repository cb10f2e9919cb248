"""Check what the user's batch functions return. Imports torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from inspect import signature
from traceback import extract_tb
from typing import Any

from raypar.actors.context_parallel.sequence import num_pieces
from raypar.actors.data.batches import LengthError, lengths_of, pair_of
from raypar.actors.errors import is_ours
from raypar.actors.machine.this_machine import starts_own_ray
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers, Transformer
from raypar.actors.specs.run import Run
from raypar.actors.tensors import Values
from raypar.config.conflicts.parallel import multiples_near
from raypar.config.rules import Examined

_MISTAKES: tuple[type[Exception], ...] = (TypeError, NameError, AttributeError, IndexError, ZeroDivisionError)
_FIGURES = ("step", "steps_taken", "loss", "val_loss", "perplexity", "tokens", "bits_per_byte")  # of an evaluation


def batches_faults(data: Batches) -> Iterator[str]:
    """Yield a fault for each batch function whose first microbatch is no pair of tensors, or tuples of tensors.

    An exception of a function is a fault too. Where actors may run elsewhere only a mistake is one, such as a
    NameError: a file may be missing here and be there.
    """
    fatal = _MISTAKES if _is_connected() or not starts_own_ray() else Exception
    for name, fn in (("data.fn", data.fn), ("data.validate", data.validate)):
        if fn is not None and not takes(fn, 3):
            yield f"{name} can't be called with (step, microbatch, dp): give a function of these three"
            continue
        try:
            batch = None if fn is None else fn(0, 0, 0)
        except fatal as error:
            yield user_function_failure(name, error)
            continue
        except Exception:
            continue
        if fn is not None:
            try:
                pair = pair_of(batch)
            except TypeError as error:
                yield f"{name}: {error}"
            else:
                yield from _length_faults(data, name, *pair)


def _length_faults(data: Batches, name: str, inputs: Values, targets: Values) -> Iterator[str]:
    """Yield a fault if ``data.lengths`` can't be called with a batch function's batch, or returns no lengths of it."""
    if data.lengths is None:
        return
    if not takes(data.lengths, 2):
        yield "data.lengths can't be called with (inputs, targets): give a function of these two"
        return
    try:
        lengths_of(data.lengths, inputs, targets)
    except LengthError as error:
        yield f"{name}: {error}"
    except Exception as error:
        yield user_function_failure("data.lengths", error)


def user_function_failure(name: str, error: Exception) -> str:
    """Return the fault of a user's function that raises an error, with the line.

    Args:
        name: The field that holds the function, ``data.fn``.
        error: What it raised.
    """
    frames = extract_tb(error.__traceback__)
    at = next((frame for frame in reversed(frames) if not is_ours(frame.filename)), frames[-1])
    return f"{name} fails at {at.filename}:{at.lineno}, {type(error).__name__}: {error}"


def _is_connected() -> bool:
    """Return whether this process is connected to Ray already, perhaps a cluster's."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


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
    """Yield a fault if the loss or a metric can't be called with an output and a target, or the count with a target."""
    if isinstance(model.loss, type):
        yield f"model.loss is a class, {model.loss.__name__}: give an object of it, {model.loss.__name__}()"
    elif not takes(model.loss, 2):
        yield "model.loss can't be called with (output, target): give a function of these two"
    if model.count is not None and not takes(model.count, 1):
        yield "model.count can't be called with (target): give a function of it"
    for name, metric in model.metrics.items():
        if name in _FIGURES or not name.isprintable() or not name.strip():
            yield f"model.metrics has {name!r}, which is no name for a metric: give one that no other figure has"
        if not takes(metric, 2):
            yield f"model.metrics: {name!r} can't be called with (output, target): give a function of these two"


def length_faults(examined: Examined, data: Batches) -> Iterator[str]:
    """Yield a fault if the first batch of the user's functions has no whole ids, or sequences that do not fit the run.

    They may have ``seq`` tokens at the most, and a number that actors or slices divide.

    Args:
        examined: The run.
        data: Its functions.
    """
    run = examined.run
    model = run.model
    if not isinstance(model, Transformer):
        return
    divisors = dict(_divisors(run))
    for name, fn in (("data.fn", data.fn), ("data.validate", data.validate)):
        try:
            inputs: Any = fn(0, 0, 0)[0] if fn is not None else ()
            ids = inputs if isinstance(inputs, tuple) else (inputs,)
            lengths = [value.shape[1] for value in ids]
            broken = next((value.dtype for value in ids if value.is_floating_point()), None)
        except Exception:  # here its files may be missing; an actor reports the error with its traceback
            continue
        if broken is not None:
            yield f"{name} returns {str(broken).removeprefix('torch.')} as token ids: make them int64, with .long()"
        if (longest := max(lengths, default=0)) > model.seq:
            what = f"{name} returns sequences of {longest} tokens"
            yield f"{what}, but model.seq is {model.seq}: set model.seq to {longest}"
        for why, count in divisors.items():
            if (odd := next((length for length in lengths if length % count), None)) is not None:
                yield f"{name} returns sequences of {odd} tokens, but {why}: give {multiples_near(odd, count)} tokens"


def _divisors(run: Run) -> Iterator[tuple[str, int]]:
    """Yield the numbers that must divide the length of a sequence, each after the reason."""
    if run.token_slices > 1:
        yield f"token_slices is {run.token_slices}", run.token_slices
    if run.mesh.cp == 1:
        return
    pieces = num_pieces(run.context, run.mesh.cp)
    yield f"mesh.cp {run.mesh.cp} with context {run.context!r} cuts them into {pieces} pieces", pieces
