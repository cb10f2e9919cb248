"""Ray Train's TorchTrainer with DistributedDataParallel: two workers, stepped from the driver.

A train function runs to its end by itself. For rounds that take turns with others it has to be held in between: every
worker connects to the driver and serves its requests, as the bench's own processes do.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
import torch
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from torch import nn

from tests.bench.peers.whole import whole_model
from tests.bench.trainer import LocalTrainer, serve
from tests.bench.workload import RANKS, SIZES, run_of

_LOOK = 1.0  # seconds between two looks whether the workers still live


def train_function(config: dict[str, Any]) -> None:
    """What each worker runs; ``config`` has the size's name and the driver's port."""
    torch.set_num_threads(1)
    size, rank = SIZES[config["size"]], train.get_context().get_world_rank()

    def wrap(module: nn.Module) -> nn.Module:
        return prepare_model(module, parallel_strategy_kwargs={"gradient_as_bucket_view": True})

    trainer = LocalTrainer(whole_model(run_of(size, "replicas"), rank, torch.device("cpu"), wrap))
    with socket.create_connection(("127.0.0.1", config["port"])) as connection, connection.makefile("rw") as lines:
        serve(trainer, lines, lines)


class RayTrainer:
    """The driver."""

    def __init__(self, size: str) -> None:
        self._has_started = not ray.is_initialized()
        if self._has_started:
            own: dict[str, Any] = (
                {} if "RAY_ADDRESS" in os.environ else {"include_dashboard": False, "object_store_memory": 256 * 2**20}
            )
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **own)
        self._storage = tempfile.TemporaryDirectory(prefix="raypar-bench-")
        self._pool = ThreadPoolExecutor(1)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            trainer = TorchTrainer(
                train_function,
                train_loop_config={"size": size, "port": listener.getsockname()[1]},
                torch_config=TorchConfig(backend="gloo"),
                scaling_config=train.ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": 1}),
                run_config=train.RunConfig(name="bench", storage_path=self._storage.name),
            )
            self._fit = self._pool.submit(trainer.fit)
            self._workers = [_accept(listener, self._fit).makefile("rw") for _ in range(RANKS)]

    def train(self, first: int, steps: int) -> list[float]:
        """Take steps on all workers; their losses, the mean over the workers."""
        losses = self._ask("train", first, steps)
        return [sum(each) / len(each) for each in zip(*losses, strict=True)]

    def peak(self) -> list[int]:
        return [peak for (peak,) in self._ask("peak")]

    def waited(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Let the workers' functions return, then stop Ray if it was started here."""
        for worker in self._workers:
            worker.close()
        self._fit.result()
        self._pool.shutdown()
        if self._has_started:
            ray.shutdown()
        self._storage.cleanup()

    def _ask(self, *request: object) -> list[list[Any]]:
        for worker in self._workers:
            worker.write(json.dumps(request) + "\n")
            worker.flush()
        answers = [worker.readline() for worker in self._workers]
        if not all(answers):
            self._fit.result()  # raises what ended the workers
        return [json.loads(answer)["found"] for answer in answers]


def _accept(listener: socket.socket, fit: Future[Any]) -> socket.socket:
    """The next worker's connection; the error of ``fit`` if there will be none."""
    listener.settimeout(_LOOK)
    while True:
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            if fit.done():
                fit.result()
                raise RuntimeError("the workers ended before they trained") from None
        else:
            connection.settimeout(None)
            return connection
