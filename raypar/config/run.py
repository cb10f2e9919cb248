"""Check a run as a whole and create its schedules, before any actor starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from raypar.actors.models.skeleton import Skeleton
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import Transformer
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceKind
from raypar.config.conflicts.data import DATA_RULES, data_faults
from raypar.config.conflicts.experts import EXPERT_RULES
from raypar.config.conflicts.hugging_face import ADAPTER_RULES, FOLDER_RULES
from raypar.config.conflicts.layers import LAYER_RULES, TILE_RULES
from raypar.config.conflicts.optim import AVERAGE_RULES, OPTIMIZER_RULES, PRECISION_RULES
from raypar.config.conflicts.outputs import OUTPUT_RULES
from raypar.config.conflicts.parallel import PARALLEL_RULES, UNEVEN_RULES
from raypar.config.conflicts.replicas import HOST_RULES, REPLICA_RULES, ZERO_RULES
from raypar.config.conflicts.schedules import ORDER_RULES, SLICE_RULES, STREAM_RULES, order_on
from raypar.config.conflicts.system import RESOURCE_RULES
from raypar.config.fields import FieldFault, field_faults, right_fields
from raypar.config.mended import mended
from raypar.config.programs import finished_programs, lowered_programs
from raypar.config.recipe_tables import RECIPES
from raypar.config.rules import Examined, RunRule, UnsoundError, faults_by, guarded
from raypar.config.schedule import Programs, schedule_faults, with_offload
from raypar.errors import ConfigError
from raypar.schedules.schedule import ScheduleError

_WRITTEN = {
    "data": "; rp.Batches(batch) are yours, where def batch(step, microbatch, dp): returns (inputs, targets)",
    "mesh": "; such as rp.Mesh(pp=2)",
    "optim": "; such as rp.AdamW(lr=1e-3)",
    "profile": "; such as (10, 13)",
    "save_every": "; 0 saves only at the end",
    "schedule": "; such as '1f1b', or raypar.schedules.Schedule.of('mine', rows)",
}


def _model_faults(examined: Examined) -> Iterator[str]:
    """Yield the sizes of a GPT or Llama that do not fit each other."""
    if isinstance(examined.run.model, Transformer):
        yield from examined.run.model.faults(examined.right)


RULES: tuple[RunRule, ...] = (
    _model_faults,
    lambda examined: examined.run.mesh.faults(examined.right),
    *ZERO_RULES,
    *REPLICA_RULES,
    *ORDER_RULES,
    *PRECISION_RULES,
    *UNEVEN_RULES,
    *ADAPTER_RULES,
    *AVERAGE_RULES,
    *SLICE_RULES,
    *HOST_RULES,
    *RESOURCE_RULES,
    *PARALLEL_RULES,
    lambda examined: examined.misfits,
    *STREAM_RULES,
    *LAYER_RULES,
    *OPTIMIZER_RULES,
    *TILE_RULES,
    *EXPERT_RULES,
    *FOLDER_RULES,
    *DATA_RULES,
    *OUTPUT_RULES,
)


def check_run(
    run: Run,
    resumed: Path | None = None,
    skeleton: Skeleton | None = None,
    *,
    overwrite: bool = False,
    wrong: Sequence[FieldFault] = (),
    before_data: Callable[[Programs], None] | None = None,
) -> Programs:
    """Check a run and return its programs (training step and evaluation) as the actors perform them.

    A field of a wrong type or range is one fault. Checks that would compare it with other fields are then skipped. Data
    that are not in the cache are converted last, to check them, if the run has no other faults.

    Args:
        run: The run.
        resumed: The checkpoint to continue from. Only a run that resumes from a run folder may use that folder again.
        skeleton: Skeleton of the run's model, if the caller has one already.
        overwrite: Whether the run may replace one that is in its folder.
        wrong: Faults that were found where the run was read, such as unknown fields of a file. They come first.
        before_data: Called with the programs before data are converted, if nothing was wrong until then.

    Raises ConfigError with all faults of the run.
    """
    own = _own_faults(run)
    skeleton = Skeleton(run.model, run.seed) if skeleton is None else skeleton
    examined = Examined(run, right_fields([*wrong, *own]), skeleton, resumed, overwrite)
    programs, compared = _compared(examined)
    faults = [*(fault.text for fault in wrong), *(fault.text + _hint(run, fault.path) for fault in own), *compared]
    if own and not wrong and (pair := mended(run, own)) is not None:
        faults += [fault for fault in _besides(pair, examined) if fault not in faults]
    if faults or programs is None:
        raise ConfigError(faults)
    programs = finished_programs(run, skeleton, programs)
    if before_data is not None:
        before_data(programs)
    if not isinstance(run.data, Batches):
        ConfigError.raise_if(data_faults(replace(examined, converts=True)))
    return programs


def _hint(run: Run, path: str) -> str:
    """Return what to write instead of a common wrong value; "" for other values."""
    if path == "model" and isinstance(run.model, str):
        if run.model in RECIPES:
            return f"; rp.recipe({run.model!r}) is a run with such a model"
        return f"; rp.HF({run.model!r}) is the model in a folder of Hugging Face"
    if path == "data" and isinstance(run.data, str):
        return f"; for text files give rp.Text({run.data!r})"
    if path == "model" and callable(run.model):
        return "; modules of yours are rp.Layers(lambda: [...], loss=...)"
    if path == "data" and callable(run.data):
        return "; a function of yours is rp.Batches(function)"
    return _WRITTEN.get(path, "")


def _own_faults(run: Run) -> list[FieldFault]:
    """Return what is wrong with single fields of a run."""
    own = list(field_faults(run))
    if right_fields(own)("mesh.pp", "mesh.rank_dp", "mesh.rank_tp"):
        own += [FieldFault(path, text, of_type=False) for path, text in run.mesh.count_faults()]
    return own


def _besides(pair: tuple[Run, Run], examined: Examined) -> list[str]:
    """Return the faults that both runs have, if their single fields are valid."""
    found: list[list[str]] = []
    for run in pair:
        if own := _own_faults(run):
            return []
        twin = replace(examined, run=run, right=right_fields(own), whole=Skeleton(run.model, run.seed))
        found.append(_compared(twin)[1])
    return [fault for fault in found[0] if fault in found[1]]


def _compared(examined: Examined) -> tuple[Programs | None, list[str]]:
    """Return a run's programs, None if there are none, and what is wrong with several of its fields together."""
    examined = replace(examined, run=guarded(examined.run, examined.right))
    programs, examined = with_programs(examined)
    return programs, [*faults_by(RULES, examined)]


def with_programs(examined: Examined) -> tuple[Programs | None, Examined]:
    """Return a run's lowered programs, None if there are none, and the run with what is wrong with its schedule.

    Args:
        examined: The run.
    """
    run = examined.run
    try:
        # A schedule by name is not built in slices that are refused anyway: of many slices that takes minutes.
        if isinstance(run.schedule, str) and any(faults_by(SLICE_RULES, examined)):
            run = replace(run, token_slices=1)
        counts = examined.right("mesh", "data_parallel", "servers", "zero", "offload")
        programs = lowered_programs(run, examined.whole, counts_replicas=counts)
    except UnsoundError:
        return None, replace(examined, misfits=schedule_faults(run.schedule) if examined.right("schedule") else [])
    except ScheduleError as error:
        return None, replace(examined, num_stages=run.mesh.pp * (run.chunks or 1), misfits=[str(error)])
    train = programs["train"]
    try:
        with_offload(programs, run.activations_on_device)
        misfits = list[str]()
    except UnsoundError:
        misfits = []
    except ConfigError as error:
        misfits = [*error.faults]
    return programs, replace(examined, lowered=train, num_stages=train.num_stages, misfits=misfits)


def unrecorded(run: Run) -> Run:
    """Return the run without a folder, checkpoints, profiles and trackers."""
    return replace(run, folder=None, save_every=0, profile=None, track=())


def reset_faults(run: Run, device: DeviceKind, before: Run | None = None) -> Iterator[str]:
    """Yield the reasons why a run cannot start on existing actors.

    Args:
        run: The run.
        device: Device on which they compute.
        before: The run for which they were launched; None for this one.
    """
    if run.device not in ("auto", device):
        yield f"reset keeps the actors: device must stay {device!r}; launch anew for {run.device!r}"
    if before is not None and run.resources != before.resources:
        yield "reset keeps the actors, which can't take other resources: leave resources as they are, or launch anew"
    if before is not None and run.shared_gpu != before.shared_gpu:
        stays = f"shared_gpu must stay {before.shared_gpu!r}"
        yield f"reset keeps the actors, whose NCCL is set up once: {stays}; launch anew for {run.shared_gpu!r}"
    yield from order_on(run, device)
