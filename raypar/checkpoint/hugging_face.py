"""Write a checkpoint as a folder of Hugging Face, which transformers loads."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raypar.actors.checkpoint.logical import DTYPES, Logical
from raypar.actors.errors import CheckpointError
from raypar.actors.hugging_face.conversions import POSITIONS, WeightPart, converted, is_zero
from raypar.actors.hugging_face.folder import CONFIG, INDEX, SINGLE
from raypar.actors.machine.files import AT_ONCE, checkpoint_errors, whole_folder, write_whole
from raypar.actors.models.skeleton import Skeleton
from raypar.actors.portions import portions
from raypar.actors.safetensors_header import beginning_of
from raypar.actors.specs.lora import LORA
from raypar.actors.specs.model import GPT, Llama
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import Format
from raypar.checkpoint.base import base_faults
from raypar.checkpoint.files_beside import is_function, model_card, object_in, origin_of, write_files_beside
from raypar.checkpoint.find import VerifiedCheckpoint
from raypar.config.hugging_face.config_writer import config_of, type_of
from raypar.config.toml import run_of
from raypar.errors import ConfigError
from raypar.paths import absolute

if TYPE_CHECKING:
    from torch import Tensor

    from raypar.actors.checkpoint.assembler import Assembler
    from raypar.actors.hugging_face.weights import FolderWeights

SHARD = 5_000_000_000  # bytes of a file, as save_pretrained writes them; a larger tensor has a file of its own
_NEEDED_FIELDS = (  # fields of a run that its model and the card need
    *("model", "data", "optim", "steps", "seed"),
    *("mesh", "zero", "precision", "microbatches", "micro_batch_size"),
)
_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_TRANSPOSED = 8  # times as many, because all rows of the weight are read for some columns


@dataclass(frozen=True)
class _Part:
    """A weight of ours as a part of a tensor of theirs.

    Attributes:
        conversion: How it is a part.
        shape: Its shape.
        logical: Where it is in the checkpoint, perhaps its first rows alone; None if it is not there.
        base: What reads the rest instead; None for zeros.
        adapter: Where the first and the second half of its adapter are in the checkpoint, and the factor of these; None
            if it has none.
    """

    conversion: WeightPart
    shape: tuple[int, ...]
    logical: Logical | None
    base: FolderWeights | None = None
    adapter: tuple[Logical, Logical, float] | None = None


@dataclass(frozen=True)
class _Theirs:
    """A tensor of theirs.

    Attributes:
        name: Its name.
        parts: Its parts in order, all transposed or none.
    """

    name: str
    parts: Sequence[_Part]

    @property
    def is_transposed(self) -> bool:
        """Whether the tensor is (in, out)."""
        return self.parts[0].conversion.transposed

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        first = self.parts[0].shape
        whole = (first[0] * len(self.parts), *first[1:])
        return whole[::-1] if self.is_transposed else whole


def export(
    found: VerifiedCheckpoint,
    folder: str | PathLike[str],
    dtype: Format | None = None,
    loss: float | None = None,
    shard: int = SHARD,
) -> Path:
    """Write a checkpoint as a folder of Hugging Face: weights, config.json, what its tokenizer needs, a model card.

    Some megabytes of weights are in memory at a time. The folder appears when it is complete.

    Args:
        found: The checkpoint.
        folder: The folder. It must not exist yet, or be empty.
        dtype: Dtype of the weights; None for the one that the run computes in.
        loss: The last loss of the run, for the card; None if it is not known.
        shard: Bytes of a file at the most.

    Returns:
        The folder's path.

    Raises:
        ConfigError: The run has no model that Hugging Face has, or the folder is taken. Lists all faults.
        CheckpointError: The checkpoint can't be read, or the folder can't be written. No file is left.
    """
    path = absolute(folder)
    plain: Mapping[str, Any] = found.manifest.run
    run, model, kind = demand_exportable(plain, path)
    ConfigError.raise_if(f"export: {fault}" for fault in base_faults(run, found))
    chosen = dtype or run.precision.layers
    if model is None:
        config = (their_config(plain) or {}) | {"dtype": _NAMES[chosen]}
    else:
        config = config_of(model, kind, _begun(model), _NAMES[chosen])
    with checkpoint_errors(f"{str(path)!r} can't be written"), whole_folder(path) as aside:
        tensors = _merged(run, model, found, kind) if model and model.lora else _tensors(found.manifest.tensors, kind)
        if isinstance(model, GPT) and config["n_positions"] > model.seq:
            tensors = _with_later_positions(tensors, model, config["n_positions"])
        _write_weights(found, tensors, aside, DTYPES[_NAMES[chosen]], shard)
        write_whole(aside / CONFIG, [memoryview(_json(config))])
        card = model_card(found, run, model, kind, chosen, loss)
        write_whole(aside / "README.md", [memoryview(card.encode())])
        write_files_beside(run, origin_of(plain), aside)
    return path


def their_config(plain: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the config.json of a run's model if that is of the modules of transformers, as rp.HF gives it."""
    fn = plain["model"]["fn"]
    return json.loads(fn["config"]) if isinstance(fn, Mapping) and "config" in fn else None


def demand_exportable(plain: Mapping[str, Any], path: Path) -> tuple[Run, GPT | Llama | None, str]:
    """Return a run, its model (None for one of the modules of transformers), and its type at Hugging Face.

    Args:
        plain: The run as plain data.
        path: The folder to write.

    Raises:
        ConfigError: There is no such type, or the folder is taken. Lists all faults.
    """
    faults = list[str]()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        faults.append(f"{str(path)!r} is there already: give another folder, or remove it first")
    if not path.parent.is_dir():
        faults.append(f"{str(path.parent)!r} is no folder: create it, or give another path")
    own = {part for part in ("model", "data") if is_function(plain, part)}
    config = their_config(plain) if "model" in own else None
    if "model" in own and config is None:
        faults.append("the model is your own Layers, and only a GPT or a Llama is one of Hugging Face's")
        raise ConfigError([f"export: {fault}" for fault in faults])
    run = run_of({name: plain[name] for name in _NEEDED_FIELDS if name in plain and name not in own})
    assert isinstance(run.model, GPT | Llama)
    if config is not None and not faults:
        return run, None, config["model_type"]
    if run.model.lora is not None and run.model.hf is None:
        faults.append("the adapters are of random weights, which no checkpoint has: train them on rp.HF(folder)")
    kind, unfit = type_of(run.model, _begun(run.model).get("model_type"))
    if kind is None or faults:
        raise ConfigError([f"export: {fault}" for fault in (*faults, *unfit)])
    return run, run.model, kind


def _begun(model: GPT | Llama) -> dict[str, Any]:
    """Return the config.json of the folder that a model came from; nothing if there is none any more."""
    return {} if model.hf is None else object_in(Path(model.hf) / CONFIG)


def _tensors(tensors: Mapping[str, Logical], kind: str) -> list[_Theirs]:
    """Return the tensors of theirs that the weights of a checkpoint are, in the order of the weights' names.

    Raises:
        CheckpointError: A weight has no tensor.
    """
    weights = {name: one for name, one in tensors.items() if not name.startswith(("optim.", "buffers."))}
    weights.pop("loss_scale", None)
    shapes = {name: one.shape for name, one in weights.items()}
    for name, shape in [*shapes.items()]:
        bias = f"{name.removesuffix('weight')}bias"
        if is_zero(kind, bias):
            shapes.setdefault(bias, shape[:1])
    conversions, parts = converted(kind, shapes), defaultdict[str, list[_Part]](list)
    if unnamed := [name for name in shapes if name not in conversions]:
        raise CheckpointError([f"a {kind} has no tensor for weight {name!r}" for name in unnamed[:5]])
    for name, one in conversions.items():
        parts[one.theirs].append(_Part(one, shapes[name], weights.get(name)))
    return [_Theirs(name, sorted(of, key=lambda part: part.conversion.part)) for name, of in parts.items()]


def _merged(run: Run, model: GPT | Llama, found: VerifiedCheckpoint, kind: str) -> list[_Theirs]:
    """Return the tensors of theirs that adapters and the weights of the folder that they adapt are.

    Raises:
        CheckpointError: The folder with these weights can't be read.
    """
    from raypar.actors.hugging_face.weights import FolderWeights

    assert model.hf is not None and model.lora is not None
    base, kept, parts = FolderWeights(Path(model.hf)), found.manifest.tensors, defaultdict[str, list[_Part]](list)
    weights = Skeleton(model, run.seed).whole
    for name, one in converted(kind, weights).items():
        halves = [f"{name.removesuffix('.weight')}{LORA}.{half}.weight" for half in "ab"]
        adapter = None
        if all(half in kept for half in halves):
            adapter = (kept[halves[0]], kept[halves[1]], model.lora.scale)
        parts[one.theirs].append(_Part(one, tuple(weights[name].shape), None, base, adapter))
    return [_Theirs(name, sorted(of, key=lambda part: part.conversion.part)) for name, of in parts.items()]


def _with_later_positions(tensors: Sequence[_Theirs], model: GPT, count: int) -> list[_Theirs]:
    """Return the tensors with so many positions: the later ones are those of the initial weights."""
    from raypar.actors.hugging_face.weights import FolderWeights

    assert model.hf is not None
    base = FolderWeights(Path(model.hf))
    return [
        _Theirs(one.name, [replace(part, shape=(count, *part.shape[1:]), base=base) for part in one.parts])
        if one.parts[0].conversion.ours == POSITIONS
        else one
        for one in tensors
    ]


def _write_weights(found: VerifiedCheckpoint, tensors: Sequence[_Theirs], folder: Path, dtype: str, shard: int) -> None:
    """Write the files of the weights, and an index if there are several. Raises CheckpointError or OSError."""
    from raypar.actors.checkpoint.assembler import Assembler, ShardFolder

    item = 4 if dtype == "F32" else 2
    sizes = {one.name: math.prod(one.shape) * item for one in tensors}
    files = [*portions(tensors, lambda one: sizes[one.name], shard)]
    source, file_of = Assembler(ShardFolder(found.path)), dict[str, str]()
    for number, inside in enumerate(files, 1):
        name = SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        file_of |= {one.name: name for one in inside}
        write_whole(folder / name, _bytes_of(source, inside, sizes, dtype))
    if len(files) > 1:
        total = {"total_size": sum(sizes.values())}
        text = _json({"metadata": total, "weight_map": dict(sorted(file_of.items()))})
        write_whole(folder / INDEX, [memoryview(text)])


def _bytes_of(
    source: Assembler, tensors: Sequence[_Theirs], sizes: Mapping[str, int], dtype: str
) -> Iterator[memoryview]:
    """Yield the bytes of a safetensors file: length of the header, header, and each tensor, some rows at a time."""
    import torch

    kinds = {spelled: getattr(torch, name) for name, spelled in DTYPES.items()}
    header = [(one.name, dtype, one.shape, sizes[one.name]) for one in tensors]
    yield memoryview(beginning_of(header, {"format": "pt"}))
    for one in tensors:
        for rows in _columns_of(source, one) if one.is_transposed else _rows_of(source, one):
            yield rows.to(kinds[dtype]).contiguous().view(-1).view(torch.uint8).numpy().data


def _rows_of(source: Assembler, theirs: _Theirs) -> Iterator[Tensor]:
    """Yield a tensor some rows at a time, from parts one below the other."""
    for part in theirs.parts:
        rest = [[(0, size)] for size in part.shape[1:]]
        at_once = max(1, AT_ONCE // max(1, 4 * math.prod(part.shape[1:])))
        for start in range(0, part.shape[0], at_once):
            yield _read(source, part, [[(start, min(start + at_once, part.shape[0]))], *rest])


def _columns_of(source: Assembler, theirs: _Theirs) -> Iterator[Tensor]:
    """Yield a transposed tensor some rows at a time: columns of its parts, side by side."""
    import torch

    inputs = theirs.shape[0]
    at_once = max(1, _TRANSPOSED * AT_ONCE // max(1, 4 * theirs.shape[1]))
    for start in range(0, inputs, at_once):
        columns = [(start, min(start + at_once, inputs))]
        yield torch.cat([_read(source, part, [[(0, part.shape[0])], columns]).t() for part in theirs.parts], 1)


def _read(source: Assembler, part: _Part, spans: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Read some indices of a part, by dim, as theirs has it."""
    ours = _read_ours(source, part, spans)
    return ours.float().sub_(part.conversion.more) if part.conversion.more else ours


def _read_ours(source: Assembler, part: _Part, spans: Sequence[Sequence[tuple[int, int]]]) -> Tensor:
    """Read some indices of a part, by dim, as our weight has it."""
    import torch

    if part.logical is not None:
        if part.logical.shape == part.shape:
            return source.read_spans(part.logical, spans)
        count = part.logical.shape[0]
        here = [(start, min(stop, count)) for start, stop in spans[0] if start < count]
        later = [(max(start, count), stop) for start, stop in spans[0] if stop > count]
        read = [source.read_spans(part.logical, [here, *spans[1:]]).float()] if here else []
        if later:
            read.append(_read_ours(source, replace(part, logical=None), [later, *spans[1:]]))
        return torch.cat(read)
    found = torch.zeros([sum(stop - start for start, stop in dim) for dim in spans])
    if part.base is not None:
        part.base.read(part.conversion.ours, found, part.shape, spans)
    if part.adapter is not None:
        first, second, scale = part.adapter
        rows = source.read_spans(second, [spans[0], [(0, second.shape[1])]]).float()
        found.addmm_(rows, source.read_spans(first, [[(0, first.shape[0])], spans[1]]).float(), alpha=scale)
    return found


def _json(plain: Mapping[str, Any]) -> bytes:
    return json.dumps(plain, indent=2, ensure_ascii=False).encode()
