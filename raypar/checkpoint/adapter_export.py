"""Write the adapters of a checkpoint as a folder of PEFT, without the weights of the model that they belong to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from raypar.actors.files import told, whole_folder, write_whole
from raypar.actors.hugging_face.conversions import converted
from raypar.actors.specs.lora import LORA
from raypar.checkpoint.base import base_faults
from raypar.checkpoint.find import Found
from raypar.checkpoint.hugging_face import demand_exportable
from raypar.config.skeleton import Skeleton
from raypar.errors import ConfigError
from raypar.paths import absolute

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # of the names of PEFT, ahead of those of the model


def export_adapter(found: Found, folder: str | PathLike[str]) -> Path:
    """Write the adapters of a checkpoint as PEFT reads them, in float32. The folder appears when it is complete.

    Args:
        found: The checkpoint.
        folder: The folder. It must not exist yet, or be empty.

    Returns:
        The folder's path.

    Raises:
        ConfigError: It has no adapters, they are no modules of PEFT's, or the folder is taken. Lists all faults.
        CheckpointError: The checkpoint can't be read, or the folder can't be written. Nothing is left behind.
    """
    from safetensors.torch import save

    from raypar.actors.checkpoint.assembler import Assembler, ShardFolder

    path = absolute(folder)
    run, model, kind = demand_exportable(found.manifest.run, path)
    if model is None or model.lora is None:
        fix = "leave adapter out, which exports all weights"
        raise ConfigError([f"export: {str(found.path)!r} has no adapters: {fix}"])
    faults = [f"export: {fault}" for fault in base_faults(run, found)]
    source, tensors, targets = Assembler(ShardFolder(found.path)), dict[str, Any](), dict[str, None]()
    for name, one in converted(kind, Skeleton(model, run.seed).whole).items():
        halves = {half: f"{name.removesuffix('.weight')}{LORA}.{half}.weight" for half in "ab"}
        if not all(half in found.manifest.tensors for half in halves.values()):
            continue
        if one.parts > 1:
            told_as = (
                f"export: a {kind} has {one.theirs} in one, of which {name} is a part, and PEFT no adapter of a part"
            )
            raise ConfigError([*faults, f"{told_as}: leave adapter out, which merges them into the model"])
        module = one.theirs.removesuffix(".weight")
        targets[module.rpartition(".")[2]] = None
        for half, ours in halves.items():
            tensors[f"{_PREFIX}{module}.lora_{half.upper()}.weight"] = source.read(found.manifest.tensors[ours]).float()
    if faults:
        raise ConfigError(faults)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.hf,
        "r": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(targets),
    }
    _write(path, {CONFIG: json.dumps(config, indent=2).encode(), WEIGHTS: save(tensors, {"format": "pt"})})
    return path


def _write(path: Path, files: Mapping[str, bytes]) -> None:
    """Write a folder that appears when it is complete. Raises CheckpointError, and leaves nothing behind."""
    with told(f"{str(path)!r} can't be written"), whole_folder(path) as aside:
        for name, content in files.items():
            write_whole(aside / name, [memoryview(content)])
