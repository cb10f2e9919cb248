"""The tables of the recipes, each a TOML file in ``recipe_files``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from shlex import quote
from typing import Any

from raypar.errors import ConfigError
from raypar.schedules.nearest_name import did_you_mean

_FOLDER = Path(__file__).with_name("recipe_files")
RECIPES: Mapping[str, str] = {  # what each is
    "gpt-tiny": "a run of seconds",
    "gpt-small": "a run of minutes on two CPU cores",
    "gpt-124m": "a run of GPT-2 small's size",
    "llama-tiny": "gpt-tiny with a Llama instead",
    "llama-small": "gpt-small with a Llama of 5.9 million parameters instead",
    "moe-tiny": "gpt-tiny with four experts instead of each MLP",
    "moe-small": "gpt-small with eight experts instead of each MLP",
}
ENDINGS = (".jsonl", ".parquet", ".arrow")  # of files of examples that are no files of runs
_MODELS = re.compile(
    r"(.*/)?(gpt-?2|(smollm|llama-?\d|bert|bloom|falcon|gemma|mistral|mixtral|opt-|phi-|pythia|qwen).*)"
)


def _in_a_folder(name: object) -> str:
    """Return how to use a model of Hugging Face, if this is the name of one; "" for other names."""
    is_model = isinstance(name, str) and _MODELS.fullmatch(name.lower())
    return "; for a model of Hugging Face give its folder: --model.hf FOLDER, or rp.HF(folder)" if is_model else ""


def _sized(name: object) -> str:
    """Return how to set the sizes of a model, if the name ends in a number of parameters; "" for other names."""
    is_size = isinstance(name, str) and re.search(r"\d[bm]$", name.lower())
    if not is_size:
        return ""
    if "llama" in str(name).lower():
        flags = "llama-small --model.layers 32 --model.hidden 4096 --model.heads 32 --model.kv-heads 8"
        flags += " --model.ffn 14336 --model.seq 8192 --model.vocab 128256 for a Llama-8B"
    else:
        flags = "gpt-small --model.layers 24 --model.hidden 2048 --model.heads 16"
        flags += " --model.seq 2048 --model.vocab 50304 for a GPT-1.3B"
    return f"sizes are flags of the model, as in {flags}; "


def _of_examples(name: object) -> str:
    """Return the command that learns from examples, if this is the name of a file of some; "" for other names."""
    if not isinstance(name, str | PathLike) or not str(name).endswith(ENDINGS):
        return ""
    fix = f"raypar sft {quote(str(name))} --model FOLDER"
    return f"for a file of examples give {fix}, or data=rp.Examples({str(name)!r}); "


def recipe_table(name: object) -> dict[str, Any]:
    """Return the table of a recipe, as a file for ``raypar train`` has it.

    Raises:
        ConfigError: There is no such recipe.
    """
    if name in [*RECIPES]:
        return tomllib.loads((_FOLDER / f"{name}.toml").read_text())
    if isinstance(name, str | PathLike) and (Path(name) / "config.json").exists():
        fix = f"use --model.hf {quote(str(name))}, or rp.HF({str(name)!r})"
        raise ConfigError([f"there is no recipe {str(name)!r}, but a folder of Hugging Face: {fix}"])
    sized, known = _of_examples(name) or _sized(name), f"known are {', '.join(RECIPES)}{_in_a_folder(name)}"
    fix = sized + known if sized else did_you_mean(str(name), RECIPES, known, spelled=repr, both=True)
    raise ConfigError([f"there is no recipe {name!r}: {fix}"])
