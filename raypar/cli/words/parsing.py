"""Parse the words of a command that trains: the run they start from, and the flags and tables that change it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import tyro

from raypar.actors.specs.data import Examples
from raypar.actors.specs.lora import Lora
from raypar.actors.specs.model import GPT, Layers, Llama, RopeScaling, Transformer
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.run import Run
from raypar.cli.words.flags import HELP, is_base, read_flags
from raypar.cli.words.help_text import Help, Wording
from raypar.config.expert_layout_names import layout
from raypar.config.fields import FieldFault, collected
from raypar.config.hugging_face.config_reader import HF
from raypar.config.recipes import depth
from raypar.config.toml import of_kind, read_run, read_table
from raypar.errors import ConfigError
from raypar.paths import RUN, holds_run

A = TypeVar("A", bound=Run)
_TABLES: Mapping[str, Callable[[], Any]] = {"moe": MoE, "rope_scaling": RopeScaling, "lora": Lora}


def read_tables(model: GPT | Llama | Layers, words: Sequence[str]) -> tuple[GPT | Llama | Layers, list[str]]:
    """Read which tables a model has: ``--model.moe none`` takes its experts away, a flag of their fields gives it some.

    Args:
        model: The model that flags change.
        words: The words of a command line.

    Returns:
        The model with its tables, and the words that are left for the parser.
    """
    left = list(words)
    for field, make in _TABLES.items():
        before, flag = len(left), f"--model.{field.replace('_', '-')}"
        for at in range(len(left) - 1, -1, -1):
            given = [word.lower().replace("_", "-") for word in left[at : at + 2]]
            if given[0] == f"{flag}=none" or given == [flag, "none"]:
                del left[at : at + (1 if "=" in given[0] else 2)]
        if isinstance(model, Transformer):
            table = None if len(left) < before else getattr(model, field)
            if table is None and any(word.replace("_", "-").startswith(f"{flag}.") for word in left):
                table = make()
            changes: dict[str, Any] = {field: table}
            model = replace(model, **changes)
    return model, left


@dataclass(frozen=True)
class Parsed(Generic[A]):
    """The words of a command.

    Attributes:
        args: What they say, without what is wrong in them.
        wrong: What is wrong in them and in the file that they name, for ``check_run``.
    """

    args: A
    wrong: Sequence[FieldFault]


_OTHER_PARTS = {
    "train moe-small": "experts (--model.moe)",
    "train llama-small": "a Llama",
    "sft": "fine-tuning (--model.lora, --data.template)",
}


def parse(
    kind: type[A],
    words: Sequence[str],
    command: str,
    what: str,
    fallback: str,
    table: dict[str, Any] | None = None,
    known: Mapping[str, Run] | None = None,
    defaults: Mapping[str, Any] = MappingProxyType({}),
    wording: Wording | None = None,
    others: Sequence[str] = (),
) -> Parsed[A]:
    """Parse the words of a command.

    The run that the flags change, called the base, gives the flags their defaults, so it must be known first. It is
    usually the first word. If it turns out to be another word, parse again with that base.

    Args:
        kind: The class to parse, with the fields of Run and one word without a flag, ``base``.
        words: The words after the command.
        command: The command's name.
        what: What the command does, for its help.
        fallback: Name of the base if the words have none.
        table: Fields that change a recipe or a file's defaults.
        known: Further bases by name, beside recipes and files.
        defaults: What fields of a recipe or a file are where it does not say.
        wording: What the help of a command says whose run is always the one of its fallback.
        others: Names of flags that the command takes out of the words before.

    Raises:
        HelpAsked: The words ask for help.
        ConfigError: They ask for help about a subject that there is not.
    """

    runs = known or {}

    def parsed(base: str) -> Parsed[A]:
        """Parse the words with this base."""
        default, wrong = (runs[base], []) if base in runs else _base(base, table or {}, defaults)
        default = _with_whole_parts(default, words, wrong, goes_on=base in runs)
        model, left = read_tables(default.model, words)
        default = replace(default, model=model)
        parts: dict[str, Any] = {field.name: getattr(default, field.name) for field in fields(Run)} | {"base": base}
        named = base not in runs
        about = what if wording else f"{what} {_what_flags_change(base if named else None)}"
        Help(command, about, kind, kind(**parts), True, named, _more(command), wording).raise_if_asked(words)
        sound, faults = read_flags(kind, left, default, wrong, has_word=named, others=others)
        return Parsed(_with_flags(kind(**parts), sound, command), [*wrong, *faults])

    first = words[0] if words and not words[0].startswith("-") else fallback
    if HELP & {*words}:
        first = fallback if wording else next((word for word in words if is_base(word)), first)
    done = parsed(first)
    base: str = getattr(done.args, "base")  # noqa: B009  (Run has none)
    return done if base == first else parsed(base)


def _with_flags(default: A, words: Sequence[str], command: str) -> A:
    """Return the arguments of a command with the flags of words, which have no faults."""
    with warnings.catch_warnings():
        if isinstance(default.model, Layers):  # of transformers' modules, which no flag describes
            warnings.filterwarnings("ignore", "<class '.*Layers'> does not match", UserWarning)
        config = (tyro.conf.AvoidSubcommands,)
        return tyro.cli(type(default), config=config, args=words, default=default, prog=f"raypar {command}")


def _more(command: str) -> str:
    """Return which commands show the flags of parts that the run of a command's help does not have."""
    others = (f"raypar {words} --help all, {what}" for words, what in _OTHER_PARTS.items() if words != command)
    return f"Flags of other parts: {'; '.join(others)}."


def _what_flags_change(base: str | None) -> str:
    """Say what flags change, and whose defaults help shows: those of a recipe or a file, or of a checkpoint (None)."""
    if base is None:
        return "Flags change the run of the checkpoint; defaults below are its own."
    return f"Flags change the recipe or the file; defaults below are those of {base}."


def _with_whole_parts(default: Run, words: Sequence[str], wrong: list[FieldFault], *, goes_on: bool) -> Run:
    """Return a run with the kinds, the depth and the layout that words name; add what is wrong with them to faults."""
    for changed in (_with_folder_elsewhere if goes_on else _of_folder, _of_kinds, _of_depth):
        default, unfit = changed(default, words)
        wrong += unfit
    for one in values_of("--layout", words):
        with collected("layout", wrong):
            default = replace(default, **(layout(one) if one and not one.startswith("--") else {}))
    return default


def _of_folder(default: Run, words: Sequence[str]) -> tuple[Run, list[FieldFault]]:
    """Return a run with the model of the folder that words name; and faults."""
    wrong = list[FieldFault]()
    for one in _folders(words):
        with collected("model.hf", wrong):
            default = replace(default, model=HF(one, **_given(words)))
    return default, wrong


def _with_folder_elsewhere(default: Run, words: Sequence[str]) -> tuple[Run, list[FieldFault]]:
    """Return a run whose model's folder, and the tokenizer in it, are where words name it now; and faults.

    All else of the model stays, as its adapters and its sequence length do.
    """
    wrong = list[FieldFault]()
    for one in _folders(words):
        model, data = default.model, default.data
        with collected("model.hf", wrong):
            HF(one, **_given(words))  # raises what is wrong with the folder
            if isinstance(data, Examples) and model.hf is not None and data.tokenizer == model.hf:
                default = replace(default, data=replace(data, tokenizer=one))
            default = replace(default, model=replace(model, hf=one))
    return default, wrong


def _folders(words: Sequence[str]) -> Iterator[str]:
    """Yield the folders that ``--model.hf`` names."""
    return (one for one in values_of("--model.hf", words) if one and one != "none" and not one.startswith("--"))


def _of_kinds(default: Run, words: Sequence[str]) -> tuple[Run, list[FieldFault]]:
    """Return a run with the kinds of model, data and optimizer that words name; and faults."""
    wrong = list[FieldFault]()
    for part in ("model", "data", "optim"):
        for one in values_of(f"--{part}.kind", words):
            with collected(f"{part}.kind", wrong):
                default = replace(default, **{part: of_kind(part, one, getattr(default, part))})
    return default, wrong


def _of_depth(default: Run, words: Sequence[str]) -> tuple[Run, list[FieldFault]]:
    """Return the run of the depth that words name, with the data of the run that it replaces; and faults."""
    for one in values_of("--depth", words):
        if not re.fullmatch(r"-?\d+", one) or int(one) == 0:
            continue  # no number, which is reported with the other flags; or none is wanted
        given = {"dp": [*values_of("--mesh.dp", words)], "vocab": [*values_of("--model.vocab", words)]}
        numbers = {name: int(values[-1]) for name, values in given.items() if values and values[-1].isdigit()}
        try:
            found = depth(int(one), **numbers)
        except ConfigError as error:
            return default, [FieldFault("depth", text, of_type=True) for text in error.faults]
        return replace(found, data=default.data), []
    return default, []


def _given(words: Sequence[str]) -> dict[str, float]:
    """Return the dropout that the words give, which a folder's own may contradict."""
    try:
        return {"dropout": float([*values_of("--model.dropout", words)][-1])}
    except (ValueError, IndexError):
        return {}


def values_of(flag: str, words: Sequence[str]) -> Iterator[str]:
    """Yield the values of a flag."""
    for word, after in zip(words, [*words, ""][1:], strict=True):
        if word == flag:
            yield after
        elif word.startswith(f"{flag}="):
            yield word.partition("=")[2]


def _base(
    name: str, table: dict[str, Any], defaults: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Run, list[FieldFault]]:
    """Return the run of a recipe, a file or a run folder, without what is wrong in it, and the faults of that."""
    try:
        if table and holds_run(Path(name)):  # of a run folder the run, but not how long it was
            return read_run(read_table(Path(name) / RUN) | table)
        if Path(name).suffix == ".toml":
            return read_run({**defaults, **table, **read_table(Path(name))})
    except ConfigError as error:  # it can't be read at all
        return Run(), [FieldFault("", text, of_type=True) for text in error.faults]
    if not table and holds_run(Path(name)):
        text = f"{name!r} is a run folder: go on with --resume {name}, or take it once more with {Path(name) / RUN}"
        return Run(), [FieldFault("", text, of_type=True)]
    run, wrong = read_run({"recipe": name, **defaults, **table})
    other = "a file whose name ends in .toml" + (", or a run folder" if table else "")
    return run, [FieldFault("", f"{fault.text}; or give {other}", of_type=True) for fault in wrong]
