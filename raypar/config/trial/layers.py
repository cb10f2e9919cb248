"""Try the user's own layers on the shapes of the first batch, before actors start. Imports torch.

The layers of the skeleton, which have no memory, make shapes from shapes. Not every op can do that, so an error there
is only a suspicion: the first batch is then computed as the actors will, with weights, up to the layer that raised it.
It is also tried whether layers call their lists of experts in the order in which expert actors expect them, and whether
the loss differentiates by a value whose graph is on another stage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from traceback import extract_tb

import torch
from torch import Tensor, nn

from raypar.actors.collective.replicas import RefusedReplicas
from raypar.actors.data.batches import batch_source
from raypar.actors.errors import MaskError, first_line, is_ours
from raypar.actors.models.base import Model
from raypar.actors.models.build import build_model
from raypar.actors.models.expert_lists import note_calls
from raypar.actors.models.own.module_source_lines import made_at
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.models.skip_connections import SkipError, Skipped
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.actors.tensors import Values, as_values
from raypar.config.trial.calls import may_call, tried_as, unnoticed
from raypar.config.trial.distributed import noticed_questions
from raypar.config.trial.plan import plan_misfits

_OF_SHAPES = re.compile(
    r"(?i)\b(shapes?|sizes?|dim|dims|dimensions?|channels?|features?|elements?|batch_size|bounds)\b"
    "|must be one floating number|index out of range"
)
_OF_DTYPES = re.compile(r"(?i)\b(dtypes?|scalar type|floating point|integral type|not implemented for '\w+')")
_NO_GRADIENT = (
    "model.loss returns a loss without a gradient: compute it from the last layer's output, without detach or no_grad"
)
_EACH = (
    "; of a layer that returns a tuple the next one gets each tensor as an argument of its own, forward(self, a, b), "
    "and the loss gets the tuple"
)
_OWN_INPUTS = (
    "; inputs and targets are asked for apart, so what a target repeats of the inputs is another tensor: take the "
    "derivative in a layer, by its own input, and return it"
)
_MOST_TRIED = 1 << 24  # elements of the weights and values that are made in the user's process
_MOST_COMPUTED = 1 << 20  # the same where nothing is suspected, and only the loss is tried
OUTSIDE_THE_GRAPH = r"not have been used in the graph|does not require grad and does not have a grad_fn"


def graph_faults(model: Model, parts: Sequence[range], inputs: Values, target: Values) -> list[str]:
    """Return why the loss can't be computed where each stage has a graph of its own; [] if it can.

    Args:
        model: The model, without weights.
        parts: The layers of each stage.
        inputs: The inputs of a microbatch, without memory.
        target: Its targets, without memory.
    """
    try:
        _compute(model, [range(len(model.names))], inputs, target)
    except Exception:  # not for the stages
        return []
    try:
        _compute(model, parts, inputs, target)
    except RuntimeError as error:
        says = "takes a derivative by what a layer of another stage has made, which has no graph there"
        fix = "take it in one layer, which returns the result, or give these layers to one stage with split"
        return [f"model.loss, or a layer, {says} ({first_line(error)}): {fix}"]
    except Exception:
        return []
    return []


def _compute(model: Model, parts: Sequence[range], inputs: Values, target: Values) -> None:
    """Compute the loss, and begin a new graph with every stage but the first."""
    values, skipped = inputs, Skipped(model.skips, model.names)
    with torch.enable_grad():
        for part in parts:
            if part.start:
                values = tuple(value.detach().requires_grad_(value.is_floating_point()) for value in values)
            for index in part:
                values = as_values(model.skeleton[index](*skipped.inputs(index, values)))
                skipped.keep(index, values)
        model.loss(values, target)


def _with_weights(run: Run, model: Model, count: int) -> list[nn.Module]:
    """Return copies of the first layers with their initial weights. Layers that can't be copied are built again."""
    with suppress(Exception):
        return model.materialize(range(count), run.seed, parallelize=lambda name, layer: {})
    return build_model(run.model, run.seed).materialize(range(count), run.seed)


def call_faults(run: Run, model: Model, values: Values) -> list[str]:
    """Return which layers do not call each of their lists of experts once, in the order of registration.

    Expert actors have no code of the layer: they take part in one call of each list. The layers compute a batch, with
    weights and in this process. A layer that raises an error ends the trial: the actors report it.

    Args:
        run: The run, with own layers.
        model: Its model, without weights.
        values: What the first layer takes.
    """
    found, every = list[str](), _with_weights(run, model, len(model.names))
    skipped = Skipped(model.skips, model.names)
    for index, (layer, module) in enumerate(zip(model.names, every, strict=True)):
        names, calls = [name for name in model.expert_lists if name.startswith(f"{layer}.")], list[str]()
        note_calls(module, {name: name.removeprefix(f"{layer}.") for name in names}, calls)
        try:
            with torch.no_grad():
                values = as_values(module(*skipped.inputs(index, values)))
                skipped.keep(index, values)
        except Exception:
            break
        if calls != names:
            wanted = " then ".join(names)
            found.append(
                f"model: {layer} calls experts in a forward in the order {' then '.join(calls) or 'none at all'}, and "
                f"expert actors wait for {wanted}: call run_experts once for each list, in the order of "
                "registration, or set mesh.expert_actors to 0 and mesh.ep to its number"
            )
    return found


def layer_faults(run: Run, skeleton: Skeleton, num_stages: int = 1) -> list[str]:
    """Return why the layers can't compute the loss of the first batch, if that shows in the shapes.

    Only shapes and dtypes are looked at, in fp32 and on CPUs; with expert actors, also how layers call their experts.
    What can't be tried is no fault: the actors will see. Copies of the layers are called, and the loss itself.

    Args:
        run: The run, checked, with a model and data that no actor gets.
        skeleton: The model without weights, which stays as it is.
        num_stages: Number of stages.
    """
    if not isinstance(run.model, Layers) or run.precision.compute != "fp32" or not may_call(run, skeleton):
        return []
    with unnoticed(), tried_as(run) as replicas:
        try:
            source = batch_source(run.data, run.model, run.micro_batch_size, run.microbatches, run.mesh.dp, run.seed)
            inputs, target = source.inputs("train", 0, 0, 0), source.targets("train", 0, 0, 0)
        except Exception:  # its files may be where only the actors are
            return []
        if not _elements(inputs):
            return [f"data.fn gives no samples in its first batch, inputs of {_shapes(inputs)}: give one at least"]
        try:
            tried = skeleton.copy()
            with torch.no_grad(), noticed_questions() as asked:
                last, size = _suspected(tried, _on_meta(inputs), _on_meta(target))
        except SkipError as error:
            return [f"model: {error}"]
        if asked and run.mesh.ways("dp") > 1:
            return [*dict.fromkeys(asked)]
        if replicas.latest and isinstance(replicas, RefusedReplicas):
            return [f"model: its layers or its loss use rp.replicas, and {run.replica_fault}"]
        takes_shapes = last in (None, len(skeleton.model.skeleton))
        if last is None and size <= _MOST_COMPUTED:
            last = len(skeleton.model.skeleton)  # shapes alone do not show whether targets fit the loss
        wrong = [] if last is None or size > _MOST_TRIED else _computed(run, skeleton.model, last, inputs, target)
        if not wrong and num_stages > 1:
            parts = skeleton.model.stages(run.split, num_stages)
            wrong = graph_faults(tried.model, parts, _on_meta(inputs), _on_meta(target))
        few = sum(_elements(layer.parameters()) for layer in skeleton.model.skeleton) + size <= _MOST_TRIED
        if not wrong and takes_shapes and run.model.plan and run.mesh.tensor_ranks > 1:
            ways, skips = run.mesh.tensor_ranks, skeleton.model.skips
            wrong = plan_misfits(run.model.plan, tried.layers, ways, _on_meta(inputs), skips)
        return wrong if wrong or not run.mesh.expert_actors or not few else call_faults(run, skeleton.model, inputs)


def _suspected(skeleton: Skeleton, values: Values, target: Values) -> tuple[int | None, int]:
    """Call one layer after the other, and then the loss, with tensors that have only shapes.

    Returns:
        The layer that raised an error, as many as there are layers for the loss, None if nothing did; and the elements
        of all weights and values until then.
    """
    layers, skipped = skeleton.model.skeleton, Skipped(skeleton.model.skips, skeleton.model.names)
    size = _elements((*values, *target))
    for index, layer in enumerate(layers):
        size += _elements(layer.parameters())
        try:
            values = as_values(layer(*skipped.inputs(index, values)))
            skipped.keep(index, values)
        except SkipError:
            raise
        except Exception:
            return index, size
        if not all(value.is_meta for value in values):
            return None, size
        size += _elements(values)
    try:
        skeleton.model.loss(values, target)
    except Exception:
        return len(layers), size
    return None, size


def _computed(run: Run, model: Model, last: int, values: Values, target: Values) -> list[str]:
    """Compute the first batch with weights, up to a layer or the loss; return the error that shows a misfit."""
    giver = "data.fn gives" if isinstance(run.data, Batches) else "the text gives"
    what = "model.fn"
    taken = ""
    met = Values()
    skipped = Skipped(model.skips, model.names)
    try:
        made = _with_weights(run, model, min(last + 1, len(model.names)))
        for index, (name, layer) in enumerate(zip(model.names, made, strict=False)):
            values = skipped.inputs(index, values)
            what, taken, met = f"model: {name}", f"what {giver}, {_shapes(values)}", (*layer.parameters(),)
            output, giver = layer(*values), f"{name} makes"
            try:
                values = as_values(output, name)
                skipped.keep(index, values)
            except TypeError as error:
                return [f"model: {error}"]
        if last == len(model.names):
            both = f"{_shapes(values)}, and the targets, {_shapes(target)}"
            what, taken, met = "model.loss", f"what {giver}, {both}", target
            loss = model.loss(values, target)
            if any(value.requires_grad for value in values) and not loss.requires_grad:
                return [_NO_GRADIENT]
    except MaskError as error:
        return [f"{what}: {_spelled(error)}"]
    except TypeError as error:
        of_forward = "positional argument" in str(error) and "forward() " in str(error)
        return [f"{what} can't take {taken}: {first_line(error)}{_EACH}"] if of_forward else []
    except (RuntimeError, ValueError, IndexError) as error:
        if re.search(OUTSIDE_THE_GRAPH, str(error)):
            return [
                f"{what} takes a derivative by a tensor that its output was not made of: {_spelled(error)}{_OWN_INPUTS}"
            ]
        of_dtypes = _OF_DTYPES.search(str(error))
        if type(error) in (RuntimeError, ValueError, IndexError) and (of_dtypes or _OF_SHAPES.search(str(error))):
            fix = _cast(values, met, what) if of_dtypes else _fix(str(error))
            return [f"{what} can't take {taken}: {_spelled(error)}{fix}"]
    except Exception:  # the user's own, or not of shapes: the actors report it
        return []
    return []


def _cast(values: Values, met: Values, what: str) -> str:
    """Say what to cast, where dtypes do not fit."""
    if what == "model.loss":
        return "; cast the targets: classes are int64, with .long()"
    return f"; {_dtypes(values)} meets {_dtypes(met)}: cast one of them"


def _fix(message: str) -> str:
    """Return the fix for targets that do not fit the outputs in number or in value; "" for others."""
    if "index out of range" in message:
        return " Ids count from 0: give the embedding a row for each."
    if "out of bounds" in message:
        return " Classes count from 0, so give fewer, or a last layer of more outputs."
    return " Give a target for each sample." if "batch_size" in message else ""


def _spelled(error: Exception) -> str:
    """Return what an error says, with the user's line."""
    theirs = [frame for frame in extract_tb(error.__traceback__) if not is_ours(frame.filename)]
    line = theirs[-1] if theirs else made_at(error)
    return first_line(error) + (f" ({line.filename}, line {line.lineno})" if line is not None else "")


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def _on_meta(values: Values) -> Values:
    return tuple(value.to("meta") for value in values)


def _dtypes(values: Values) -> str:
    return " and ".join(dict.fromkeys(str(value.dtype).removeprefix("torch.") for value in values))


def _shapes(values: tuple[Tensor, ...]) -> str:
    return " and ".join(str(tuple(value.shape)) for value in values)
