"""The three modes of dividing a model: search all modules, search those without annotation, or search none (MindSpore).

Source: MindSpore 1.1, "Distributed Training Design": automatic, semi-automatic and manual (hybrid) parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from raypar.actors.machine.this_machine import device_kind
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.config.arguments import checked_arguments
from raypar.config.fields import field_faults, right_fields
from raypar.config.run import check_run
from raypar.errors import ConfigError
from raypar.planner.hardware.cluster_file import cluster_of
from raypar.planner.operators.operator import Aim

if TYPE_CHECKING:
    from raypar.planner.operators.division import Division

Mode = Literal["auto", "semi", "manual"]


@dataclass(frozen=True, repr=False)
class Planned:
    """A run with the divisions that ``plan`` has found.

    Attributes:
        run: The run, which ``launch`` takes.
        lines: The table of modules, and why they are divided so.
    """

    run: Run
    lines: Sequence[str]

    def __str__(self) -> str:
        return "\n".join(self.lines)

    __repr__ = __str__


@checked_arguments
def plan(run: Run, mode: Mode = "semi", *, aim: Aim = "speed", gpu: str = "") -> Planned:
    """Find how the modules of the user's own layers are divided over tensor ranks.

    Args:
        run: The run, with ``mesh.tp``. The entries of its model's plan are the annotations.
        mode: "semi": keep what is annotated, and search the rest; "auto": search all; "manual": search nothing.
        aim: What is minimised first: the time of a step ("speed"), or the weights of an actor ("memory").
        gpu: The device whose data sheet gives the time: a100, a100-40gb, h100, h200, b200, l4 or cpu; "": cpu if
            actors would compute on CPUs, else h100.

    Returns:
        The run, whose plan names every module that was searched, and a table of them.

    Raises:
        ConfigError: The run has faults, or no division leads to what is annotated.
    """
    if mode == "manual":
        check_run(run)
        return Planned(run, ["manual: the run is taken as it is given"])
    if not isinstance(run.model, Layers):
        raise ConfigError(["model is no Layers: raypar plan --gpus searches the layout of a GPT or a Llama"])
    annotated = run if mode == "semi" else replace(run, model=replace(run.model, plan={}))
    division = _division(annotated, aim, gpu)
    assert isinstance(annotated.model, Layers)
    found = replace(annotated, model=replace(annotated.model, plan=dict(division.plan)))
    check_run(found)
    marked = ["(* as it was annotated)"] if division.annotated else []
    return Planned(found, [*division.lines(), *marked])


def _division(run: Run, aim: Aim, gpu: str) -> Division:
    """Search the division of a run's layers. Raises ConfigError as ``plan`` does."""
    from raypar.actors.data.batches import batch_source
    from raypar.actors.models.own.user_plan import plan_faults
    from raypar.planner.operators.chains import chains_of
    from raypar.planner.operators.division import search_plan
    from raypar.planner.operators.prices import Prices
    from raypar.planner.timing.roofline import Roofline

    model, mesh, skeleton = run.model, run.mesh, Skeleton(run.model, run.seed)
    assert isinstance(model, Layers)
    wrong = [*field_faults(run)]
    faults = [fault.text for fault in wrong]
    if not right_fields(wrong)("model", "mesh", "micro_batch_size", "microbatches", "device"):
        raise ConfigError(faults)
    if mesh.tensor_ranks == 1 or mesh.grid is not None:
        faults.append(f"mesh.tp is {mesh.tp!r}: give the number of actors over which modules are divided, 2 or more")
    _demand_built(run, skeleton)
    found = cluster_of(mesh.size, gpu or ("cpu" if device_kind(run.device) == "cpu" else "h100"))
    faults += [*found.faults, *plan_faults(model.plan, skeleton.layers, mesh.tensor_ranks)]
    if not skeleton.model.is_deferred:
        faults.append("the layers can't be built without weights, and so not be tried: give a plan, and mode 'manual'")
    if faults or found.cluster is None:
        raise ConfigError(faults)
    try:
        source = batch_source(run.data, model, run.micro_batch_size, run.microbatches, mesh.dp, run.seed)
        inputs = source.inputs("train", 0, 0, 0)
        values = tuple(value.to("meta") for value in inputs)
        chains = chains_of(skeleton.layers, values, model.plan, skeleton.model.skips)
    except Exception as error:
        text = f"the layers can't be tried on the shapes of a first batch ({type(error).__name__}: {error})"
        raise ConfigError([f"{text}: mend it, or give a plan, and mode 'manual'"]) from error
    cluster, half = found.cluster, run.precision.is_half
    prices = Prices(
        ranks=mesh.tensor_ranks,
        roofline=Roofline.of(cluster.device, half=half),
        link=cluster.route(mesh.tensor_ranks, 1),
        element=2 if half else 4,
        microbatches=run.microbatches,
    )
    division = search_plan(chains, prices, aim)
    if isinstance(division, list):
        raise ConfigError(division)
    return division


def _demand_built(run: Run, skeleton: Skeleton) -> None:
    """Raise ConfigError if a run's layers can't be built."""
    try:
        assert skeleton.layers
    except Exception:
        assert isinstance(run.model, Layers)
        check_run(replace(run, model=replace(run.model, plan={}), mesh=replace(run.mesh, tp=1)))  # says where it fails
        raise
