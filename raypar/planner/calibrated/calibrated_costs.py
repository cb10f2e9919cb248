"""The durations of a training step's actions on a machine that was calibrated.

The seconds of a stage's forward are those of its products and attention at their shapes, of the messages inside of
layers, and of what blocks and an action take in addition. A backward has two products for each, and recomputation.
Actors that compute at once take longer: on CPUs they share the memory, and the cores if these are fewer.

Counted are the sums of tensor parallelism, the keys and values of context parallelism and the rows of experts, each as
an operation of the measured group of nearest size. Further costs of an axis were measured on short runs with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from raypar.actors.mesh.world import World
from raypar.actors.models.partition import split_layers, transformer_costs
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.recompute import word_of
from raypar.actors.specs.run import Run
from raypar.planner.assumed_rates import Rates
from raypar.planner.calibrated.calibration import Calibration, Kind
from raypar.planner.cost_model import seconds_after_update, seconds_of_run
from raypar.planner.memory.activations import loss_slice
from raypar.planner.memory.worker import element_bytes
from raypar.planner.sizes.sized_run import SizedRun
from raypar.schedules.action import COMPUTE, SENDS, Action, Op
from raypar.schedules.float_sum import float_sum
from raypar.schedules.rules import MAKES_GRADIENTS
from raypar.schedules.schedule import Schedule
from raypar.schedules.simulation.simulate import Costs, simulate
from raypar.schedules.timeline import Event, Timeline

_ON_CORES = COMPUTE | SENDS  # actions for which an actor needs a core; all actors STEP at once
_ROUNDS = 4  # of simulations that find how many actors compute at once, each with the durations of the one before


@dataclass(frozen=True)
class MicrobatchSeconds:
    """The seconds of products for a microbatch.

    Attributes:
        forward: Seconds of its forward.
        backward: Seconds of its backward.
        core: The part of the forward that a selective recomputation runs again.
        later: The part of the backward that can be left for W.
    """

    forward: float = 0.0
    backward: float = 0.0
    core: float = 0.0
    later: float = 0.0


def block_products(
    run: Run, model: Transformer, block: int, calibration: Calibration, tp: int = 1
) -> MicrobatchSeconds:
    """Return the seconds of a block's products and attention for a microbatch.

    Args:
        run: The run.
        model: Its model.
        block: Index of the block.
        calibration: The measured products.
        tp: Number of tensor ranks that divide the block.
    """
    rows, hidden, width = _num_tokens(run, model), model.hidden, model.heads * model.head_size
    keys = model.num_kv_heads * model.head_size
    shapes = [(rows, hidden, (width + 2 * keys) / tp), (rows, width / tp, hidden)]
    experts, moe = model.num_experts(block), model.moe
    if moe is not None and experts:
        local = experts / run.mesh.ep
        share = rows * moe.top_k * run.mesh.ep / experts
        shapes += [(rows, hidden, experts)]
        shapes += int(local) * _mlp(model, share, hidden, model.expert_width / tp)
    else:
        shapes += _mlp(model, rows, hidden, model.mlp_width / tp)
    each = [calibration.product(*shape) for shape in shapes]
    queries = model.seq / run.mesh.cp
    core = calibration.core(model.seq, run.micro_batch_size * model.heads / tp, model.head_size)
    core = core[0] * queries / model.seq, core[1] * queries / model.seq
    forward, backward = float_sum(one for one, _ in each), float_sum(two for _, two in each)
    return MicrobatchSeconds(forward + core[0], backward + core[1], core[0], backward / 2)


def head_products(run: Run, model: Transformer, calibration: Calibration, tp: int = 1) -> MicrobatchSeconds:
    """Return the seconds of the head's product for a microbatch; the arguments are those of ``block_products``."""
    forward, backward = calibration.product(_num_tokens(run, model), model.hidden, model.vocab / tp)
    return MicrobatchSeconds(forward, backward, 0.0, backward / 2)


def num_logits(run: Run, model: Transformer, tp: int = 1) -> float:
    """Return how many logits of a microbatch an actor has; the arguments are those of ``block_products``."""
    return _num_tokens(run, model) * model.vocab / tp


def _num_tokens(run: Run, model: Transformer) -> float:
    return run.micro_batch_size * model.seq / run.mesh.cp


def _mlp(model: Transformer, rows: float, hidden: float, width: float) -> list[tuple[float, float, float]]:
    return [*([(rows, hidden, width)] * (model.mlp_matrices - 1)), (rows, width, hidden)]


def calibrated_costs(sized: SizedRun, calibration: Calibration, cores: int | None) -> Costs:
    """Return the durations of the actions, in seconds.

    Args:
        sized: The run, of a GPT or Llama.
        calibration: What was measured.
        cores: Number of cores that the actors share; None if each has its own device.
    """
    run, world, _, schedule = sized
    model = run.model
    assert isinstance(model, Transformer)
    costs = seconds_of_run(sized, _rates(calibration, max(2, world.replicas)))
    of_stage = {key: seconds for key, seconds in costs.of_stage.items() if key[1] not in COMPUTE}
    stages = split_layers(run.split, transformer_costs(model), schedule.num_stages)
    for stage, blocks in enumerate(stages):
        found = stage_seconds(sized, stage, blocks, calibration)
        of_stage |= {(stage, op): seconds for op, seconds in found.items()}
        of_stage |= {(stage, op): calibration.message for op in SENDS}
    tokens = run.micro_batch_size * model.seq / run.mesh.cp
    boundary = element_bytes(run).weight * model.hidden * tokens
    costs = replace(
        costs,
        of_stage=of_stage,
        step=step_seconds(sized, calibration),
        link=calibration.group("p2p", 2, boundary) + calibration.message,
        reduce_beside=costs.reduce_beside and (cores is None or world.size < cores),
    )
    costs = replace(costs, of_action=_last_backwards(costs, sized, stages, calibration))
    return costs if cores is None else _sharing(costs, schedule, world.size / schedule.num_ranks, cores, calibration)


def step_seconds(sized: SizedRun, calibration: Calibration) -> float:
    """Return the seconds of a STEP among actors with cores of their own; the arguments are those of
    ``calibrated_costs``."""
    _, world, counts, schedule = sized
    sharers = world.owners
    parts = sharers if world.sharded else 1  # of a tensor
    each = [units.num_parts(parts) + units.num_expert_parts(parts) for units in counts.units]
    tensors = max(sum(each[stage] for stage in schedule.stages_of(rank)) for rank in range(schedule.num_ranks))
    updated, update = max(counts.held) / sharers, calibration.update
    seconds = update.step + tensors / sharers * update.tensor + updated * update.parameter
    seconds += seconds_after_update(sized, _rates(calibration, max(2, world.replicas)))
    if sharers > 1 and not world.gathers:
        seconds += calibration.beside("shared", max(counts.held))[1]
    return seconds


def _last_backwards(
    costs: Costs, sized: SizedRun, stages: Sequence[range], calibration: Calibration
) -> dict[Action, float]:
    """Return the durations of the last backward of each stage whose gradients are summed over replicas, once a step."""
    _, world, counts, schedule = sized
    found: dict[Action, float] = {}
    if not world.reduces or world.frees_buckets:
        return found
    for stage, (blocks, units) in enumerate(zip(stages, counts.units, strict=True)):
        longer = len(blocks) * calibration.beside("reduced", units.gathered / len(blocks))[1]
        for row in schedule.rows:
            last = [action for action in row if action.stage == stage and action.op in MAKES_GRADIENTS][-1:]
            found |= {action: costs.of(action) + longer for action in last}
    return found


def _rates(calibration: Calibration, members: int) -> Rates:
    """Return the rates of messages between replicas: of an all_reduce, which moves each byte twice."""
    small, large = 4 << 10, 8 << 20
    latency = calibration.group("all_reduce", members, small)
    seconds = calibration.group("all_reduce", members, large) - latency
    moved = 2 * (1 - 1 / members) * large
    return Rates(1.0, moved / seconds if seconds > 0 else 1e12, latency)


def stage_seconds(sized: SizedRun, stage: int, blocks: range, calibration: Calibration) -> dict[Op, float]:
    """Return the seconds of a stage's F, B, I and W on an actor that computes alone.

    Args:
        sized: The run, of a GPT or Llama.
        stage: The stage.
        blocks: Its blocks.
        calibration: What was measured.
    """
    run, world, counts, schedule = sized
    model, tp = run.model, run.mesh.tp_of(schedule.placement[stage])
    assert isinstance(model, Transformer)
    size = run.micro_batch_size * model.seq / run.mesh.cp * model.hidden
    forward = calibration.action_forward
    backward = calibration.action_backward
    later = longer = 0.0
    parameters = counts.units[stage].gathered / len(blocks)  # of a block
    moved = [calibration.beside(kind, parameters) for kind in _moved_kinds(world)]
    for block in blocks:
        one = block_products(run, model, block, calibration, tp)
        sent = _messages(run, model, block, tp, calibration)
        besides = [*(calibration.beside(kind, size) for kind in _kinds(run, model, block, tp)), *moved]
        own = one.forward + sent + float_sum(there for there, _ in besides)
        forward += own
        backward += one.backward + sent + float_sum(back for _, back in besides)
        again = word_of(run.recompute, range(model.layers), block)
        backward += own if again == "full" else one.core if again == "selective" else 0.0
        split, apart = calibration.beside("split", size)
        longer, later = longer + split, later + one.later + apart
    if blocks[-1] == model.layers - 1:
        head = head_products(run, model, calibration, tp)
        there, back = calibration.beside("head", num_logits(run, model, tp))
        forward += head.forward + there
        backward += head.backward + back
        if loss_slice(run, model) is None:
            later += head.later
        else:  # makes logits again, and all gradients at once
            backward += head.forward + there
    return {Op.F: forward, Op.B: backward, Op.I: max(0.0, backward + longer - later), Op.W: later}


def _moved_kinds(world: World) -> Iterator[Kind]:
    """Yield the kinds of additional costs of a block because replicas shard gradients and weights."""
    if world.frees_buckets:
        yield "lent"
    if world.gathers:
        yield "gathered"


def _kinds(run: Run, model: Transformer, block: int, tp: int) -> Iterator[Kind]:
    """Yield the kinds of additional costs of a block, besides its products and messages."""
    yield "llama" if model.is_gated else "gpt"
    if run.mesh.pp > 1:
        yield "pipeline"
    if tp > 1:
        yield "sequence" if run.sequence_parallel else "tensor"
    if run.mesh.cp > 1:
        yield "context"
    if model.num_experts(block):
        yield "experts"
        if run.mesh.ep > 1:
            yield "expert parallel"


def _messages(run: Run, model: Transformer, block: int, tp: int, calibration: Calibration) -> float:
    """Return the seconds of the messages inside of a block in one direction."""
    tokens, each = run.micro_batch_size * model.seq / run.mesh.cp, element_bytes(run).weight
    stream = tokens * model.hidden * each
    seconds = 2 * calibration.group("all_reduce", tp, stream) if tp > 1 else 0.0
    if run.mesh.cp > 1:
        keys = 2 * tokens * model.num_kv_heads * model.head_size * each / tp
        seconds += (run.mesh.cp - 1) * calibration.group("p2p", 2, keys)
    if model.moe is not None and model.num_experts(block) and run.mesh.ep > 1:
        seconds += 2 * calibration.group("all_gather", run.mesh.ep, stream * model.moe.top_k)
    return seconds


def _sharing(costs: Costs, schedule: Schedule, actors: float, cores: int, calibration: Calibration) -> Costs:
    """Return the costs of actors that share cores, each action by how many need a core while it runs.

    Args:
        costs: The costs of an actor that computes alone.
        schedule: The schedule.
        actors: Number of actors of a row.
        cores: Number of cores.
        calibration: How much longer an actor takes while all cores are busy.
    """
    alone = {action: costs.of(action) for row in schedule.rows for action in row if action.op in _ON_CORES}
    waiting = max(1.0, schedule.num_ranks * actors / cores)
    costs = replace(costs, step=costs.step * waiting, link=costs.link * waiting)
    shared = dict(alone)
    for _ in range(_ROUNDS):
        timeline = simulate(schedule, replace(costs, of_action=shared))
        slower = _slowdowns(timeline, actors, cores, calibration.busy)
        shared = {action: seconds * slower.get(action, 1.0) for action, seconds in alone.items()}
    return replace(costs, of_action=shared)


def _slowdowns(timeline: Timeline, actors: float, cores: int, busy: float) -> dict[Action, float]:
    """Return how much longer each action takes that needs a core, by how many others run beside it."""
    events = [event for event in timeline.events if event.action.op in _ON_CORES]
    changes = sorted([(one.start, 1) for one in events] + [(one.end, -1) for one in events])
    integrals: dict[float, float] = {}  # of the slowdown over time, by the end
    slow = last = 0.0
    running = 0
    for at, change in changes:
        slow += (at - last) * _slowdown(running * actors, cores, busy)
        last, running = at, running + change
        integrals[at] = slow
    return {one.action: _mean(one, integrals) for one in events}


def _mean(event: Event, integrals: dict[float, float]) -> float:
    length = event.end - event.start
    return (integrals[event.end] - integrals[event.start]) / length if length > 0 else 1.0


def _slowdown(running: float, cores: int, busy: float) -> float:
    """Return how much longer each of so many computing actors takes."""
    if running <= 1 or cores < 2:
        return max(1.0, running / cores)
    crowded = 1 + (busy - 1) * min(1.0, (running - 1) / (cores - 1))
    return crowded * max(1.0, running / cores)
