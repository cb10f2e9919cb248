"""A folder with a model of Hugging Face: config.json, and safetensors files whose headers say where tensors are."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raypar.actors.errors import CheckpointError
from raypar.actors.hugging_face.conversions import TABLES
from raypar.actors.machine.files import AT_ONCE, checkpoint_errors, open_named
from raypar.actors.safetensors_header import ITEM, FileTensor, read_beginning
from raypar.schedules.schedule import first_faults

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"  # of a folder of PEFT
BASE = "raypar_base"  # key of an adapter's metadata: the fingerprint of the weights that it was trained on
WHAT_HAS = {  # the files of a folder, by the one that says what it holds
    CONFIG: f"a model's folder has {CONFIG}, {SINGLE} (or several with an index) and the tokenizer's files; give one"
    " that save_pretrained has written, or that was downloaded whole",
    ADAPTER_CONFIG: f"an adapter's folder has {ADAPTER_CONFIG} and {ADAPTER}; give one that PEFT or raypar ckpt export"
    " --adapter has written",
}
_ONLY_ADAPTER = "{folder!r} holds an adapter, and not the model: give the model's folder, and this one as model.lora.hf"
_PLAIN = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_MOST_JSON = 64 << 20
_SAFE = (
    "transformers can: python -c \"from transformers import AutoModelForCausalLM as M; M.from_pretrained('{folder}')"
    ".save_pretrained('{folder}-safetensors')\""
)


def read_config(folder: Path, name: str = CONFIG) -> dict[str, Any]:
    """Read the file that says what a folder holds: a model, or with ADAPTER_CONFIG an adapter.

    Raises:
        CheckpointError: It is missing, or no JSON object. The error says what the folder lacks.
    """
    with checkpoint_errors(f"{str(folder)!r} can't be read"):
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else None
    if names is not None and name in names:
        return read_json(folder / name)
    lacks = "is no folder" if names is None else f"has no {name}" if names else "is an empty folder"
    if name == CONFIG and ADAPTER_CONFIG in (names or ()):
        raise CheckpointError([_ONLY_ADAPTER.format(folder=str(folder))])
    raise CheckpointError([f"{str(folder)!r} {lacks}: {WHAT_HAS[name]}"])


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object. Raises CheckpointError if it is none, or is too long."""
    with checkpoint_errors(f"{str(path)!r} can't be read"), open_named(path) as file:
        raw = file.read(_MOST_JSON + 1)
    try:
        found = json.loads(raw) if len(raw) <= _MOST_JSON else None
    except (ValueError, RecursionError) as error:
        raise CheckpointError([f"{str(path)!r} is not JSON ({error}): copy it again"]) from error
    if not isinstance(found, dict):
        raise CheckpointError([f"{str(path)!r} is no JSON object of at most {_MOST_JSON} bytes: give a model's folder"])
    return found


def model_type_of(folder: Path) -> str:
    """Return the type of the model in a folder, of raypar or of transformers. Raises CheckpointError if it has none."""
    found = read_config(folder).get("model_type")
    if not isinstance(found, str) or not found:
        raise CheckpointError([f"{str(folder / CONFIG)!r} has no model_type: copy it again"])
    return found


def tensors_in(folder: Path, model_type: str) -> dict[str, FileTensor]:
    """Return where the tensors of a model are, by name, from the headers of its files.

    Args:
        folder: The folder.
        model_type: Type of the model. Names get the prefix that some folders leave out.

    Raises:
        CheckpointError: Files are missing, end early, or are no safetensors; or names lead out of the folder. The error
            lists the first faults.
    """
    index = _index(folder)
    faults: list[str] = []
    found: dict[str, FileTensor] = {}
    for file in sorted(set(index.values())) if index else [SINGLE]:
        if not _PLAIN.fullmatch(file):
            faults.append(f"{INDEX} names the file {file[:80]!r}, which leaves the folder: no such file is read")
            continue
        if index and not (folder / file).exists():
            count = sum(other == file for other in index.values())
            faults.append(f"{file} is missing, in which {INDEX} has {count} tensors: copy it into {str(folder)!r}")
            continue
        try:
            inside, _ = _tensors_of(folder, file)
        except CheckpointError as error:
            faults += error.faults
            continue
        wanted = {name for name, other in index.items() if other == file} if index else inside.keys()
        if missing := sorted(wanted - inside.keys()):
            faults.append(f"{file} has no {missing[0]!r}, which {INDEX} has there ({len(missing)} are missing)")
        found |= {name: kept for name, kept in inside.items() if name in wanted}
    CheckpointError.raise_if(first_faults(faults))
    prefix = TABLES[model_type].prefix if model_type in TABLES else ""
    if prefix and not any(name.startswith(prefix) for name in found):
        found = {name if name.startswith("lm_head.") else f"{prefix}{name}": kept for name, kept in found.items()}
    return found


def same_bytes(folder: Path, one: FileTensor, other: FileTensor) -> bool:
    """Return whether two tensors in a folder have the same dtype, shape and bytes. Raises CheckpointError."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    left = math.prod(one.shape) * ITEM.get(one.dtype, 0)
    with (
        checkpoint_errors(f"{str(folder)!r} can't be read"),
        open_named(folder / one.file) as ours,
        open_named(folder / other.file) as theirs,
    ):
        ours.seek(one.start)
        theirs.seek(other.start)
        while left:
            count = min(left, AT_ONCE)
            if ours.read(count) != theirs.read(count):
                return False
            left -= count
    return True


def adapters_in(folder: Path) -> tuple[dict[str, FileTensor], str]:
    """Return where the tensors of an adapter are, by name, and the fingerprint of the weights that it belongs to.

    Args:
        folder: The folder. A missing fingerprint is "".

    Raises:
        CheckpointError: It has no adapter, or a broken one.
    """
    if not (folder / ADAPTER).exists():
        message = f"{str(folder)!r} has no {ADAPTER}"
        if (folder / "adapter_model.bin").exists():
            how = "load it with peft, and write it with save_pretrained(folder, safe_serialization=True)"
            message += f" but adapter_model.bin, a pickle, which can run code and is not read: {how}"
        else:
            message += f": {WHAT_HAS[ADAPTER_CONFIG]}"
        raise CheckpointError([message])
    found, metadata = _tensors_of(folder, ADAPTER)
    base = metadata.get(BASE)
    return found, base if isinstance(base, str) else ""


def _index(folder: Path) -> Mapping[str, str]:
    """Return the file of each tensor; empty if one file has all, which is read alone even if there is an index too.

    Raises:
        CheckpointError: There are no safetensors files, or the index is broken.
    """
    if (folder / SINGLE).exists():
        return {}
    if not (folder / INDEX).exists():
        raise CheckpointError([_no_weights(folder)])
    found = read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(file, str) for file in found.values()):
        raise CheckpointError([f"{str(folder / INDEX)!r} has no weight_map of names and files: copy it again"])
    return found


def _no_weights(folder: Path) -> str:
    """Return a message that names the folder's unreadable weights, and how to convert them."""
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    message = f"{str(folder)!r} has no {SINGLE}"
    if pickled := [name for name in names if re.fullmatch(r"pytorch_model.*\.(bin|json)|.*\.(pt|pth|ckpt)", name)]:
        how = _SAFE.format(folder=folder)
        return f"{message} but {pickled[0]}, a pickle, which can run code and is not read: convert it; {how}"
    if other := [name for name in names if name.endswith((".gguf", ".h5", ".msgpack", ".onnx"))]:
        return f"{message} but {other[0]}: convert it with transformers, from_pretrained(...).save_pretrained(...)"
    if ADAPTER_CONFIG in names:
        return _ONLY_ADAPTER.format(folder=str(folder))
    return f"{message}: give a folder that save_pretrained has written, or that was downloaded whole"


def _tensors_of(folder: Path, file: str) -> tuple[dict[str, FileTensor], dict[str, str]]:
    """Return the tensors and the metadata of a safetensors file. Raises CheckpointError if it is not sound."""
    with checkpoint_errors(f"{str(folder / file)!r} can't be read"), open_named(folder / file) as opened:
        return read_beginning(opened.fileno(), file)
