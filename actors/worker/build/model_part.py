"""One actor's part of a model: its stages, its parameters, and who updates them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn

from raypar.actors.collective.group import Groups
from raypar.actors.data_parallel.cut_layout import ReplicaCut
from raypar.actors.data_parallel.owners import Owners
from raypar.actors.data_parallel.replica_checks import digest
from raypar.actors.data_parallel.stage_weights import StageWeights
from raypar.actors.data_parallel.units import digests_of
from raypar.actors.expert_parallel.record import Routed, RouterRecord
from raypar.actors.inspect.overflow import OverflowWatch
from raypar.actors.machine.high_water import HighWater
from raypar.actors.machine.offload_storage import OffloadStorage
from raypar.actors.models.base import Model
from raypar.actors.models.tied_weights import Ends
from raypar.actors.optim.masters import Masters
from raypar.actors.pipeline.stage import Stage
from raypar.actors.sharding import Shard, Sharding


@dataclass(frozen=True)
class ModelPart:
    """One actor's part of the model.

    Attributes:
        model: The model.
        stages: The actor's stages by number.
        parameters: Trainable parameters by logical name; a tied weight of several layers here is listed once.
        masters: The weights that this actor updates.
        owners: Who updates each parameter of the model.
        cuts: How replicas divide the elements of parameters, by logical name; those that are not divided are missing.
        parts: The spans that this actor updates of these parameters, in the parameters as the actor holds them.
        ties: Ties between pipeline ranks; their ranks are those of who updates the ends, in the group of all updaters.
        shards: This actor's part of each sharded parameter, by logical name.
        partial: Groups over which a parameter's gradient is partial, by logical name: see Parallelizer.
        outputs: Sharding of the outputs of layers and of some modules in them, by logical name.
        weights: The sharded weights of each stage, by its number; empty if weights are not sharded.
        layer_shards: The actor's shards of these weights, by logical name.
        overflow: Counts overflow in the stages; None if the run does not watch it.
        gathered: The bytes of gathered weights; None if weights are not sharded.
        record: The reports of the stages' routers about a training step.
        gathers: Whether other actors have shards too.
        first_learning: The first stage whose backwards compute gradients; the stages before it are frozen.
    """

    model: Model
    stages: dict[int, Stage]
    parameters: dict[str, nn.Parameter]
    masters: Masters
    owners: Owners
    cuts: Mapping[str, ReplicaCut]
    parts: Mapping[str, Shard]
    ties: list[Ends]
    shards: Mapping[str, Shard]
    partial: Mapping[str, Groups]
    outputs: Mapping[str, Sharding]
    weights: Mapping[int, StageWeights]
    layer_shards: Mapping[str, nn.Parameter]
    overflow: OverflowWatch | None
    gathered: HighWater | None
    record: RouterRecord
    gathers: bool
    first_learning: int

    @property
    def storage(self) -> OffloadStorage:
        """Storage of the masters and the optimizer's state, and perhaps of the layers' weights."""
        return self.masters.storage

    @property
    def kept(self) -> Mapping[str, nn.Parameter]:
        """The parameters that the actor always keeps, by logical name: with ZeRO stage 3, those of its shards."""
        if self.gathers:
            return self.masters.parameters
        return self.layer_shards if self.weights else self.parameters

    @property
    def held(self) -> list[nn.Parameter]:
        """The weights that the actor always keeps in the dtype in which layers compute: with ZeRO stage 3, shards."""
        return list((self.layer_shards if self.weights else self.parameters).values())

    @property
    def summed(self) -> Mapping[str, nn.Parameter]:
        """The parameters that have the sums of gradients once these are reduced, by logical name."""
        if self.storage.is_off_device:
            return self.masters.parameters
        whole = {name: parameter for name, parameter in self.parameters.items() if name not in self.cuts}
        return whole | {name: self.masters.parameters[name] for name in self.parts}

    def routers(self) -> Iterator[tuple[int, Routed]]:
        """Yield the routers in the stages, each with the number of its stage."""
        for number, stage in self.stages.items():
            inside = (module for layer in stage.modules for module in layer.modules())
            yield from ((number, module) for module in inside if isinstance(module, Routed))

    def begin(self, step: int, *, train: bool) -> None:
        """Begin a step of a program in the stages, and in what is counted in them."""
        for stage in self.stages.values():
            stage.begin(train=train)
        if self.overflow is not None:
            self.overflow.begin(step, train=train)
        if self.gathered is not None:
            self.gathered.begin()

    def digests(self, owner: int) -> list[bytes]:
        """Return digests of the initial values of the parameters with one number of ``owners``."""
        if not self.weights:
            return [digest(self.share(owner))]
        digests = digests_of(unit for weights in self.weights.values() for unit in weights.units)
        return [one for name, one in digests.items() if self.owners.of[name] == owner]

    def share(self, owner: int) -> dict[str, nn.Parameter]:
        """Return the parameters with one number of ``owners``, by logical name."""
        return {name: p for name, p in self.parameters.items() if self.owners.of[name] == owner}

    def fixed(self) -> dict[str, Tensor]:
        """Return the tensors that no optimizer changes, by logical name: frozen parameters, and buffers."""
        return {
            f"{self.model.names[index]}.{inner}": tensor
            for stage in self.stages.values()
            for index, module in zip(stage.layers, stage.modules, strict=True)
            for inner, tensor in chain(module.named_parameters(), module.named_buffers())
            if not tensor.requires_grad
        }

    def fixed_apart(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of ``fixed`` in two: those of all replicas, and those of experts that replicas divide."""
        dense, experts = dict[str, Tensor](), dict[str, Tensor]()
        for name, tensor in self.fixed().items():
            (experts if name in self.owners.experts else dense)[name] = tensor
        return dense, experts
