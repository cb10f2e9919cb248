"""From a run to what each of its actors is told."""

from __future__ import annotations

from raypar.actors.specs.types import DeviceKind
from raypar.actors.worker.plan import Plan
from raypar.config.run import Run, rooted, world_of
from raypar.config.schedule import Programs, only_row


def plans_of(run: Run, programs: Programs, name: str, device: DeviceKind = "cpu") -> list[Plan]:
    """The plan of every rank; ``name`` is unique to job and generation, ``device`` what all of them compute on."""
    world = world_of(run)
    rows = [{key: only_row(schedule, pp) for key, schedule in programs.items()} for pp in range(run.mesh.pp)]
    return [
        Plan(
            name=name,
            mesh=run.mesh,
            rank=rank,
            model=run.model,
            data=rooted(run.data),
            optim=run.optim,
            programs=rows[world.pp(rank)],
            split=run.split,
            recompute=run.recompute,
            micro_batch_size=run.micro_batch_size,
            data_parallel=run.data_parallel,
            bucket_mb=run.bucket_mb,
            servers=run.servers,
            zero=run.zero,
            sequence_parallel=run.sequence_parallel,
            context=run.context,
            clip=run.clip,
            seed=run.seed,
            steps=run.steps,
            threads=run.threads,
            device=device,
            timeout=run.timeout,
        )
        for rank in range(world.size)
    ]
