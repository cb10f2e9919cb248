"""One pipeline stage: its layers, their forwards and backwards, and the tensors that are saved in between.

The first passes are checked, buffers are restored after a step that is not taken, and the cause of a failed backward is
found: the layer, and the line of the user's code whose gradient failed.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import FunctionType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from raypar.actors.autograd.backward import GraphEnd
from raypar.actors.autograd.forward_state import NOTHING_BEFORE, ForwardState, FrozenWrites, Then, submodules
from raypar.actors.autograd.recompute import InPlaceGuard, LayerAgain, SelectiveRecompute
from raypar.actors.collective.errors import GroupError
from raypar.actors.collective.replicas import ReplicaMembers, enter
from raypar.actors.data_parallel.stage_weights import StageWeights
from raypar.actors.errors import is_ours
from raypar.actors.expert_parallel.record import Routed, RouterRecord
from raypar.actors.inspect.overflow import OverflowWatch
from raypar.actors.inspect.recording import Listener
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.models.base import Model
from raypar.actors.models.init.cast import cast_gradients, own_first_gradients
from raypar.actors.models.init.meta_guard import NO_VALUES, MetaGuard
from raypar.actors.models.skip_connections import Skipped
from raypar.actors.pipeline.offloaded_activations import OffloadedActivations
from raypar.actors.pipeline.stage_ends import StageEnds
from raypar.actors.pipeline.weight_grad import DeferredGradients, Linears
from raypar.actors.rng import derive
from raypar.actors.specs.recompute import Recompute, word_of
from raypar.actors.specs.types import ProgramName
from raypar.actors.tensors import Values, as_values

_Key = tuple[int, int]  # the step and the number of a microbatch
Work = Literal["train", "eval", "backward"]
_FRAME = re.compile(
    r'^  File "(?P<file>.+)", line (?P<line>\d+), in (?P<name>.+)\n(?:    (?P<code>.+)\n)?', re.MULTILINE
)


def called_as(name: str, module: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with this name that calls a layer, so that the name appears in tracebacks."""

    def call(*values: Any) -> Any:
        return module(*values)

    return FunctionType(call.__code__.replace(co_name=name), globals(), name, None, call.__closure__)


def forward_of_fault(again: Callable[[], object], names: Sequence[str]) -> str:
    """Repeat a forward and its failing backward, and return the line and the layer at which the backward fails.

    Args:
        again: Repeats them. It calls the layers by functions that ``called_as`` returned.
        names: The names of these functions.

    Returns:
        Such as "(in layers.1, in the backward of model.py:17: y = x.exp())"; "" if it is unknown.
    """
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True, check_nan=False):
        warnings.simplefilter("always")
        with suppress(Exception):  # the fault itself, or one that only anomaly mode finds
            again()
    texts = [str(one.message) for one in caught if "Traceback of forward call" in str(one.message)]
    frames = list(_FRAME.finditer(texts[0])) if texts else []
    entry = next((at for at in range(len(frames) - 1, -1, -1) if _enters(frames[at], names)), len(frames))
    layer = frames[entry]["name"] if entry < len(frames) and frames[entry]["name"] in names else None
    inside = [frame for frame in frames[entry + 1 :] if not is_ours(frame["file"])]
    line = inside[-1] if inside else None  # of the user's code; a layer of torch has none
    where = [] if layer is None else [f"in {layer}"]
    if line is not None:
        where.append(f"in the backward of {Path(line['file']).name}:{line['line']}: {line['code'] or line['name']}")
    return f"({', '.join(where)})" if where else ""


def _enters(frame: re.Match[str], names: Sequence[str]) -> bool:
    """Return whether a frame of a traceback calls a layer or the loss."""
    return frame["name"] in (*names, "loss") and is_ours(frame["file"])


class StepBuffers:
    """Restores buffers, and frozen parameters that forwards change, to their values before a step that is not taken.

    Or to those before forwards that are repeated.

    Args:
        state: The buffers and parameters.
    """

    def __init__(self, state: ForwardState) -> None:
        self._state = state
        self._before = self._noted = NOTHING_BEFORE  # at the step's begin, and at the end of a speculative step

    def begin(self) -> None:
        """Begin a training step."""
        self._before = self._state.before()

    def settle(self, *, taken: bool) -> None:
        """End a training step; if it is not taken, restore the buffers' values before it.

        Args:
            taken: Whether the weights were updated.
        """
        if taken:
            self._state.changed(self._before)
        else:
            self._state.put_back(self._before)

    def speculate(self) -> None:
        """End a training step whose update may turn out to be wrong, while forwards of the next step follow."""
        self._state.changed(self._before)  # buffers that this step was the first to change are saved, too
        self._noted = self._state.before()

    def conclude(self, *, taken: bool, is_right: bool) -> None:
        """Settle a speculative step, and begin the next one.

        Args:
            taken: As in ``settle``.
            is_right: Whether the forwards that followed are valid; else they are repeated.
        """
        self._state.changed(self._before)
        if not is_right:
            self._state.put_back(self._noted if taken else self._before)
        self._before = self._noted if is_right else self._state.before()


@dataclass(eq=False)
class FirstTime:
    """Guards the first forward in training, the first in evaluation and the first backward; checks the first loss.

    Attributes:
        writes: Records writes into frozen parameters.
        is_deferred: Whether the layers were built without values, so that some of their tensors may have none yet.
        weights: The stage's weights, if they are sharded over replicas; else None.
        check_loss: Called with the first loss; raises ValueError if it is computed from only a part of the last layer's
            outputs. None if there is nothing to check.
    """

    writes: FrozenWrites
    is_deferred: bool
    weights: StageWeights | None
    check_loss: Callable[[Tensor], None] | None
    _left: set[Work] = field(default_factory=lambda: {"train", "eval", "backward"})
    _has_loss: bool = False

    @contextmanager
    def guarded(self, what: Work) -> Iterator[None]:
        """Guard the first pass of a kind against meta tensors and unusual uses of sharded weights.

        In the first forward in training, also record which frozen parameters it writes into.
        """
        is_first = what in self._left
        self._left.discard(what)
        with (
            MetaGuard() if is_first and self.is_deferred else nullcontext(),
            self.weights.guarded() if is_first and self.weights is not None else nullcontext(),
            self.writes if is_first and what == "train" and self.writes.is_needed else nullcontext(),
        ):
            yield

    def check(self, loss: Tensor, *, learns: Callable[[], bool]) -> None:
        """Check the first loss of a training step.

        Args:
            loss: The loss.
            learns: Returns whether it must have a gradient, because an input or a weight of the stage needs one.

        Raises:
            ValueError: It has no gradient, or is computed from only a part of the outputs.
        """
        if self._has_loss:
            return
        if learns() and not loss.requires_grad:
            raise ValueError(
                "the loss has no gradient: compute it from the last layer's output, without detach or no_grad"
            )
        if self.check_loss is not None:
            self.check_loss(loss)
        self._has_loss = True


@dataclass(eq=False)
class Stage:
    """Consecutive layers of a model on one actor.

    Microbatches are numbered over the whole step and all replicas. Dropout and other randomness is seeded by (seed,
    step, microbatch, layer), so it does not depend on the layout, on the order of microbatches, or on recomputation.

    Attributes:
        model: The model.
        layers: Indices of the stage's layers in the model.
        modules: The layers, in the same order; linear layers in them may be replaced.
        device: The device of the modules and of their inputs.
        is_last: Whether the stage ends in the loss.
        learns: Whether it has backwards; False if all its parameters and those of the stages before it are frozen.
        recompute: "full" keeps only the inputs of a microbatch, and runs its whole forward again before its backward
            (GPipe: Huang et al. 2019, section 2.3). Otherwise it is one word for all layers of the model's body, or a
            word for each. A "full" layer keeps its inputs. A "selective" layer keeps everything except what its
            attention core computes, and of gathered inputs only its own part (Korthikanti et al. 2022, sections 4.2.2
            and 5).
        seed: The run's seed.
        halved: Microbatches whose backward is split: ``backward_input`` leaves gradients of weights to
            ``backward_weight``, which costs a little time.
        shared: Parameters that several modules on this actor share.
        weights: The stage's weights, if they are sharded over replicas and whole only while they are used; else None.
        is_half: Whether the layers compute in half precision. Their loss is computed in fp32 then.
        overflow: Counts overflow in the outputs of the layers; None if nothing is counted.
        check_loss: Called with the first loss; raises ValueError if the loss is computed from only a part of the last
            layer's outputs.
        record: Collects the reports of routers about a training step.
        is_alone: Whether its layers do not communicate. Then a forward may be repeated to find a fault.
        replicas: The replicas of the stage, for layers and losses that use ``rp.replicas``; None if there is one.
        step_buffers: The buffers of the modules, over a training step.
        ends: Divides the inputs and outputs of forwards and backwards, in which tensors of skips come last.
        listener: Observer of the forwards and backwards of the open step, or None.
        host: The tensors that its graphs save, if some are moved to host memory; else None.
        is_captured: Whether layers compute in the memory of CUDA graphs, which later replays use again. Then outputs
            and gradients of the stage are copies.
    """

    model: Model
    layers: Sequence[int]
    modules: Sequence[nn.Module]
    device: ComputeDevice
    ends: StageEnds
    is_last: bool
    recompute: Recompute
    seed: int
    halved: Container[int] = ()
    shared: Container[Tensor] = ()
    weights: StageWeights | None = None
    is_half: bool = False
    overflow: OverflowWatch | None = None
    check_loss: Callable[[Tensor], None] | None = None
    record: RouterRecord = field(default_factory=RouterRecord)
    learns: bool = True
    is_alone: bool = False
    replicas: ReplicaMembers | None = None
    listener: Listener | None = None
    host: OffloadedActivations | None = None
    is_captured: bool = False

    def __post_init__(self) -> None:
        modules = dict(zip(self.layers, self.modules, strict=True))
        words = {index: word_of(self.recompute, self.model.body, index) for index in self.layers}
        self._runs_again = self.recompute == "full"
        self._writes = FrozenWrites(self.modules)
        again = {index: modules[index] for index in self.layers if words[index] == "full" and not self._runs_again}
        self._again = {index: LayerAgain(module, self._writes) for index, module in again.items()}
        for index, module in modules.items():
            for inner, part in module.named_modules(prefix=self.model.names[index]):
                if isinstance(part, SelectiveRecompute):
                    part.recomputes = words[index] == "selective"
                if isinstance(part, Routed):
                    part.record, part.name = self.record, inner
        whole = [*again.values()] if self.model.halves else self.modules
        self._linears = Linears(self.modules, whole=whole, shared=self.shared)
        if self.halved:
            self._linears.take_over()
        # Hooks of weights that come and go, or of what is counted, are called once a backward: these have no halves.
        is_plain = self.recompute == "none" and self.weights is None and self.overflow is None
        leaves = bool(self.halved) and is_plain and self.model.others_halve
        self._later = _worth_leaving(self.modules, self._linears.others(self.shared)) if leaves else ()
        self.modules = self._linears.modules
        self._deferred: dict[_Key, DeferredGradients] = {}  # gradients that are left for backward_weight
        self._train, self._has_mode = True, False  # whether the modules were set to that mode
        self._twice = InPlaceGuard()  # copies the stage's inputs if the first layer writes into them
        self._changing = ForwardState(*self.modules, writes=self._writes)
        self.step_buffers = StepBuffers(self._changing)
        # Inputs, graph, buffers, target. With "full" recomputation there is no graph yet, else no buffers.
        self._saved: dict[_Key, tuple[Values, GraphEnd | None, Then, Values]] = {}
        self._first_time = FirstTime(self._writes, self.model.is_deferred, self.weights, self.check_loss)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """The microbatches whose forward is done and whose backward is not complete."""
        return tuple(microbatch for _, microbatch in (*self._saved, *self._deferred))

    def make_gradients_in(self, memory: Mapping[Tensor, Callable[[], Tensor]]) -> None:
        """Let the first backward of each step write gradients directly into given tensors, where that saves a copy.

        Args:
            memory: For each parameter, a function that returns the tensor for its gradient.
        """
        self._linears.make_in(memory)
        self.modules = self._linears.modules

    def begin_round(self) -> None:
        """Begin a round of reductions: the next gradients are first ones again."""
        self._linears.begin()

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the layers' ``state_dict``, with its logical name."""
        for layer, module in self._named():
            yield from ((f"{layer}.{name}", value) for name, value in module.state_dict().items())

    def parameters(self) -> dict[str, nn.Parameter]:
        """Return the trainable parameters by logical name."""
        return {name: parameter for name, parameter in self._parameters() if parameter.requires_grad}

    def frozen(self) -> dict[str, nn.Parameter]:
        """Return the frozen parameters by logical name."""
        return {name: parameter for name, parameter in self._parameters() if not parameter.requires_grad}

    def buffers(self) -> dict[str, Tensor]:
        """Return the tensors that forwards change, by logical name.

        These are persistent buffers, such as the running statistics of a BatchNorm, and frozen parameters that forwards
        have written into.
        """
        moved = self._changing.moved()
        return {
            f"{layer}.{inner}": buffer
            for layer, module, stored in ((layer, module, module.state_dict()) for layer, module in self._named())
            for inner, buffer in module.named_buffers()
            if inner in stored
        } | {name: parameter for name, parameter in self.frozen().items() if id(parameter) in moved}

    def load_buffer(self, buffer: Tensor, saved: Tensor) -> None:
        """Set a buffer, or a frozen parameter, which is one of ``buffers`` from now on."""
        self._changing.note_moved(buffer)
        buffer.copy_(saved)

    def _named(self) -> Iterator[tuple[str, nn.Module]]:
        return zip([self.model.names[index] for index in self.layers], self.modules, strict=True)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for layer, module in self._named():
            yield from ((f"{layer}.{inner}", parameter) for inner, parameter in module.named_parameters())

    def begin(self, *, train: bool) -> None:
        """Open a step, and drop the state of an interrupted one.

        Args:
            train: Whether it is a training step; else an evaluation, which keeps nothing for a backward.
        """
        self._saved.clear()
        self._deferred.clear()
        self._linears.begin()
        self.listener = None
        if self.host is not None:
            self.host.begin()
        if self.model.slices is not None:
            self.model.slices.begin()
        if train or self._train:  # nothing changes between two evaluations; each token of a generation is one
            is_set = self._has_mode and train == self._train  # an own ``train`` may keep parts in another mode
            for module in self.modules:
                if not is_set or any(part.training != train for part in submodules([module])):
                    module.train(train)
        self._train, self._has_mode = train, True
        if train:
            self._writes.first.clear()
            self.step_buffers.begin()

    def forward(self, step: int, microbatch: int, inputs: Values, target: Values) -> Values:
        """Compute the forward of a microbatch; in training, keep what its backward needs.

        Args:
            step: The step.
            microbatch: Number of the microbatch in the whole step.
            inputs: The outputs of the previous stage; for the first stage, the data.
            target: The targets of the microbatch, if any count; only the last stage uses them.

        Returns:
            The outputs, detached; from the last stage the loss, a scalar, and metrics (see ``Model.figures``).

        Raises:
            ValueError: It is the first loss, and it has no gradient or is computed from only a part of the outputs.
        """
        if self.listener is not None:
            return self.listener.forward(self._forward, step, microbatch, inputs, target)
        return self._forward(step, microbatch, inputs, target)

    @torch.no_grad()
    def infer(self, inputs: Values, *, head: bool = True) -> Values:
        """Compute the outputs of the layers without a loss, between ``begin(train=False)`` and the next step.

        Args:
            inputs: The outputs of the previous stage; for the first stage, the data.
            head: Whether to compute the last layer of the last stage.
        """
        if self.weights is not None:
            self.weights.start("forward")
        return self._own(self._apply(0, 0, None, *inputs, head=head))

    def backward(self, step: int, microbatch: int, gradients: Values) -> Values:
        """Compute the backward of a microbatch, and add the gradients of parameters to their ``grad``.

        Args:
            step: The step.
            microbatch: Number of the microbatch in the whole step.
            gradients: The gradient of each floating-point output; for the last stage the weight of its loss, a scalar.

        Returns:
            The gradient of each floating-point input; nothing if the inputs need none, as in the first stage.
        """
        if self.listener is not None:
            return self.listener.backward(self._backward, step, microbatch, gradients)
        return self._backward(step, microbatch, gradients)

    def backward_input(self, step: int, microbatch: int, gradients: Values) -> Values:
        """Compute the first half of ``backward``: the gradients of the inputs, and of some parameters.

        The gradients of the other parameters are left for ``backward_weight``. With a listener, which observes whole
        backwards, nothing is left. Arguments and return value are those of ``backward``.
        """
        if self.listener is not None:
            return self.backward(step, microbatch, gradients)
        return self._backward_input(step, microbatch, gradients)

    def deferred(self, step: int, microbatch: int) -> frozenset[Tensor]:
        """Return the parameters whose gradients of this microbatch are left for ``backward_weight``."""
        key = step, microbatch
        return self._deferred[key].parameters if key in self._deferred else frozenset()

    def backward_weight(self, step: int, microbatch: int) -> None:
        """Compute the second half of ``backward``: the gradients that ``backward_input`` left for later."""
        if (step, microbatch) in self._deferred:
            self._deferred.pop((step, microbatch)).compute(self._linears.memory)
            self._cast_gradients()

    def _forward(self, step: int, microbatch: int, inputs: Values, target: Values) -> Values:
        if self.weights is not None:
            self.weights.start("forward")
        if not self._train:
            with torch.no_grad():
                return self._own(self._apply(step, microbatch, target, *inputs))
        self.record.open(microbatch)
        if not self.learns:
            return self._own(value.detach() for value in self._apply(step, microbatch, target, *inputs))
        if self._runs_again:
            forward = partial(self._apply, step, microbatch, target)
            with torch.no_grad():
                outputs, then = self._changing.keep(partial(self._twice, forward, inputs))
            self._saved[step, microbatch] = (inputs, None, then, target)
            return self._own(outputs)
        inputs, outputs = self._with_history(step, microbatch, inputs, target)
        self._saved[step, microbatch] = (inputs, self.ends.tail(outputs), {}, target)
        return self._own(value.detach() for value in outputs)

    def _backward(self, step: int, microbatch: int, gradients: Values) -> Values:
        found = self._backward_input(step, microbatch, gradients)
        self.backward_weight(step, microbatch)
        return found

    def _backward_input(self, step: int, microbatch: int, gradients: Values) -> Values:
        self.record.close()  # a recomputation reports nothing new
        if not self.learns:
            return ()
        inputs, tail, then, target = self._saved.pop((step, microbatch))
        if self.weights is not None:
            self.weights.start("both" if self._runs_again else "backward")
        if self._runs_again:
            with self._changing.as_then(then):
                inputs, outputs = self._with_history(step, microbatch, inputs, target)
            tail = self.ends.tail(outputs)
            del outputs
        if tail is not None:
            try:
                gradients_kept = own_first_gradients(self.parameters().values()) if self.is_captured else nullcontext()
                with self._linears.postponed() as deferred, self._first_time.guarded("backward"), gradients_kept:
                    self._deferred[step, microbatch] = deferred
                    ordered = self.ends.in_order(gradients)
                    if self._later and microbatch in self.halved and self.listener is None:
                        deferred.others = tail.backward_input(ordered, self._later)
                    else:
                        tail.backward(ordered)
                self._cast_gradients()
            except Exception as error:
                exchanges = self.replicas is not None and self.replicas.latest
                if self.is_alone and not exchanges and not isinstance(error, GroupError):
                    again = partial(self._once_more, step, microbatch, inputs, target, gradients)
                    if where := forward_of_fault(again, self.model.names):
                        error.add_note(where)
                raise
        wanted = (value for value in inputs if value.requires_grad)
        return self._own(torch.zeros_like(value) if value.grad is None else value.grad for value in wanted)

    def _own(self, values: Iterable[Tensor]) -> Values:
        """Return values that stay as they are while layers compute the next microbatches."""
        return tuple(value.clone() for value in values) if self.is_captured else tuple(values)

    def _cast_gradients(self) -> None:
        """Cast gradients that are the first ones of their parameters: layer by layer, which frees those in half."""
        for parameters in self._uncast:
            cast_gradients(parameters)

    @cached_property
    def _uncast(self) -> list[list[nn.Parameter]]:
        """The parameters of each layer whose gradients a backward does not cast."""
        layers = ([one for one in module.parameters() if one.grad_dtype is None] for module in self.modules)
        return [layer for layer in layers if layer]

    def _once_more(self, step: int, microbatch: int, inputs: Values, target: Values, gradients: Values) -> None:
        """Repeat a forward and its failing backward; layers are called under their names."""
        modules, names = self.modules, [self.model.names[index] for index in self.layers]
        self.modules = tuple(map(called_as, names, modules))  # type: ignore[arg-type]
        try:
            _, outputs = self._with_history(step, microbatch, inputs, target)
            if (tail := self.ends.tail(outputs)) is not None:
                tail.backward(self.ends.in_order(gradients))
        finally:
            self.modules = modules

    def _with_history(self, step: int, microbatch: int, inputs: Values, target: Values) -> tuple[Values, Values]:
        """Run the forward of a microbatch and record its graph.

        Returns:
            The inputs as leaves of the graph, and the outputs.
        """
        self._linears.halve(microbatch in self.halved)
        wanted = self.ends.wanted(inputs)
        leaves = tuple([value.detach().requires_grad_(is_so) for value, is_so in zip(inputs, wanted, strict=True)])
        host = self.host
        with nullcontext() if host is None else host.keeping(step, microbatch, leaves, self.modules) as hook:
            self._linears.hook = hook
            outputs = self._twice(partial(self._apply, step, microbatch, target), leaves)
        if self.is_last and target:
            self._first_time.check(outputs[0], learns=lambda: any(wanted) or bool(self.parameters()))
        return leaves, outputs

    def _apply(self, step: int, microbatch: int, target: Values | None, *values: Tensor, head: bool = True) -> Values:
        """Run the layers, each with its own seed. Returns the outputs, from the last stage the loss and the metrics.

        Args:
            step: The step.
            microbatch: Number of the microbatch in the whole step.
            target: Its targets; None if the values are not those of a batch: documents are unknown then, and no loss is
                computed.
            *values: The inputs.
            head: Whether to run the last layer of the last stage.
        """
        has_batch = target is not None
        values, taken = self.ends.inputs(values)
        skipped = Skipped(self.ends.pairs, self.model.names, self.ends.kept, taken)
        modules = self.modules if head or not self.is_last else self.modules[:-1]
        with self._first_time.guarded("train" if self._train else "eval") if has_batch else nullcontext():
            for number, (index, module) in enumerate(zip(self.layers, modules, strict=False)):
                prepare = partial(self._prepare, step, microbatch, index, target)
                prepare()
                values = skipped.inputs(index, values)
                if self.weights is not None:
                    self.weights.forward(number, values)
                again = self._again.get(index) if torch.is_grad_enabled() else None
                try:
                    outputs = as_values(module(*values)) if again is None else again(values, prepare)
                    if any(value.is_meta for value in outputs):
                        raise ValueError(NO_VALUES)
                except Exception as error:
                    error.add_note(self.model.note(index, error))
                    raise
                values = outputs if self.weights is None else self.weights.watch(number, outputs)
                skipped.keep(index, values)
                if self.overflow is not None:
                    self.overflow.watch(index, microbatch, values)
            values = (*values, *map(skipped.value, self.ends.kept))
            if target is None or not self.is_last:
                return values
            enter(self.replicas, "the loss")
            return self.model.figures(values, target, train=self._train, is_half=self.is_half)

    def _prepare(self, step: int, microbatch: int, layer: int, target: Values | None) -> None:
        """Seed a layer for a microbatch, and select its documents, slice and labels."""
        of_batch = target is not None
        enter(self.replicas if of_batch else None, self.model.names[layer])
        self.device.seed(derive(self.seed, "layer", step, microbatch, layer))
        if self.model.documents is not None:
            program: ProgramName = "train" if self._train else "evaluate"
            self.model.documents.turn_to(program if of_batch else None, step, microbatch)
        if self.model.slices is not None:
            self.model.slices.turn_to(step, microbatch, of_batch=of_batch)
        if self.model.labels is not None:
            self.model.labels.now = target


def _worth_leaving(modules: Iterable[nn.Module], others: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
    """Return the parameters if deferring their gradients is worth keeping a whole graph: if some are matrices.

    The gradients of vectors, as those of norms, take no time; and no gradient waits for that of an embedding.
    """
    tables = {id(part.weight) for module in modules for part in module.modules() if isinstance(part, nn.Embedding)}
    return others if any(p.dim() > 1 and id(p) not in tables for p in others) else ()
