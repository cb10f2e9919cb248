"""Write the adapters of a checkpoint as a folder of PEFT, without the weights of the model that they belong to."""

from __future__ import annotations

import json
from os import PathLike
from pathlib import Path
from typing import Any

from raypar.actors.hugging_face.conversions import adapters_converted, converted
from raypar.actors.hugging_face.folder import ADAPTER, ADAPTER_CONFIG, BASE
from raypar.actors.machine.files import checkpoint_errors, whole_folder, write_whole
from raypar.actors.specs.lora import LORA, is_adapter
from raypar.checkpoint.base import base_faults
from raypar.checkpoint.find import VerifiedCheckpoint
from raypar.checkpoint.hugging_face import demand_exportable
from raypar.errors import ConfigError
from raypar.paths import absolute


def export_adapter(found: VerifiedCheckpoint, folder: str | PathLike[str]) -> Path:
    """Write the adapters of a checkpoint as PEFT reads them, in float32. The folder appears when it is complete.

    Args:
        found: The checkpoint.
        folder: The folder. It must not exist yet, or be empty.

    Returns:
        The folder's path.

    Raises:
        ConfigError: It has no adapters, they are no modules of PEFT's, or the folder is taken. Lists all faults.
        CheckpointError: The checkpoint can't be read, or the folder can't be written. No file is left.
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
    names = [name for name in found.manifest.tensors if is_adapter(name) and not name.startswith("optim.")]
    conversions = adapters_converted(kind, names)
    for name in names:
        if name not in conversions:
            layer = f"{name.rpartition(LORA)[0]}.weight"
            (one,) = converted(kind, [layer]).values()
            is_part = (
                f"export: a {kind} has {one.theirs} in one, of which {layer} is a part, and PEFT no adapter of a part"
            )
            raise ConfigError([*faults, f"{is_part}: leave adapter out, which merges them into the model"])
        theirs = conversions[name].theirs
        targets[theirs.rsplit(".", 3)[1]] = None
        tensors[theirs] = source.read(found.manifest.tensors[name]).float()
    ConfigError.raise_if(faults)
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
    metadata = {"format": "pt"} | ({BASE: found.manifest.base} if found.manifest.base else {})
    with checkpoint_errors(f"{str(path)!r} can't be written"), whole_folder(path) as aside:
        write_whole(aside / ADAPTER_CONFIG, [memoryview(json.dumps(config, indent=2).encode())])
        write_whole(aside / ADAPTER, [memoryview(save(tensors, metadata))])
    return path
