"""The files beside the weights in a folder of Hugging Face: model card, tokenizer, and the token that ends a text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from raypar.actors.errors import CheckpointError
from raypar.actors.hugging_face.folder import read_json
from raypar.actors.machine.files import open_named, write_whole
from raypar.actors.specs.data import Batches
from raypar.actors.specs.model import GPT, Layers, Llama
from raypar.actors.specs.run import Run
from raypar.checkpoint.find import VerifiedCheckpoint

_GENERATION, _TOKENIZER, _SETTINGS = "generation_config.json", "tokenizer.json", "tokenizer_config.json"


_TEMPLATE = "chat_template.jinja"
_NAMED_TEMPLATES = "additional_chat_templates"  # a folder of further ones
_OF_WEIGHTS = (  # files of a folder that the weights came from, which stay as they are
    *(_GENERATION, _TOKENIZER, _SETTINGS, _TEMPLATE, "chat_template.json", "tokenizer.model", "added_tokens.json"),
    *("special_tokens_map.json", "vocab.json", "vocab.txt", "merges.txt"),
)
_OF_TOKENIZER = (_SETTINGS, "special_tokens_map.json", _TEMPLATE)  # settings of a tokenizer, beside tokenizer.json


def write_files_beside(run: Run, origin: str | None, folder: Path) -> None:
    """Copy the files that a tokenizer and a generation need, from the folder of the first weights or of the tokenizer.

    For a model that began with random weights, generation_config.json gets the token that ends a text, if there is one.

    Args:
        run: The run.
        origin: The folder of the weights that training began with; None if they were random numbers.
        folder: The folder to write.
    """
    templates = None if origin is None else Path(origin)  # the folder of named templates
    if templates is not None:
        _copy_named(_OF_WEIGHTS, templates, folder)
    tokenizer = getattr(run.data, "tokenizer", None)
    if tokenizer is not None and not (folder / _TOKENIZER).exists():
        path = Path(tokenizer)
        file, beside = (path / _TOKENIZER, path) if path.is_dir() else (path, path.parent)
        _copy_named(_OF_TOKENIZER, beside, folder)
        if file.is_file():
            _copy(file, folder / _TOKENIZER)
        templates = beside
    template = getattr(run.data, "template", None)
    if template is not None and Path(template).is_file():
        _copy(Path(template), folder / _TEMPLATE)  # the run has used this one alone
    elif templates is not None:
        _copy_templates(templates, folder)
    if origin is None and (end := _end_of(folder)) is not None:
        write_whole(folder / _GENERATION, [memoryview(json.dumps({"eos_token_id": end}).encode())])


def _copy_named(names: Sequence[str], source: Path, folder: Path) -> None:
    """Copy those of these files that a folder has."""
    for name in names:
        if (source / name).is_file():
            _copy(source / name, folder / name)


def _copy_templates(source: Path, folder: Path) -> None:
    """Copy the chat templates of a folder that have names."""
    for path in sorted(path for path in (source / _NAMED_TEMPLATES).glob("*.jinja") if path.is_file()):
        (folder / _NAMED_TEMPLATES).mkdir(exist_ok=True)
        _copy(path, folder / _NAMED_TEMPLATES / path.name)


def _copy(path: Path, to: Path) -> None:
    with open_named(path) as file:
        write_whole(to, [memoryview(file.read())])


def _end_of(folder: Path) -> int | None:
    """Return the id of the token that ends a text; None if the tokenizer's files do not say one."""
    named = object_in(folder / _SETTINGS).get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    added = object_in(folder / _TOKENIZER).get("added_tokens")
    tokens = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    found = [one.get("id") for one in tokens if text is not None and one.get("content") == text]
    return found[0] if found and isinstance(found[0], int) else None


def object_in(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is none."""
    try:
        return read_json(path)
    except CheckpointError:
        return {}


def is_function(plain: Mapping[str, Any], part: str) -> bool:
    """Return whether the model or the data of a run, as plain data, is a function of the user."""
    return isinstance(plain.get(part), Mapping) and "fn" in plain[part]


def origin_of(plain: Mapping[str, Any]) -> str | None:
    """Return the folder whose weights a run, as plain data, began with; None if they were random."""
    origin: str | None = plain["model"].get("hf")
    return None if origin == "none" else origin


def model_card(
    found: VerifiedCheckpoint, run: Run, model: GPT | Llama | None, kind: str, dtype: str, loss: float | None
) -> str:
    """Return the model card, the README.md of a folder of Hugging Face.

    Args:
        found: The checkpoint.
        run: The run that trained the model. Its data are not looked at if those were batches of a function.
        model: The model; None for one of the modules of transformers.
        kind: Its type at Hugging Face.
        dtype: Dtype of the weights.
        loss: The last loss of the run in nats per token; None if it is not known.
    """
    step, origin = found.manifest.step, origin_of(found.manifest.run)
    if not step:
        data = "none, as no step was taken"
    elif is_function(found.manifest.run, "data") or isinstance(run.data, Batches):
        data = "batches of a function"
    else:
        data = run.data.path if isinstance(run.data.path, str) else ", ".join(run.data.path)
    each = run.microbatches * run.micro_batch_size * run.mesh.dp
    sizes, length = "its sizes are in config.json", ""
    if model is not None:
        sizes = f"{model.layers} layers, hidden {model.hidden}, {model.heads} heads, vocabulary {model.vocab}"
        length = f" of up to {model.seq} tokens"
    rows = {
        "type": f"{kind}: {sizes}",
        "weights": dtype,
        "began with": f"the weights in {origin}" if origin else "random weights",
        **_learned(run),
        "data": data,
        "steps": f"{step} of {run.steps}, of {each} sequences{length}",
        "loss": "not known" if loss is None else f"{loss:.4f} nats per token in the last step",
        "layout": f"pp={run.mesh.pp} dp={run.mesh.dp} cp={run.mesh.cp} tp={run.mesh.tp} ep={run.mesh.ep}, "
        f"zero {run.zero or 0}, {run.precision.compute}",
        "seed": str(run.seed),
    }
    table = "\n".join(f"| {name} | {text} |" for name, text in rows.items())
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\n---\n\n# A model trained with raypar\n\n"
        f"| | |\n|---|---|\n{table}\n"
    )


def _learned(run: Run) -> Mapping[str, str]:
    """Return the row with the trained adapters; {} if all weights were trained."""
    if isinstance(run.model, Layers) or (lora := run.model.lora) is None:
        return {}
    adapters = f"low-rank adapters of {', '.join(lora.layers)}, rank {lora.rank}, alpha {lora.alpha:g}"
    return {"learned": f"{adapters}, which are added to the weights here"}
