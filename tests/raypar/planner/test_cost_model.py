"""What a step is predicted to take: FLOPs of layers, and of what is run again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.models.partition import core_cost, transformer_costs
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.run import Run
from raypar.cli.plan.zero_levels import zero_levels_table
from raypar.config.recipes import recipe
from raypar.config.run import check_run
from raypar.planner.assumed_rates import Rates, rates_of
from raypar.planner.cost_model import costs_of_run, seconds_of_run
from raypar.planner.prediction import from_flops
from raypar.planner.sizes.sized_run import SizedRun, counts_of
from raypar.reporting.summary import plan_rows
from raypar.schedules.action import Action, Op
from raypar.schedules.catalog import build
from raypar.schedules.formatting import milliseconds
from raypar.schedules.passes.lower import lower
from raypar.schedules.passes.split_backward import split_backward
from raypar.schedules.simulation.simulate import simulate

GPTS = GPT(layers=4, hidden=64, heads=4, seq=128, attention="materialised")


def predicted(run, schedule=None):
    schedule = schedule or check_run(run)["train"]
    return from_flops(SizedRun.of(run, schedule))


def makespan(model, recompute):
    """Of one stage on one actor, in FLOPs per token."""
    run = Run(model=model, schedule="naive", microbatches=1, recompute=recompute, device="cpu")
    return predicted(run).timeline.makespan * rates_of(run).flops / (run.micro_batch_size * model.seq)


@pytest.mark.parametrize("model", [GPTS, Llama(layers=4, hidden=64, heads=4, kv_heads=1, seq=128, dropout=0.1)])
def test_a_backward_takes_what_it_runs_again_too(model):
    costs, core = transformer_costs(model), core_cost(model)
    whole = sum(costs)
    step = makespan(model, "none") - 3 * whole  # what is not computed: the update
    assert makespan(model, "full") == pytest.approx(4 * whole + step)
    assert makespan(model, "selective") == pytest.approx(3 * whole + 4 * core + step)
    mixed = ("none", "full", "selective", "none")
    assert makespan(model, mixed) == pytest.approx(3 * whole + costs[1] + core + step)


def test_the_fused_kernel_runs_nothing_again_on_account_of_selective():
    fused = replace(GPTS, attention="fused")
    assert makespan(fused, "selective") == makespan(fused, "none")


@pytest.mark.parametrize(
    ("recompute", "tp", "later"),
    [
        ("none", 1, 2),
        ("full", 1, 2),
        ("selective", 1, 2),
        (("none", "none", "full", "none"), 1, 1),
        ("none", 2, 2),
        ("none", "2d:2x2", 2),
    ],
)
def test_a_step_is_shorter_on_account_of_what_backwards_leave_for_later(recompute, tp, later):
    """Weights of blocks, but not of those that are run again by themselves; their cores have none."""
    model = replace(GPTS, vocab=0)
    run = Run(model=model, mesh=Mesh(pp=2, tp=tp), schedule="1f1b", microbatches=2, recompute=recompute)
    whole, core = max(transformer_costs(model)), core_cost(model)
    schedule, costs = lower(build("1f1b", 2, 2)), costs_of_run(run, 2)
    first, second, backward = (costs.of(Action(1, op, 0)) for op in (Op.I, Op.W, Op.B))
    assert first + second == pytest.approx(backward)
    assert second == pytest.approx(later * (whole - 2 * model.hidden - core))
    split = split_backward(schedule, costs, hold=recompute == "none")
    assert (simulate(split, costs).makespan < simulate(schedule, costs).makespan) == (later > 0)
    assert (predicted(run, split).timeline.makespan < predicted(run, schedule).timeline.makespan) == (later > 0)


def test_a_dry_run_tells_of_backwards_that_are_done_in_halves():
    run = replace(recipe("gpt-small"), mesh=Mesh(pp=2))
    schedule = check_run(run)["train"]
    halved = [sum(action.op is Op.I for action in row) for row in schedule.rows]
    assert any(halved)
    assert dict(plan_rows(run, schedule))["backwards in halves"].startswith(" ".join(map(str, halved)) + ": ")
    divided = replace(recipe("gpt-tiny"), mesh=Mesh(pp=2, tp="2d:2x2"), schedule="zb-v")
    told = dict(plan_rows(divided, check_run(divided)["train"]))["backwards in halves"]
    assert told.startswith("8 8: but nothing is left for W, as layers on the grid 2d:2x2 make")
    alone = replace(run, mesh=Mesh(pp=1))
    assert "backwards in halves" not in dict(plan_rows(alone, check_run(alone)["train"]))


def test_small_blocks_split_fewer_backwards_as_the_halves_take_longer():
    run = Run(model=GPT(layers=4, hidden=128, heads=4, seq=128), mesh=Mesh(pp=2), microbatches=8, device="cpu")

    def halved(run):
        return sum(action.op is Op.W for row in check_run(run)["train"].rows for action in row)

    wide = replace(run, model=replace(run.model, hidden=1024))
    assert 0 < halved(run) < halved(wide) == 8


SHARDED = {"model": GPT(layers=2, hidden=64, heads=4, seq=128, vocab=256), "mesh": Mesh(dp=4), "microbatches": 2}


def priced(rates, **changes):
    """The costs of a run, the bytes of its weights in fp32 by stage, and its schedule."""
    run = Run(**SHARDED | changes)
    schedule = check_run(run)["train"]
    sized = SizedRun.of(run, schedule)
    return seconds_of_run(sized, rates), [4 * units.whole for units in sized.counts.units], schedule


@pytest.mark.parametrize(
    ("changes", "gathered", "reduced", "behind"),
    [
        ({"zero": 0}, None, 2 * 3 / 4, 0),
        ({"zero": 1}, None, 3 / 4, 3 / 4),
        ({"zero": 2}, None, 3 / 4, 3 / 4),
        ({"zero": 3}, 3 / 4, 3 / 4, 0),
        ({"zero": 3, "mesh": Mesh(dp=4, shard=2)}, 1 / 2, 1 / 2, 1 / 2),  # an all_reduce of half between two
        ({"zero": 3, "mesh": Mesh(dp=2, cp=2)}, 3 / 4, 3 / 4, 0),
        ({"data_parallel": "parameter_server"}, None, 1, 1),
        ({"offload": "parameters", "mesh": Mesh()}, 1, 1, 0),
        ({"zero": 3, "precision": Precision("bf16")}, 3 / 8, 3 / 4, 0),
        ({"zero": 2, "precision": Precision("bf16", reduce="bf16")}, None, 3 / 8, 3 / 8),
    ],
    ids=str,
)
def test_gathers_and_reductions_take_the_time_of_their_bytes(changes, gathered, reduced, behind):
    """In multiples of the weights in fp32, at a megabyte a second (Rajbhandari et al. 2020, section 7)."""
    costs, (whole,), schedule = priced(Rates(1e9, 1e6, 0.0), **changes)
    lengths = {}
    for event in simulate(schedule, costs).events:
        if event.end > event.start:
            lengths.setdefault(event.action.op, []).append(event.end - event.start)
    told = {op: [bytes_ * whole / 1e6] for op, bytes_ in ((Op.UNSHARD, gathered), (Op.STEP, behind)) if bytes_}
    assert {op: [found[0]] for op, found in lengths.items() if op in (Op.UNSHARD, Op.STEP)} == {
        op: pytest.approx(seconds) for op, seconds in told.items()
    }
    assert lengths[Op.REDUCE_GRAD] == pytest.approx([reduced * whole / 1e6] * len(lengths[Op.REDUCE_GRAD]))


def test_operations_take_time_of_their_own():
    """Level 3 gathers an embedding, two blocks and a head, each by itself, and brings their gradients away so."""
    costs, (whole,), _ = priced(Rates(1e9, 1e6, 0.5), zero=3)
    assert costs.of(Action(0, Op.UNSHARD, None)) == pytest.approx(0.75 * whole / 1e6 + 4 * 0.5)
    assert costs.of(Action(0, Op.REDUCE_GRAD, None)) == pytest.approx(0.75 * whole / 1e6 + 4 * 0.5)
    assert costs.units == 4


def test_servers_send_a_message_for_each_bucket():
    """And one each at least."""
    fields = {"data_parallel": "parameter_server", "servers": 2}
    for bucket_mb, messages in ((64.0, 2), (0.1, None)):
        costs, (whole,), _ = priced(Rates(1e9, 1e6, 0.5), bucket_mb=bucket_mb, **fields)
        count = messages or whole / (0.1 * 2**20)
        assert costs.step == pytest.approx(whole / 1e6 + count * 0.5)


@pytest.mark.parametrize(("changes", "values"), [({}, 64), ({"precision": Precision("bf16")}, 32), ({"cp": 2}, 32)])
def test_a_message_between_stages_takes_the_time_of_an_activation(changes, values):
    mesh = Mesh(pp=2, **{axis: changes[axis] for axis in changes.keys() & {"cp"}})
    fields = {name: value for name, value in changes.items() if name != "cp"}
    costs, *_ = priced(Rates(1e9, 1e6, 0.0), mesh=mesh, **fields)
    assert costs.link == pytest.approx(128 * values * 4 / 1e6 * Run().micro_batch_size)


def test_a_slow_link_makes_the_step_longer_and_a_fast_one_hides_behind_computing():
    def slowdown(bytes_, **changes):
        costs, _, schedule = priced(Rates(1e9, bytes_, 0.0), **changes)
        alone, *_ = priced(Rates(1e9, 1e30, 0.0), **changes)
        return simulate(schedule, costs).makespan / simulate(schedule, alone).makespan - 1

    for zero in (2, 3):
        assert 0 < slowdown(1e9, zero=zero) < 0.01
        assert slowdown(1e6, zero=zero) > 0.5
    once = {"zero_gather": "step", "zero_reduce": "step"}
    assert slowdown(1e6, zero=3, **once) < slowdown(1e6, zero=3) / 1.5, "gathered once and reduced once, not twice"


def test_plans_and_dry_runs_tell_of_gathers_and_reductions():
    run = Run(**SHARDED, zero=3, device="cpu")
    schedule = check_run(run)["train"]
    prediction = predicted(run, schedule)
    rates, (whole,) = rates_of(run), [units.whole for units in counts_of(run, schedule, None).units]
    assert prediction.most(Op.UNSHARD) == pytest.approx(4 * rates.message(0.75 * 4 * whole, 4))
    assert prediction.alone < prediction.timeline.makespan
    told = dict(plan_rows(run, schedule))["between replicas"]
    assert told.startswith(f"gathers {milliseconds(prediction.most(Op.UNSHARD))}, reductions ")
    assert "longer than without them, predicted from FLOPs and bytes" in told
    rows = {line.split("  ")[0]: line for line in zero_levels_table(run).splitlines()}
    assert milliseconds(prediction.most(Op.UNSHARD)) in rows["gathers, predicted"]
    assert milliseconds(prediction.timeline.makespan) in rows["step, predicted"]
    alone = Run(**SHARDED | {"mesh": Mesh()})
    assert "between replicas" not in dict(plan_rows(alone, check_run(alone)["train"]))
