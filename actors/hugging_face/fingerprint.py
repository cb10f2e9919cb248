"""A fingerprint of the weights in a folder of Hugging Face, by which adapters identify their base model."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import torch

from raypar.actors.hugging_face.folder import model_type_of, tensors_in
from raypar.actors.hugging_face.weights import DTYPES
from raypar.actors.machine.files import checkpoint_errors, open_named
from raypar.actors.safetensors_header import ITEM

_SAMPLE = 32  # elements that are read of a tensor, at its beginning and in its middle


def fingerprint(folder: Path) -> str:
    """Return a hash of the names, shapes and some elements of all weights; their files and dtype do not matter.

    Elements are rounded to bfloat16, so that a copy in another dtype has the same fingerprint.

    Args:
        folder: The folder.

    Raises:
        CheckpointError: It can't be read.
    """
    digest, files = hashlib.sha256(), dict[str, list[tuple[str, int, int]]]()
    kept = tensors_in(folder, model_type_of(folder))
    samples = dict[str, bytes]()
    for name, one in kept.items():
        size, item = math.prod(one.shape), ITEM.get(one.dtype, 0)
        for at in sorted({0, max(0, size // 2 - _SAMPLE)}) if item else ():
            files.setdefault(one.file, []).append((name, one.start + at * item, min(_SAMPLE, size - at) * item))
    for file, reads in files.items():
        with checkpoint_errors(f"{str(folder / file)!r} can't be read"), open_named(folder / file) as opened:
            for name, start, count in reads:
                opened.seek(start)
                raw = bytearray(opened.read(count))
                values = torch.frombuffer(raw, dtype=DTYPES[kept[name].dtype]) if raw else torch.empty(0)
                rounded = values.to(torch.bfloat16).view(torch.int16).numpy().tobytes()
                samples[name] = samples.get(name, b"") + rounded
    for name in sorted(kept):
        digest.update(repr((name, kept[name].shape)).encode() + samples.get(name, b""))
    return digest.hexdigest()
