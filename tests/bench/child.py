"""A training process of the bench: it says "ready", then takes so many steps for every number on its standard input,
and answers with the seconds a step.

    python child.py plain
    python child.py torch RANK PORT SCHEDULE      # one of two ranks of torch.distributed.pipelining
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch

import raypar as rp
from raypar.actors.batches import batch_source
from raypar.actors.models.build import build_model
from raypar.actors.optim import build_optimizer

Step = Callable[[int], object]


def parts(run: rp.Run, indices: range):
    model = build_model(run.model, run.seed)
    layers = model.materialize(indices, run.seed)
    named = {f"{i}.{name}": p for i, layer in enumerate(layers) for name, p in layer.named_parameters()}
    source = batch_source(run.data, run.model, run.micro_batch_size, run.microbatches, 1, 0, run.seed)
    return model, layers, named, build_optimizer(run.optim, named), source


def plain(run: rp.Run) -> Step:
    """The whole model in one process, gradients accumulated over the microbatches."""
    model, layers, named, optimizer, source = parts(run, range(run.model.layers + 2))
    weight = torch.tensor(1.0 / run.microbatches)

    def step(number: int) -> None:
        for parameter in named.values():
            parameter.grad = None
        for microbatch in range(run.microbatches):
            (values,) = source.inputs("train", number, microbatch)
            for layer in layers:
                values = layer(values)
            model.loss((values,), source.targets("train", number, microbatch)).backward(weight)
        torch.nn.utils.clip_grad_norm_(named.values(), run.clip, foreach=False)
        optimizer.step()

    return step


def torch_pipeline(run: rp.Run, rank: int, port: int, schedule: str) -> Step:
    """Half of the model, in a schedule of torch.distributed.pipelining over Gloo."""
    import torch.distributed as dist
    from torch.distributed import pipelining

    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    stages = {"1f1b": 1, "gpipe": 1, "interleaved": 2}[schedule]
    per_stage = run.model.layers // (2 * stages)
    last = 2 * stages - 1
    built, named = [], {}
    for number in range(rank, 2 * stages, 2):
        first, end = 1 + number * per_stage, 1 + (number + 1) * per_stage
        indices = range(first - (number == 0), end + (number == last))
        model, layers, own, _, source = parts(run, indices)
        named |= {f"{number}.{name}": parameter for name, parameter in own.items()}
        built.append(pipelining.PipelineStage(torch.nn.Sequential(*layers), number, last + 1, torch.device("cpu")))
    optimizer = build_optimizer(run.optim, named)

    def loss(logits, labels):
        return model.loss((logits,), (labels,))

    cls = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}.get(
        schedule, pipelining.ScheduleInterleaved1F1B
    )
    pipe = cls(built[0] if stages == 1 else built, n_microbatches=run.microbatches, loss_fn=loss)

    def step(number: int) -> None:
        for parameter in named.values():
            parameter.grad = None
        every = range(run.microbatches)
        if rank == 0:
            tokens = torch.cat([source.inputs("train", number, microbatch)[0] for microbatch in every])
            pipe.step(tokens)
        else:
            labels = torch.cat([source.targets("train", number, microbatch)[0] for microbatch in every])
            pipe.step(target=labels, losses=[])
        norms = torch.stack([torch.linalg.vector_norm(p.grad) for p in named.values()]).square().sum()
        dist.all_reduce(norms)
        torch.nn.utils.clip_grads_with_norm_(named.values(), run.clip, norms.sqrt(), foreach=False)
        optimizer.step()

    return step


def main() -> None:
    torch.set_num_threads(1)
    run = rp.recipe("gpt-small")
    if sys.argv[1] == "plain":
        step = plain(run)
    else:
        step = torch_pipeline(run, int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    step(0)
    print("ready", flush=True)
    for line in sys.stdin:
        count = int(line)
        start = time.perf_counter()
        for number in range(count):
            step(number)
        print((time.perf_counter() - start) / count, flush=True)


if __name__ == "__main__":
    main()
