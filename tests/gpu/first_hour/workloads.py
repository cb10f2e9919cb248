"""What is trained: the models, their batches, and the run that every contestant takes them from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import raypar as rp
from raypar.actors.specs.precision import DType
from raypar.planner.cost_model import flops_of_token


@dataclass(frozen=True)
class Workload:
    """A model and its batch.

    micro_batch_size  samples of a microbatch in half precision; fp32 takes half as many, and twice the microbatches
    settings          further fields of the run
    text              what it is trained on, as ``rp.Text`` takes it
    """

    model: rp.GPT | rp.Llama
    micro_batch_size: int
    microbatches: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    text: str = "stdlib"


# A vocabulary of 50,257 is padded to a multiple of 64, as most who train a GPT-2 do.
_GPT = rp.GPT(layers=12, hidden=768, heads=12, seq=1024, vocab=50304, tied=True)
_LLAMA = rp.Llama(layers=24, hidden=2048, heads=16, ffn=5504, seq=2048, vocab=32000)
_LLAMA_8B = rp.Llama(
    layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, seq=2048, vocab=128256, rope_base=500_000.0
)
# All in bf16: masters in fp32 beside their states and gradients would take 144 GB of host memory.
_OFFLOAD = {
    "offload": "parameters",
    "precision": rp.Precision(compute="bf16", reduce="bf16", master="bf16"),
    "threads": 16,
}
FULL = {
    "gpt-124m-step": Workload(_GPT, 64, 8),  # 524,288 tokens
    "gpt-124m": Workload(_GPT, 64, 2),
    "llama-1.3b": Workload(_LLAMA, 8, 2),
    "llama-8b-lora": Workload(replace(_LLAMA_8B, lora=rp.Lora(rank=16)), 2, 4),
    "llama-8b-offload": Workload(_LLAMA_8B, 2, 4, _OFFLOAD),
}
_LITTLE = str(Path(__file__).parent / "*.py")  # the standard library would take seconds to convert
_TINY_GPT = rp.GPT(layers=2, hidden=32, heads=2, seq=16, vocab=256, tied=True)
_TINY_LLAMA = rp.Llama(layers=2, hidden=32, heads=2, kv_heads=1, seq=16, vocab=256)
SMALL = {
    "gpt-124m-step": Workload(_TINY_GPT, 4, 4, text=_LITTLE),
    "gpt-124m": Workload(_TINY_GPT, 4, 2, text=_LITTLE),
    "llama-1.3b": Workload(_TINY_LLAMA, 4, 2, text=_LITTLE),
    "llama-8b-lora": Workload(replace(_TINY_LLAMA, lora=rp.Lora(rank=4)), 4, 2, text=_LITTLE),
    "llama-8b-offload": Workload(_TINY_LLAMA, 4, 2, _OFFLOAD | {"threads": 1}, text=_LITTLE),
}


def run_of(workload: Workload, dtype: DType, device: str, cache: str, halvings: int = 0) -> rp.Run:
    """Return the run of a workload on one actor. A step has the same tokens in every dtype.

    Args:
        workload: The workload.
        dtype: What layers compute in; the optimizer's weights are fp32, unless the workload says otherwise.
        device: "cpu" or "cuda".
        cache: Folder for the converted text.
        halvings: How often the microbatch is halved, because a larger one did not fit.
    """
    halvings += dtype == "fp32"
    size = max(1, workload.micro_batch_size >> halvings)
    run = rp.Run(
        model=workload.model,
        data=rp.Text(workload.text, cache=cache),
        optim=rp.AdamW(lr=3e-4),
        micro_batch_size=size,
        microbatches=workload.microbatches * workload.micro_batch_size // size,
        precision=rp.Precision(compute=dtype),
        device=device,
    )
    return replace(run, **workload.settings)


def tokens_of(run: rp.Run) -> int:
    """Return the tokens of a step."""
    return run.micro_batch_size * run.microbatches * run.model.seq


def flops_per_token(model: rp.GPT | rp.Llama) -> float:
    """Return the FLOPs of a token in a training step, without what is computed again. Adapters' own do not count."""
    return flops_of_token(model, "none")[0]
