"""The rows of the table in the order in which they are measured: what is worth most comes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

RAYPAR = {"raypar-zero-0": 0, "raypar-zero-3": 3}  # several replicas on one GPU: raypar's, by their ZeRO levels
PEERS = ("ddp", "fsdp2")  # ... and those of torch
Kind = Literal["training", "tests", "groups", "pipeline", "replicas"]
FOLDER = Path(__file__).parents[1]  # of the tests that need a GPU
SMALL_SECONDS = 8.0  # of a row in small sizes


@dataclass(frozen=True)
class Row:
    """One measurement, taken in a process of its own.

    name       for ``--only``, the JSON and the table
    seconds    what it takes on an H100, at a guess
    arguments  of the function that measures a row of this kind
    """

    name: str
    kind: Kind
    seconds: float
    arguments: Mapping[str, Any] = field(default_factory=dict)


def _training(workload: str, dtype: str, contestant: str, seconds: float) -> Row:
    arguments = {"workload": workload, "dtype": dtype, "contestant": contestant}
    return Row(f"{workload}/{dtype}/{contestant}", "training", seconds, arguments)


# Guesses on an H100: importing, launching, a first step, some seconds of steps, three of them in the profiler;
# compilers take half a minute, fp32 seconds a step, and 8 billion weights a minute to draw.
_CONTESTANTS = {
    "raypar": 30,
    "torch": 25,
    "torch-compiled": 60,
    "nanochat-like": 60,
    "fsdp2": 30,
    "raypar-compiled": 70,
    "raypar-graphs": 80,
}
_TEST_SECONDS = {
    "test_device": 12,
    "test_nccl": 45,
    "test_staged": 20,
    "test_runs": 150,
    "test_shared_gpu": 420,
    "test_layouts": 240,
}


def _replicas(number: int, contestant: str) -> Row:
    arguments = {"workload": "gpt-124m", "dtype": "bf16", "contestant": contestant, "replicas": number}
    return Row(f"gpt-124m/bf16/{number} on one GPU/{contestant}", "replicas", 30 + 10 * number, arguments)


def _tests(name: str) -> Row:
    return Row(f"tests/gpu/{name}.py", "tests", _TEST_SECONDS.get(name, 60), {"path": str(FOLDER / f"{name}.py")})


def _rows() -> Iterator[Row]:
    yield _training("gpt-124m-step", "bf16", "raypar", 60)
    known = [*_TEST_SECONDS, *sorted({path.stem for path in FOLDER.glob("test_*.py")} - {*_TEST_SECONDS})]
    yield from map(_tests, known[:4])
    for contestant, seconds in _CONTESTANTS.items():
        yield _training("gpt-124m", "bf16", contestant, seconds)
    for size in (2, 4):
        yield Row(f"NCCL group of {size} actors on one GPU", "groups", 20 + 10 * size, {"size": size})
    yield Row("pp=2 over NCCL on one GPU", "pipeline", 45)
    yield _training("gpt-124m", "bf16", "raypar-fp8", 40)
    for contestant, seconds in _CONTESTANTS.items():
        yield _training("llama-1.3b", "bf16", contestant, 1.3 * seconds)
    yield _training("llama-1.3b", "bf16", "raypar-fp8", 50)
    yield from (_replicas(number, contestant) for number in (2, 4) for contestant in (*RAYPAR, *PEERS))
    yield from map(_tests, known[4:])
    for contestant in ("raypar", "torch", "torch-compiled", "fsdp2"):
        yield _training("llama-8b-lora", "bf16", contestant, 150)
    for dtype in ("fp32", "fp16"):
        for contestant, seconds in _CONTESTANTS.items():
            yield _training("gpt-124m", dtype, contestant, 1.5 * seconds)
        for contestant in ("raypar", "torch-compiled", "nanochat-like"):
            yield _training("llama-1.3b", dtype, contestant, 2 * _CONTESTANTS[contestant])
    yield _training("llama-8b-offload", "bf16", "raypar", 240)
    yield _training("llama-8b-offload", "bf16", "fsdp2", 240)
    for dtype in ("fp16", "fp32"):
        yield _training("llama-8b-lora", dtype, "raypar", 180)


ROWS = {row.name: row for row in _rows()}
