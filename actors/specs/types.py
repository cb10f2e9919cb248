"""Types of a run's fields, and constants that the driver and the actors share.

Recognise a loss by its name.
"""

from __future__ import annotations

from typing import Literal

ProgramName = Literal["train", "evaluate"]
ExecutorName = Literal["compiled", "tasks"]
TaskOrder = Literal["row", "dynamic"]
DeviceKind = Literal["cpu", "cuda"]
DeviceChoice = Literal["auto", DeviceKind]
SharedGpu = Literal["staged", "nccl"]  # how actors of one GPU exchange tensors
Backward = Literal["auto", "whole", "split"]  # which backwards are split into I and W
Compile = bool | Literal["graphs"]  # whether layers are compiled, and replayed as CUDA graphs
Format = Literal["fp16", "bf16", "fp32"]  # of floating-point numbers
Tracker = Literal["tensorboard", "wandb", "mlflow", "ray"]
Split = Literal["even", "balanced"] | tuple[int, ...]  # layers to stages: a rule, or a count for each stage
Context = Literal["ring", "all_gather", "ulysses", "rsa"]  # how attention reaches all tokens of a divided sequence
SEND_WINDOW = 8  # sends to one peer that may be under way before an actor waits; every schedule is checked for it
KEPT = 4  # number of training steps whose events an actor keeps
LEARNED = "learned tokens"
TOKENS = ("tokens", LEARNED)  # units of throughput that are tokens
ELEMENTS = ("tokens", "targets", LEARNED)  # units of throughput that are elements of targets; all others are samples


def format_watched(chosen: Format | None, compute: Format = "fp32") -> Format:
    """Return the number format whose overflow a run counts: the chosen one, else that of the computation.

    A run in fp32 counts whether fp16 would be enough.
    """
    return chosen or ("fp16" if compute == "fp32" else compute)


def names_cross_entropy(loss: str) -> bool:
    """Return whether a name of a loss is that of a cross-entropy, as torch spells it for functions and for classes."""
    return "crossentropy" in loss.lower().replace("_", "")
