"""``raypar plan``: what a run takes as it is, or with ``--gpus`` the best layouts on a cluster on paper."""

from __future__ import annotations

import logging
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from raypar.actors.machine.files import read_named
from raypar.actors.machine.this_machine import num_slots, starts_own_ray
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.mesh.world import Offload
from raypar.actors.specs.model import GPT, Llama, Transformer
from raypar.actors.specs.precision import Precision
from raypar.actors.specs.resources import Resources
from raypar.actors.specs.run import Run
from raypar.actors.specs.worlds import world_of
from raypar.cli.plan.zero_levels import placed, zero_levels_table
from raypar.cli.words.output_files import output_file_faults, whole_file
from raypar.cli.words.parsing import parse, values_of
from raypar.cli.words.run_args import RunArgs
from raypar.cluster.placement.devices import ActorResources
from raypar.cluster.placement.placement import RACK, Node, place, placement_lines
from raypar.config.fields import FieldFault
from raypar.config.run import check_run, unrecorded
from raypar.config.toml import changed_of, toml_of
from raypar.errors import ConfigError
from raypar.job.start.launchable import check_launch
from raypar.planner.calibrated.calibration_file import calibration_faults, calibration_named, found_calibration
from raypar.planner.hardware.cluster import Cluster
from raypar.planner.hardware.cluster_file import ReadCluster, cluster_from, cluster_of
from raypar.planner.prediction import calibration_misfits, from_calibration, why_uncalibrated
from raypar.planner.rules_of_thumb import advice
from raypar.planner.search.explained import SHOWN, lost, memory_text, mesh_table, reasons, step_bars, what_is_missing
from raypar.planner.search.ranking import ALIKE, Candidate, Price, Ranking, largest_divided, ranked, smallest
from raypar.planner.search.space import Space, axis_faults
from raypar.planner.sizes.parameters import num_parameters
from raypar.planner.sizes.sized_run import SizedRun
from raypar.planner.timing.messages import LADDER
from raypar.schedules.formatting import short_count, three_digit_seconds

log = logging.getLogger(__name__)

_MOST_BYTES = 1 << 20  # of a cluster's file
_MOST_PLACED = 1024  # actors whose nodes are listed
_NODES_SHOWN = 4
_SEARCHED = ("--mesh.dp", "--schedule", "--chunks", "--microbatches", "--micro-batch-size", "--recompute")
_OFFLOAD: Offload = "optimizer"  # what is tried where nothing fits without
_EDIT = "# EDIT: data, lr, steps. What is not here is as in every run.\n"


@dataclass(frozen=True)
class PlanArgs(RunArgs):
    """The flags of ``raypar plan``."""

    gpus: int | None = None
    """rank layouts on so many devices; none: print what the run takes as it is"""
    gpu: str = "h100"
    """data sheet of the devices: a100, a100-40gb, h100, h200, b200, l4 or cpu"""
    nodes: int = 0
    """nodes on which the devices are; 0: as many as usual nodes make"""
    between: str = ""
    """link between nodes: ib-hdr, ib-ndr, ethernet-100 and others; "" for the usual one"""
    cluster: Path | None = None
    """TOML file of a cluster, with devices and links of your own, in place of gpus, gpu, nodes and between"""
    calibration: Path | None = None
    """what raypar calibrate wrote, from which steps are predicted; none: that of this machine, for a run as it is and
    for --gpu cpu"""
    batch: int = 0
    """sequences of a step of all replicas; 0: those of the run"""
    out: Path | None = None
    """file for the best layout, which raypar train takes; overwritten if it exists"""


def run_plan(words: Sequence[str]) -> str:
    """Run ``raypar plan``. Raises ConfigError if there are faults."""
    what = "Say what a run takes at each level of ZeRO, or with --gpus rank the layouts of its model on a cluster."
    parsed = parse(PlanArgs, words, "plan", what, "gpt-small")
    args = parsed.args
    run = unrecorded(args.run())
    with calibration_named(args.calibration):
        if args.gpus is None and args.cluster is None:
            return _as_it_is(run, args, parsed.wrong)
        return _ranked(run, args, parsed.wrong, words)


def _as_it_is(run: Run, args: PlanArgs, wrong: Sequence[FieldFault]) -> str:
    """Say what a run takes as it is."""
    named = [FieldFault("calibration", text, of_type=True) for text in calibration_faults(args.calibration)]
    check_launch(run, wrong=[*wrong, *named], here=False)
    takes = "" if run.resources == Resources() else f"each actor takes {run.resources}\n\n"
    found = f"{takes}{zero_levels_table(run)}"
    return found if starts_own_ray() else f"{found}\n\n{placed(run)}"


def _ranked(run: Run, args: PlanArgs, wrong: Sequence[FieldFault], words: Sequence[str]) -> str:
    """Rank the layouts of a run's model on a cluster."""
    found = _cluster(args)
    faults = [*(fault.text for fault in wrong), *found.faults, *_request_faults(args, run, words)]
    if faults or found.cluster is None:
        raise ConfigError(faults)
    cluster = found.cluster
    batch = args.batch or run.microbatches * run.micro_batch_size * run.mesh.dp
    space, price = _space(batch, run, words), _price(args, cluster)
    assert isinstance(run.model, GPT | Llama)
    ConfigError.raise_if(axis_faults(run.model, cluster.size, space))
    fills = args.cluster is None and not args.nodes
    on = _on(run, cluster, is_given=any(word.startswith("--precision") for word in words))
    offloads = run.offload == "none" and not [*values_of("--offload", words)]
    return "\n".join(_planned(on, cluster, space, args.out, price, fills=fills, offloads=offloads))


def _price(args: PlanArgs, cluster: Cluster) -> Price | None:
    """Return how steps are predicted from a calibration of the devices; None if there is none."""
    if args.calibration is None and cluster.device.kind != "cpu":
        return None
    try:
        calibration = found_calibration()
    except ConfigError as error:
        log.warning("predicted without a calibration: %s", "; ".join(error.faults))
        return None
    if calibration is None:
        return None
    if cluster.device.kind == "cpu" and starts_own_ray() and cluster.size > num_slots():
        log.warning("predicted without a calibration: it is of this machine, which takes %d actors", num_slots())
        return None

    def price(run: Run) -> float | None:
        """Return the seconds of a step; None if the calibration is not of such runs."""
        if calibration_misfits(run, calibration):
            return None
        return from_calibration(SizedRun.of(run, check_run(run)["train"]), calibration).step

    return price


def _space(batch: int, run: Run, words: Sequence[str]) -> Space:
    """Return what to choose from: axes of the mesh and a level of ZeRO that the words give are kept."""
    axes = [axis for axis in ("tp", "pp", "cp", "ep") if any(values_of(f"--mesh.{axis}", words))]
    given: dict[str, Any] = {axis: (getattr(run.mesh, axis),) for axis in axes}
    if any(values_of("--zero", words)) and run.zero is not None:
        given["zero"] = (run.zero,)
    return Space(batch, **given)


def _request_faults(args: PlanArgs, run: Run, words: Sequence[str]) -> Iterator[str]:
    """Yield what is wrong with a request to rank layouts."""
    if not isinstance(run.model, Transformer):
        yield "plan --gpus prices a GPT or a Llama: of your own Layers no FLOPs are known"
    if isinstance(run.mesh.tp, str):
        yield f"mesh.tp is {run.mesh.tp!r}, a grid, which plan --gpus does not price: give a number, or leave it out"
    if run.precision.compute == "fp8":
        what = "precision.compute is 'fp8', whose speed plan --gpus does not know"
        yield f"{what}: rank layouts with --precision bf16, which takes the same bytes, and train with fp8"
    for flag in _SEARCHED:
        if any(values_of(flag, words)):
            yield f"{flag} is searched by plan --gpus, and follows from the batch and the axes: leave it out"
    if args.batch < 0:
        yield f"--batch is {args.batch}: give 1 or more sequences of a step, or leave it out"
    if args.gpus is not None and args.cluster is not None:
        yield "--gpus and --cluster both say how many devices there are: leave one out"
    yield from calibration_faults(args.calibration)
    yield from output_file_faults("--out", args.out)


def _cluster(args: PlanArgs) -> ReadCluster:
    """Return the cluster that flags or a file describe."""
    if args.cluster is None:
        return cluster_of(args.gpus or 0, args.gpu, args.nodes, args.between)
    try:
        found = cluster_from(tomllib.loads(read_named(args.cluster, _MOST_BYTES).decode()))
    except OSError as error:
        return ReadCluster(
            None, [f"--cluster {str(args.cluster)!r} can't be read ({error.strerror}): give another path"]
        )
    except (ValueError, RecursionError) as error:
        return ReadCluster(None, [f"--cluster {str(args.cluster)!r} can't be read ({error}): give a TOML file"])
    return replace(found, faults=[f"{args.cluster.name}: {fault}" for fault in found.faults])


def _on(run: Run, cluster: Cluster, *, is_given: bool) -> Run:
    """Return the run on such devices: in bf16 where that is faster, unless a flag or the run gives a precision."""
    device, precision = cluster.device, run.precision
    if precision == Precision() and not is_given and device.half > device.full:
        precision = Precision(compute="bf16")
    return replace(run, mesh=Mesh(), precision=precision, device=device.kind, shared_gpu="staged", split="even")


def _planned(
    run: Run, cluster: Cluster, space: Space, out: Path | None, price: Price | None, *, fills: bool, offloads: bool
) -> Iterator[str]:
    """Yield the lines of a plan. Raises ConfigError if nothing fits, nor with states in host memory if ``offloads``."""
    model = run.model
    assert isinstance(model, GPT | Llama)
    ranking = ranked(run, model, cluster, space, price=price)
    tokens = space.batch * model.seq
    if not ranking.best:
        without, faults = ranking, [*what_is_missing(ranking, cluster.size)]
        if offloads:
            ranking = ranked(replace(run, offload=_OFFLOAD), model, cluster, space, price=price)
            faults = [f"{fault}; nor does one with --offload {_OFFLOAD}" for fault in faults]
        if not ranking.best:
            raise ConfigError(["; ".join([*faults, *_enough(run, cluster, space, without, fills=fills)])])
        yield f"no layout fits as it is; with --offload {_OFFLOAD}, whose updates in host memory are not timed here:"
    best = ranking.best[0]
    yield f"{cluster}"
    many = short_count(num_parameters(model))
    yield f"{many} parameters in {run.precision.compute}, {space.batch:,} sequences of {model.seq:,} tokens a step"
    yield f"{ranking.looked:,} layouts looked at, {len(ranking.all):,} fit; {_best_shown(ranking)}:"
    yield from ("", *mesh_table(ranking), "")
    how = "from the calibration" if best.calibrated else "simulated" if best.simulated else "in closed form"
    yield f"the best step takes {three_digit_seconds(best.seconds)} ({how}), {tokens / best.seconds:,.0f} tokens/s"
    if not best.calibrated:
        yield _basis(cluster)
    closed = best.step.seconds
    yield (
        "of an actor"
        + f", in closed form {three_digit_seconds(closed)}" * (abs(closed / best.seconds - 1) > ALIKE)
        + ":"
    )
    yield from step_bars(best)
    if price is not None and not best.calibrated:
        yield f"not from the calibration: {why_uncalibrated(best.run)}"
    yield f"memory of the fullest actor: {memory_text(best, ranking.room)}"
    yield from ("", "why:", *(f"  {line}" for line in reasons(ranking, space)))
    if len(ranking.best) > 1:
        yield from ("", "why the others lost:", *(f"  {line}" for line in lost(ranking)))
    yield from ("", "who is where:", *(f"  {line}" for line in _places(best, cluster)))
    if advised := [*advice(best, cluster)]:
        yield from ("", "advice:", *(f"  {line}" for line in advised))
    yield from _written(ranking, out)


def _basis(cluster: Cluster) -> str:
    """Say whose kernels the seconds of a plan are, and what of raypar was timed."""
    device = cluster.device
    share = f"{device.reached:.0%} of its data sheet, which published steps of other programs reach"
    return f"seconds are of {device.name} at {share}; of raypar no step was timed on such a cluster"


def _best_shown(ranking: Ranking) -> str:
    """Say what the table shows."""
    count = len(ranking.best)
    return "the best of each mesh" if count <= SHOWN else f"the best of each mesh, the first {SHOWN} of {count}"


def _enough(run: Run, cluster: Cluster, space: Space, ranking: Ranking, *, fills: bool) -> Iterator[str]:
    """Yield the smallest cluster of such nodes on which something fits, or where none is divided the nearest ones."""
    assert isinstance(run.model, GPT | Llama)
    fewer = None if ranking.least else largest_divided(run, run.model, cluster, space)
    if fewer is not None:
        yield f"{fewer.size:,} of these devices on {_nodes(fewer)} are the largest smaller number that one divides"
    larger = smallest(run, run.model, cluster, space, fills=fills)
    if larger is not None:
        yield f"{larger.size:,} of these devices on {_nodes(larger)} are the smallest larger number on which one fits"
    elif ranking.least:
        yield "nor does one on any number of such nodes up to 65,536 devices: use devices with more memory"
    else:
        yield f"a step has {space.batch:,} sequences, which replicas must divide: more devices need a larger --batch"


def _nodes(cluster: Cluster) -> str:
    return "1 node" if cluster.nodes == 1 else f"{cluster.nodes:,} nodes"


def _places(best: Candidate, cluster: Cluster) -> Iterator[str]:
    """Yield which actors go on which node, as a launch places them."""
    world = world_of(best.run)
    if cluster.size > _MOST_PLACED:
        first = ", ".join(world.label(rank) for rank in range(cluster.each_node))
        yield f"node 0: {first}; the others go on in this order" if best.order == LADDER else "whole replicas a rack"
        return
    has = {"CPU": float(cluster.each_node + 1), "GPU": float(cluster.each_node)}
    nodes = [
        Node(str(index), f"node {index}", f"node {index}", has, has, {RACK: _rack(index, cluster)})
        for index in range(cluster.nodes)
    ]
    lines = [*placement_lines(world, place(world, nodes, ActorResources("cuda", 1.0)), nodes)]
    yield from lines[:_NODES_SHOWN]
    if len(lines) > _NODES_SHOWN:
        yield f"... and {len(lines) - _NODES_SHOWN} more nodes in the same way"


def _rack(node: int, cluster: Cluster) -> str:
    """Return the rack of a node; "" if all are in one."""
    return str(node // cluster.each_rack) if cluster.each_rack else ""


def _written(ranking: Ranking, out: Path | None) -> Iterator[str]:
    """Yield where the best layout is, as a file that trains."""
    if out is None:
        return
    with whole_file("--out", out) as write:
        write(_EDIT + toml_of(changed_of(ranking.best[0].run)))
    yield f"\nwritten: raypar train {quote(str(out))}"
