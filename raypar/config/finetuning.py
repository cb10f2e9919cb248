"""The run that ``raypar sft`` begins with: a model of Hugging Face, examples, and settings that suit most cases."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from raypar.actors.data.examples.example_batches import open_sequences
from raypar.actors.data.text.text_files import TextError
from raypar.actors.hugging_face.folder import read_config
from raypar.actors.specs.data import Examples
from raypar.actors.specs.lora import Lora
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.optim import AdamW
from raypar.actors.specs.run import Run
from raypar.config.hugging_face.config_fields import FIELDS_BY_MODEL_TYPE
from raypar.config.hugging_face.config_reader import HF
from raypar.errors import ConfigError
from raypar.paths import absolute

_PASSES = 3  # over the examples, if no number of steps is given
_RATE, _FULL_RATE = 2e-4, 2e-5  # of adapters, and of all weights
_SEQ = 512
_EVALUATIONS = 5  # the share of the steps after which one comes, 1 / 5, rounded down
_WARMUPS = 20  # the share of the steps in which the learning rate rises, 1 / 20


def finetuning(path: str | Mapping[str, float], folder: str, *, adapters: bool = True) -> Run:
    """Return a run that fine-tunes a model.

    Args:
        path: The examples: a file, folder or glob, or several of these with their weights.
        folder: Folder of Hugging Face with the model and its tokenizer.
        adapters: Whether low-rank adapters learn; else all weights.

    Raises:
        ConfigError: The folder holds no model that raypar has. Lists all faults.
    """
    model = HF(folder, dropout=0.0)
    seq = min(model.seq or _SEQ, _SEQ)
    if isinstance(model, Layers):
        if adapters:
            why = "the modules of transformers have none here"
            raise ConfigError(
                [f"model.lora: {folder!r} is of a type without adapters, as {why}: give --model.lora none"]
            )
        model = replace(model, seq=seq)
    else:
        model = replace(model, seq=seq, lora=Lora() if adapters else None)
    return settings_of(model, Examples(path, tokenizer=folder), adapters=adapters)


def settings_of(model: GPT | Llama | Layers, data: Examples, *, adapters: bool) -> Run:
    """Return a run that fine-tunes a model, with settings that suit most cases.

    Args:
        model: The model, with adapters if these learn.
        data: The examples.
        adapters: Whether low-rank adapters learn; else all weights.
    """
    return Run(
        model=model,
        data=data,
        optim=AdamW(lr=_RATE if adapters else _FULL_RATE, decay="linear", final=0.0),
        micro_batch_size=1,
        microbatches=8,
        folder="auto",
    )


def derived_defaults() -> dict[str, str]:
    """Return in words, by path, the fields of a fine-tuning run that follow from its folder or its examples."""
    of_models = {name for family in FIELDS_BY_MODEL_TYPE.values() for name in family.known_fields}
    read = {
        name for name in (*of_models, "kind", "positions", "rope_base", "rope_scaling") if not name.startswith("moe")
    }
    return {f"model.{name}": "that of FOLDER" for name in sorted(read - {"dropout"})} | {
        "model.seq": f"that of FOLDER, at most {_SEQ}",
        "optim.lr": f"{_RATE:g}; {_FULL_RATE:g} with --model.lora none",
        "optim.warmup": f"1 / {_WARMUPS} of the steps",
        "steps": f"those of {_PASSES} passes over the examples",
        "eval_every": f"1 / {_EVALUATIONS} of the steps",
        "eval_steps": f"those that read all examples for validation once, at most {Run.eval_steps}",
    }


def lasting(run: Run, steps: int | None) -> Run:
    """Return a run whose steps pass three times over its examples, with a validation after each fifth of them.

    Args:
        run: The run.
        steps: The number of steps instead of that; None for three passes.
    """
    samples = max(1, run.mesh.dp * run.microbatches * run.micro_batch_size)
    train, val = _sequences(run)
    steps = max(1, math.ceil(_PASSES * train / samples)) if steps is None else steps
    return replace(
        run,
        steps=steps,
        eval_every=max(1, steps // _EVALUATIONS),
        eval_steps=min(Run.eval_steps, max(1, math.ceil(val / samples))),
        optim=replace(run.optim, warmup=steps // _WARMUPS),
    )


def shortened_positions(run: Run) -> str | None:
    """Say that a model with a table of positions has more of them than a run trains; None if it has not."""
    if not isinstance(run.model, GPT) or run.model.hf is None:
        return None
    config = read_config(absolute(run.model.hf))
    count = config.get("n_positions") or config.get("max_position_embeddings")
    if not isinstance(count, int) or count <= run.model.seq:
        return None
    return (
        f"the model has {count:,} positions, and sequences of {run.model.seq:,} tokens train the first alone: the "
        f"others stay as they are, also in an export; --model.seq {count} trains them too"
    )


def _sequences(run: Run) -> tuple[int, int]:
    """Return the number of sequences for training and validation; 0 if examples are faulty, which a check reports."""
    if not isinstance(run.data, Examples):  # a flag has made it text
        return 0, 0
    try:
        train, val = open_sequences(run.data, max(1, run.model.seq or 1))
    except TextError:
        return 0, 0
    return len(train), len(val)
