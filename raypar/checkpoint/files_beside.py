"""The files beside the weights in a folder of Hugging Face: those of a tokenizer, and the token that ends a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raypar.actors.errors import CheckpointError
from raypar.actors.hugging_face.folder import read_json
from raypar.actors.machine.files import open_named, write_whole
from raypar.actors.specs.run import Run

_GENERATION, _TOKENIZER, _SETTINGS = "generation_config.json", "tokenizer.json", "tokenizer_config.json"
_TEMPLATE = "chat_template.jinja"
_NAMED_TEMPLATES = "additional_chat_templates"  # a folder of further ones
_OF_WEIGHTS = (  # files of a folder that the weights came from, which stay as they are
    _GENERATION,
    _TOKENIZER,
    _SETTINGS,
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    _TEMPLATE,
    "chat_template.json",
)
_OF_TOKENIZER = (_SETTINGS, "special_tokens_map.json", _TEMPLATE)  # settings of a tokenizer, beside tokenizer.json


def write_files_beside(run: Run, origin: Path | None, folder: Path) -> None:
    """Copy the files that a tokenizer and a generation need, from the folder of the first weights or of the tokenizer.

    For a model that began with random weights, generation_config.json gets the token that ends a text, if there is one.

    Args:
        run: The run.
        origin: The folder of the weights that training began with; None if they were random numbers.
        folder: The folder to write.
    """
    templates = origin  # the folder of named templates
    if origin is not None:
        _copy_named(_OF_WEIGHTS, origin, folder)
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
    named = _object(folder / _SETTINGS).get("eos_token")
    text = named.get("content") if isinstance(named, dict) else named
    added = _object(folder / _TOKENIZER).get("added_tokens")
    tokens = [one for one in added if isinstance(one, dict)] if isinstance(added, list) else []
    found = [one.get("id") for one in tokens if text is not None and one.get("content") == text]
    return found[0] if found and isinstance(found[0], int) else None


def _object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; {} if there is none."""
    try:
        return read_json(path)
    except CheckpointError:
        return {}
