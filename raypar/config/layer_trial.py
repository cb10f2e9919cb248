"""Try the user's own layers on the shapes of the first batch, before actors start. Imports torch.

The layers of the skeleton, which have no memory, make shapes from shapes. Not every op can do that, so an error there
is only a suspicion: the layer that raised it is then made with its weights, and called with zeros.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from traceback import extract_tb

import torch
from torch import Tensor

from raypar.actors.data.batches import FunctionSource
from raypar.actors.errors import first_line, is_ours
from raypar.actors.models.build import build_model
from raypar.actors.models.made_at import made_at
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.actors.tensors import Values, as_values
from raypar.config.skeleton import Skeleton

_OF_SHAPES = re.compile(r"(?i)\b(shapes?|sizes?|dim|dims|dimensions?|channels?|features?|elements?)\b")
_MOST_TRIED = 1 << 24  # elements of a layer's weights and inputs that are made in the user's process


def layer_faults(run: Run, skeleton: Skeleton) -> list[str]:
    """Return why the layers can't compute the loss of the first batch, if that shows in the shapes.

    Only shapes are looked at, in fp32 and on CPUs. What can't be tried is no fault: the actors will see.

    Args:
        run: The run, checked.
        skeleton: Its model without weights.
    """
    is_plain = run.precision.compute == "fp32" and run.mesh.cp == 1 and run.device != "cuda"
    if not isinstance(run.model, Layers) or not isinstance(run.data, Batches) or not is_plain:
        return []
    if torch.cuda.is_available() or not skeleton.model.is_deferred:
        return []
    with torch.no_grad(), torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the actors will warn of the same
        try:
            source = FunctionSource(run.data)
            inputs, target = source.inputs("train", 0, 0, 0), source.targets("train", 0, 0, 0)
        except Exception:  # its files may be where only the actors are
            return []
        return _tried(run, skeleton, _on("meta", inputs), _on("meta", target))


def _tried(run: Run, skeleton: Skeleton, values: Values, target: Values) -> list[str]:
    """Call one layer after the other, and then the loss, with tensors that have only shapes."""
    giver = "data.fn gives"
    for index, name in enumerate(skeleton.model.names):
        try:
            made = as_values(skeleton.model.skeleton[index](*values))
        except Exception:
            told = _misfit(partial(_called, run, index), values, _weights(skeleton, index))
            return [f"model: {name} can't take what {giver}, {_shapes(values)}: {told}"] if told else []
        if not all(value.is_meta for value in made):
            return []
        values, giver = made, f"{name} makes"
    try:
        skeleton.model.loss(values, target)
    except Exception:
        told = _misfit(lambda both: skeleton.model.loss(both[: len(values)], both[len(values) :]), (*values, *target))
        what = f"what {giver}, {_shapes(values)}, and the targets, {_shapes(target)}"
        return [f"model.loss can't take {what}: {told}"] if told else []
    return []


def _misfit(call: Callable[[Values], object], values: Values, weights: int = 0) -> str:
    """Call with zeros of these shapes; return the error and the user's line if that shows that they do not fit."""
    if weights + sum(value.numel() for value in values) > _MOST_TRIED:
        return ""
    try:
        call(tuple(torch.zeros_like(value, device="cpu") for value in values))
    except (RuntimeError, ValueError, IndexError) as error:
        if type(error) not in (RuntimeError, ValueError, IndexError) or not _OF_SHAPES.search(str(error)):
            return ""
        theirs = [frame for frame in extract_tb(error.__traceback__) if not is_ours(frame.filename)]
        line = theirs[-1] if theirs else made_at(error)
        return f"{first_line(error)}" + (f" ({line.filename}, line {line.lineno})" if line is not None else "")
    except Exception:
        return ""
    return ""


def _called(run: Run, index: int, values: Values) -> object:
    """Make one layer with its weights, and call it; the skeleton stays without."""
    (layer,) = build_model(run.model, run.seed).materialize([index], run.seed)
    return layer(*values)


def _weights(skeleton: Skeleton, index: int) -> int:
    return sum(weight.numel() for weight in skeleton.model.skeleton[index].parameters())


def _on(device: str, values: Values) -> Values:
    return tuple(value.to(device) for value in values)


def _shapes(values: tuple[Tensor, ...]) -> str:
    return " and ".join(str(tuple(value.shape)) for value in values)
