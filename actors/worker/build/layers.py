"""Create the layers of an actor with their weights in the run's precision, perhaps sharded, offloaded or compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from raypar.actors.collective.group import Group
from raypar.actors.data_parallel.cut_layout import ReplicaCut
from raypar.actors.data_parallel.sharder import Sharder
from raypar.actors.data_parallel.stage_weights import StageWeights
from raypar.actors.errors import first_line
from raypar.actors.expert_parallel.token_exchange import ExpertsWithoutTokens, strip
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.machine.high_water import HighWater
from raypar.actors.machine.offload_storage import DeviceStorage, OffloadStorage
from raypar.actors.models.base import Model, Parallelize
from raypar.actors.models.tied_weights import tie_parameters
from raypar.actors.optim.masters import Masters, masters_of
from raypar.actors.sharding import Shard
from raypar.actors.specs.model import Layers
from raypar.actors.worker.build.initial_values import SharedDraws, shared_draws
from raypar.actors.worker.build.plan import ActorPlan

Backend = str | Callable[..., Any]  # of torch's compiler
log = logging.getLogger(__name__)


@dataclass(eq=False)
class LayerMaker:
    """Creates the layers of an actor, and moves their weights into shards if the run shards them.

    Attributes:
        plan: The actor's plan.
        device: The device that it computes on.
        storage: Storage of its masters and optimizer states, and perhaps of its weights.
        groups: The actor's groups by key; with ZeRO stage 3, weights are sharded over some of them.
        model: The model.
        parallelize: Applies the styles of the mesh's axes to a layer.
        cuts: How replicas divide the elements of parameters, by logical name; those that are not divided are missing.
        modules: The layers by index, after ``make``.
        weights: The sharded weights of each stage by number; empty if weights are not sharded.
    """

    plan: ActorPlan
    device: ComputeDevice
    storage: OffloadStorage
    groups: Mapping[str, Group]
    model: Model
    parallelize: Parallelize
    cuts: Mapping[str, ReplicaCut]
    modules: dict[int, nn.Module] = field(default_factory=dict)
    weights: dict[int, StageWeights] = field(default_factory=dict)
    _sharder: Sharder | None = None
    _draws: SharedDraws | None = None

    def make(self, parts: Mapping[int, Sequence[int]], experts: Set[str], same: dict[str, str]) -> None:
        """Create the layers of stages.

        Args:
            parts: The indices of the layers of each stage, by its number.
            experts: Logical names of the experts' parameters, if experts are divided over actors.
            same: For each copy of a tied weight that needs no memory, the parameter whose memory it shares.
        """
        every = [index for part in parts.values() for index in part]
        self._draws = shared_draws(self.plan, self.model, every, self.groups, self.cuts, same)
        if self.plan.world.unshards:
            run = self.plan.run
            self._sharder = Sharder(
                model=self.model,
                make=self._some,
                modules=self.modules,
                same=same,
                experts=experts,
                cuts=self.cuts,
                spans=self._draws.spans,
                groups=self.groups,
                shard_storage=self.storage if run.offload == "parameters" else DeviceStorage(self.device.device),
                master_storage=self.storage,
                layers=run.zero_units,
                precision=run.precision,
                is_own=isinstance(run.model, Layers),
            )
            self.weights = {number: self._sharder.shard(part) for number, part in parts.items()}
        else:
            self._some(every)
        tie_parameters(self.model, self.modules, same)

    def parts(self, parameters: Mapping[str, nn.Parameter]) -> Mapping[str, Shard]:
        """Return the spans that this actor updates of parameters, in the parameters as the actor holds them.

        Args:
            parameters: The actor's parameters by logical name.

        Returns:
            The spans by logical name; parameters without a span on this actor are missing.
        """
        if self._sharder is not None:
            return self._sharder.parts
        divided = ((name, self.cuts[name].shard(p)) for name, p in parameters.items() if name in self.cuts)
        return {name: part for name, part in divided if part is not None}

    def masters(self, mine: Mapping[str, nn.Parameter], parts: Mapping[str, Shard]) -> Masters:
        """Return the masters of the parameters that this actor updates, and cast the layers.

        Args:
            mine: The parameters by logical name.
            parts: The spans of those of which the actor updates a part, in the parameters as the actor holds them.
        """
        if self._sharder is not None:
            return Masters(self.storage, mine, self._sharder.masters, self._sharder.updated, parts)
        return masters_of(self.plan.run.precision, self.storage, self.modules.values(), mine, parts)

    @property
    def shards(self) -> Mapping[str, nn.Parameter]:
        """This actor's shards of weights, by logical name; empty if weights are not sharded."""
        return {} if self._sharder is None else self._sharder.shards

    @property
    def gathered(self) -> HighWater | None:
        """The bytes of gathered weights; None if weights are not sharded."""
        return None if self._sharder is None else self._sharder.gathered

    def _some(self, indices: Sequence[int]) -> None:
        is_expert, seed = self.plan.world.is_expert(self.plan.rank), self.plan.run.seed
        parallelize = self._stripped if is_expert else self.parallelize
        layers = self.model.materialize(indices, seed, parallelize, self._draws)
        if is_expert:
            layers = [ExpertsWithoutTokens(layer) for layer in layers]
        self.device.settle(layers)
        self.modules.update(zip(indices, layers, strict=True))

    def _stripped(self, name: str, layer: nn.Module) -> Mapping[str, Shard]:
        """Parallelize a layer, and keep only its experts."""
        shards = self.parallelize(name, layer)
        strip(layer)
        return shards


def captures_graphs(plan: ActorPlan, device: ComputeDevice) -> bool:
    """Return whether compiled layers are to be replayed as CUDA graphs; log one line if a run asks in vain.

    A graph reads and writes the same memory whenever it is replayed.
    """
    run = plan.run
    if run.compile != "graphs":
        return False
    if device.kind != "cuda":
        why = "CPUs have no CUDA graphs"
    elif run.zero == 3 or run.offload == "parameters":
        why = "weights come to other memory in every step (zero 3, or offload 'parameters')"
    elif plan.programs["train"].stream:
        why = "weights have versions in other memory (an asynchronous schedule)"
    else:
        return True
    log.warning("compile: 'graphs' captures nothing, as %s; layers are compiled as with True", why)
    return False


def compile_layers(modules: Sequence[nn.Module], backend: Backend = "inductor", *, graphs: bool = False) -> None:
    """Compile layers with torch's compiler, in place. The compiler is imported here, which takes seconds.

    The first call of a layer compiles all layers of its kind: blocks that differ only in their weights share graphs,
    which end where a layer communicates. If that fails, the layer runs uncompiled, and one log line says why.

    Args:
        modules: The layers. Their names and parameters do not change.
        backend: The compiler's backend.
        graphs: Whether the compiler captures what it makes as CUDA graphs, where it can: it logs where it can't. Their
            memory is that of later replays, too, so what leaves a stage has to be copied.
    """
    logged: set[str] = set()
    for module in modules:
        try:
            module.compile(backend=backend, mode="reduce-overhead" if graphs else None)
        except Exception as error:
            _log_once(logged, error)
        else:
            assert module._compiled_call_impl is not None
            module._compiled_call_impl = _CompiledCall(module, module._compiled_call_impl, logged)


class _CompiledCall:
    """A compiled call of a layer, which falls back to the uncompiled call if it fails.

    Args:
        module: The layer.
        compiled: Its compiled call.
        logged: The failures that this actor has logged.
    """

    def __init__(self, module: nn.Module, compiled: Callable[..., Any], logged: set[str]) -> None:
        self._module, self._compiled, self._logged = module, compiled, logged

    def __call__(self, *args: Any, **named: Any) -> Any:
        try:
            return self._compiled(*args, **named)
        except Exception as error:
            out = self._module._call_impl(*args, **named)  # raises the layer's own error, if it is one
            self._module._compiled_call_impl = None
            _log_once(self._logged, error)
            return out


def _log_once(logged: set[str], error: Exception) -> None:
    """Log a failure of the compiler, unless it is in ``logged``."""
    if (why := f"{type(error).__name__}: {first_line(error)}") not in logged:
        logged.add(why)
        log.warning("compile: layers are computed without torch's compiler, which failed (%s)", why)
