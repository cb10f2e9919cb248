"""Build an actor's part of the model from its plan: stages with weights, and the masters of those that it updates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn

from raypar.actors.collective.group import Group, Groups
from raypar.actors.data_parallel.buckets import share_out
from raypar.actors.data_parallel.high_water import HighWater
from raypar.actors.data_parallel.replica_checks import digest
from raypar.actors.data_parallel.stage_weights import StageWeights
from raypar.actors.data_parallel.units import digests_of
from raypar.actors.device import Place
from raypar.actors.home import DeviceHome, Home, home_of
from raypar.actors.inspect.overflow import OverflowWatch
from raypar.actors.mesh.world import World
from raypar.actors.models.base import Model, unsharded
from raypar.actors.models.build import build_model
from raypar.actors.models.tied_weights import Tie, ties_of
from raypar.actors.optim.masters import Masters
from raypar.actors.pipeline.stage import Stage
from raypar.actors.sharding import Shard, Sharding
from raypar.actors.specs.types import Split, format_watched
from raypar.actors.tensors import nbytes
from raypar.actors.worker.layers import LayerMaker
from raypar.actors.worker.parallelize import Parallelizer, axis_styles
from raypar.actors.worker.plan import Plan
from raypar.schedules.action import Action, Op
from raypar.schedules.schedule import Schedule

_MIB = 2**20


@dataclass(frozen=True)
class Part:
    """One actor's part of the model.

    Attributes:
        model: The model.
        stages: The actor's stages by number.
        parameters: Trainable parameters by logical name; a tied weight whose home is on this rank too is listed once.
        masters: The weights that this actor updates.
        owner_of: Which rank updates each parameter of the model, among the owners (see World) of its pipeline rank.
        ties: Ties between pipeline ranks; their ranks are those of the owners in the group of all updaters.
        shards: This actor's part of each sharded parameter, by logical name.
        partial: Groups over which a parameter's gradient is partial, by logical name: see Parallelizer.
        outputs: Sharding of the outputs of layers and of some modules in them, by logical name.
        weights: If weights are whole only for a while, those of each stage, by its number; else empty.
        layer_shards: What the actor keeps of these weights, by logical name; else empty.
        overflow: Counts overflow in the stages; None if the run does not ask for it.
        gathered: The bytes of weights that are whole for a while; None if all always are.
        gathers: Whether other actors keep shards too.
    """

    model: Model
    stages: dict[int, Stage]
    parameters: dict[str, nn.Parameter]
    masters: Masters
    owner_of: dict[str, int]
    ties: list[Tie]
    shards: Mapping[str, Shard]
    partial: Mapping[str, Groups]
    outputs: Mapping[str, Sharding]
    weights: Mapping[int, StageWeights]
    layer_shards: Mapping[str, nn.Parameter]
    overflow: OverflowWatch | None
    gathered: HighWater | None
    gathers: bool

    @property
    def home(self) -> Home:
        """Where the actor keeps shards, masters and the optimizer's state."""
        return self.masters.home

    @property
    def kept(self) -> Mapping[str, nn.Parameter]:
        """The parameters that the actor always keeps, by logical name: with ZeRO stage 3, those that it owns."""
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
        return self.masters.parameters if self.home.is_apart else self.parameters

    def digests(self, owner: int) -> list[bytes]:
        """Return digests of the initial values of the parameters that one owner updates."""
        if not self.weights:
            return [digest(self.share(owner))]
        made = digests_of(unit for weights in self.weights.values() for unit in weights.units)
        return [one for name, one in made.items() if self.owner_of[name] == owner]

    def share(self, owner: int) -> dict[str, nn.Parameter]:
        """Return the parameters that one owner updates, by logical name."""
        return {name: p for name, p in self.parameters.items() if self.owner_of[name] == owner}

    def fixed(self) -> dict[str, Tensor]:
        """Return the tensors that no optimizer changes, by logical name: frozen parameters, and buffers."""
        return {
            f"{self.model.names[index]}.{inner}": tensor
            for stage in self.stages.values()
            for index, module in zip(stage.layers, stage.modules, strict=True)
            for inner, tensor in chain(module.named_parameters(), module.named_buffers())
            if not tensor.requires_grad
        }


def build_part(plan: Plan, place: Place, groups: Mapping[str, Group], owner: int) -> Part:
    """Build this actor's part of the stages of its pipeline rank.

    Only its weights are made: on the host, in fp32, so that all get the same bits. Then they are moved and cast.

    Args:
        plan: The actor's plan.
        place: The device that it computes on.
        groups: The actor's groups by key.
        owner: Which of the owners of the pipeline rank's weights it is.
    """
    run, world = plan.run, plan.world
    model = build_model(run.model, run.seed)
    axes = axis_styles(run, groups)
    parallelizer = Parallelizer(model, axes)
    train = plan.programs["train"]
    parts = model.stages(run.split, train.num_stages)
    own = train.stages_of(world.pp(plan.rank))
    ties, same = ties_of(model, homes_of(model, run.split, train))
    owner_of = _owner_of(plan, model)
    home = _home(plan, place)
    parallelize = parallelizer.parallelize if axes else unsharded
    layers = LayerMaker(plan, place, home, owner, groups.get("gather"), model, parallelize)
    modules, weights = layers.make({number: parts[number] for number in own}, owner_of, same)
    overflow = overflow_of(plan, model, parallelizer)
    places = Counter(p for module in modules.values() for _, p in module.named_parameters(remove_duplicate=False))
    shared = frozenset(parameter for parameter, count in places.items() if count > 1)
    stages = {
        number: Stage(
            model,
            parts[number],
            [modules[index] for index in parts[number]],
            place=place,
            is_last=number == train.num_stages - 1,
            recompute=run.recompute,
            seed=run.seed,
            halved=_halved(plan)[number],
            shared=shared,
            is_half=run.precision.is_half,
            check_loss=parallelizer.check_loss,
            weights=weights.get(number),
            overflow=overflow,
        )
        for number in own
    }
    parameters = {
        name: parameter
        for stage in stages.values()
        for name, parameter in stage.parameters().items()
        if name not in same
    }
    mine = {name: parameter for name, parameter in parameters.items() if owner_of[name] == owner}
    masters = layers.masters(mine)
    ties = [_between_owners(tie, world, owner_of) for tie in ties]
    sharded = parallelizer.shards, parallelizer.partial, parallelizer.outputs
    return Part(
        model,
        stages,
        parameters,
        masters,
        owner_of,
        ties,
        *sharded,
        weights,
        layers.shards,
        overflow,
        layers.gathered,
        world.gathers,
    )


def _home(plan: Plan, place: Place) -> Home:
    """Return where an actor keeps what it needs only at times."""
    if plan.run.offload == "none":
        return DeviceHome(place.device)
    return home_of(place.device, plan.run.offload_folder, plan.world.label(plan.rank))


def overflow_of(plan: Plan, model: Model, parallelizer: Parallelizer) -> OverflowWatch | None:
    """Create the watch for overflow of an actor whose layers are parallelized; None if the run does not ask for it."""
    if not plan.run.overflow_every:
        return None
    weights = {name: shard.sharding for name, shard in parallelizer.shards.items()}
    addends = {name: tuple(group.rank for group in groups) for name, groups in parallelizer.partial.items()}
    watched = format_watched(plan.run.overflow_format, plan.run.precision.compute)
    return OverflowWatch(plan.run.overflow_every, watched, model.names, parallelizer.outputs, weights, addends)


def _owner_of(plan: Plan, model: Model) -> dict[str, int]:
    """Return which owner of its pipeline rank updates each parameter of the model."""
    sizes = sizes_of(model, plan.run.split, plan.programs["train"]).values()
    return {name: owner for one in sizes for name, owner in share_out(one, plan.world.owners).items()}


def _between_owners(tie: Tie, world: World, owner_of: Mapping[str, int]) -> Tie:
    """Return a tie between pipeline ranks as one between the owners of its ends, in the group of all updaters."""
    home = world.owner_rank(tie.home_rank, owner_of[tie.home])
    return Tie(tie.home, home, tie.copy, world.owner_rank(tie.copy_rank, owner_of[tie.copy]))


def _halved(plan: Plan) -> dict[int, set[int]]:
    """Return the microbatches whose backwards are split, by stage.

    Microbatches are numbered over the whole step and all replicas.
    """
    dp, found = plan.run.mesh.coordinate(plan.rank)["dp"], defaultdict[int, set[int]](set)
    for stage, op, microbatch in plan.programs["train"].rows[plan.world.pp(plan.rank)]:
        if op is Op.I and stage is not None and microbatch is not None:
            found[stage].add(microbatch * plan.run.mesh.dp + dp)
    return found


def ends_of_rounds(row: Sequence[Action]) -> tuple[set[Action], set[Action]]:
    """Return the first and the last backwards (B or W) of each round of reductions in a row.

    A round of a stage ends with its REDUCE_GRAD, or with the row.
    """
    first, last, latest = set[Action](), set[Action](), dict[int, Action]()
    for action in row:
        if action.stage is not None and action.op in (Op.B, Op.W):
            if action.stage not in latest:
                first.add(action)
            latest[action.stage] = action
        elif action.op is Op.REDUCE_GRAD and action.stage in latest:
            last.add(latest.pop(action.stage))
    return first, last | set(latest.values())


def last_backwards(row: Sequence[Action]) -> dict[int, Action]:
    """Return the last backward (B or W) of each stage in a row, in the order of the row.

    If stages of one rank share a weight, it belongs to the first of them. The last backward of that stage depends on
    those of the other stages, so the weight's gradient is complete after it.
    """
    last: dict[int, Action] = {}
    for action in row:
        if action.stage is not None and action.op in (Op.B, Op.W):
            last.pop(action.stage, None)
            last[action.stage] = action
    return last


def homes_of(model: Model, split: Split, schedule: Schedule) -> dict[int, int]:
    """Return the pipeline rank of each layer, by the layer's index.

    Args:
        model: The model.
        split: How its layers are split into stages.
        schedule: The schedule, which places the stages on ranks.
    """
    parts = model.stages(split, schedule.num_stages)
    return {index: schedule.placement[number] for number, part in enumerate(parts) for index in part}


def sizes_of(model: Model, split: Split, schedule: Schedule) -> dict[int, dict[str, int]]:
    """Return the size in bytes of each pipeline rank's trainable parameters, by rank and logical name.

    A tied weight whose home is on the same rank is listed once. The arguments are those of ``homes_of``.
    """
    homes = homes_of(model, split, schedule)
    _, same = ties_of(model, homes)
    sizes: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for index, (layer, module) in enumerate(zip(model.names, model.skeleton, strict=True)):
        for inner, parameter in module.named_parameters():
            name = f"{layer}.{inner}"
            if parameter.requires_grad and name not in same:
                sizes[homes[index]][name] = nbytes(parameter)
    return sizes
