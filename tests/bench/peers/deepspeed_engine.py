"""DeepSpeed's engine over Gloo, as its launcher starts it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

import raypar as rp
from raypar.actors.machine.device import ComputeDevice
from raypar.actors.optim.optimizer import build_optimizer
from tests.bench.trainer import LocalTrainer
from tests.bench.workload import batches_of, model_of

_OFF = 10**9  # steps between two of DeepSpeed's reports


def deepspeed_engine(
    run: rp.Run, place: ComputeDevice, level: int, change: Callable[[nn.Module], None] = lambda module: None
) -> LocalTrainer:
    """One of the ranks that the environment tells of (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT).

    ``level`` is that of ZeRO. ``change`` changes the model in place, once the ranks have met.
    """
    os.environ["DS_ACCELERATOR"] = place.kind
    os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # ninja, with which it compiles
    import deepspeed

    place.enter()
    deepspeed.init_distributed("gloo")
    model, batches, dp = model_of(run), batches_of(run), dist.get_rank()
    module = nn.Sequential(*model.materialize(range(len(model.names)), run.seed))
    change(module)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=build_optimizer(run.optim, dict(module.named_parameters())),
        config={
            "train_micro_batch_size_per_gpu": run.micro_batch_size,
            "gradient_accumulation_steps": run.microbatches,
            "gradient_clipping": run.clip or 0.0,
            "zero_optimization": {"stage": level},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "steps_per_print": _OFF,
        },
    )

    def step(number: int) -> float:
        losses: list[Any] = []
        for microbatch in range(run.microbatches):
            tokens, labels = (
                batches.tokens("train", number, microbatch, dp),
                batches.labels("train", number, microbatch, dp),
            )
            loss = model.loss((engine(tokens),), (labels,))
            engine.backward(loss)  # divided by the number of microbatches there
            engine.step()  # updates behind the last one
            losses.append(loss.detach())
        return float(sum(loss.item() for loss in losses)) / run.microbatches

    return LocalTrainer(step, dist.destroy_process_group, place)
