"""The file raypar/cli/shells/flags.json, made from the table of commands and the classes of their arguments.

python -m tests.support.completed_flags
"""

from __future__ import annotations

import json
import pkgutil
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from textwrap import shorten
from typing import Any

from raypar.actors.specs.data import Examples
from raypar.actors.specs.lora import Lora
from raypar.actors.specs.model import GPT, Llama, RopeScaling
from raypar.actors.specs.moe import MoE
from raypar.actors.specs.optim import SGD, Muon
from raypar.actors.specs.run import Run
from raypar.cli.commands import COMMANDS
from raypar.cli.completion import TABLE, Completed, CompletedFlag
from raypar.cli.train.finetune import WORDING
from raypar.cli.words.flag_fields import FlagField, blank, flag_fields, word_alone
from raypar.cli.words.help_text import Help
from raypar.config.recipe_tables import RECIPES
from raypar.planner.hardware.data_sheets import DEVICES, LINKS
from raypar.schedules.catalog import CATALOG

_LONG = 72  # characters of what a flag does
_NUMBER = re.compile("[NX]([|: ].*)?")  # or several of them
_PARTS: Sequence[dict[str, Any]] = (  # each with other fields
    {},
    {"model": GPT(moe=MoE())},
    {"model": Llama(rope_scaling=RopeScaling(), lora=Lora())},
    {"optim": SGD()},
    {"optim": Muon()},
    {"data": Examples("")},
)


_NAMES: Mapping[str, tuple[Sequence[str], str]] = {  # what texts may be, and whether they are words or files
    "schedule": ([*CATALOG], "words and files"),
    "gpu": ([*DEVICES], "words"),
    "between": ([*LINKS], "words"),
}


def table() -> str:
    """Return the text of the file: each flag once, and of each command the numbers of its flags, and its words."""
    commands = [
        _completed(f"{name} {part}".strip(), pkgutil.resolve_name(f"raypar.cli.{kind}"))
        for name, command in COMMANDS.items()
        for part, kind in command.arguments.items()
    ]
    rows = {json.dumps(astuple(flag)): None for one in commands for flag in one.flags}
    numbers = {row: at for at, row in enumerate(rows)}
    taken = [[one.name, [numbers[json.dumps(astuple(flag))] for flag in one.flags], one.words] for one in commands]
    flags, lines = ",\n".join(rows), ",\n".join(map(json.dumps, taken))
    return f'{{"flags": [\n{flags}\n], "commands": [\n{lines}\n]}}\n'


def fields_of_every_part(kind: type) -> list[FlagField]:
    """Return the fields that flags set with any model, data and optimizer, each once.

    Args:
        kind: The class of a command's arguments.
    """
    parts = _PARTS if issubclass(kind, Run) else ({},)
    found = dict[str, FlagField]()
    for part in parts:
        for one in flag_fields(kind, blank(kind, **part)):
            found.setdefault(one.path, one)
    return [*found.values()]


def _completed(name: str, kind: type) -> Completed:
    metavar = word_alone(kind)[1]
    words = RECIPES if "RECIPE" in metavar else CATALOG if "SCHEDULE" in metavar else ()
    flags = list[CompletedFlag]()
    without = WORDING.without if name == "sft" else ()
    fields = [one for one in fields_of_every_part(kind) if one.path not in without]
    for one in fields:
        choices = one.choices
        takes = "words" if choices else "number" if _NUMBER.fullmatch(one.value) else "file" if one.value else ""
        if one.path in _NAMES:
            choices, takes = _NAMES[one.path]
        about = shorten(one.about, _LONG, placeholder="...")
        flags.append(CompletedFlag(one.spelled, one.short, about, choices, takes))
        if one.off:
            flags.append(CompletedFlag(one.off, "", f"not: {about}", (), ""))
    if name == "sft":
        flags.append(CompletedFlag("--model", "", "folder of a model of Hugging Face", (), "file"))
    subjects = Help(name, "", kind, blank(kind), is_run=issubclass(kind, Run)).subjects(fields)
    flags.append(CompletedFlag("--help", "-h", "flags of the command; all, or those about a word", subjects, "words"))
    return Completed(name, flags, [] if name == "sft" else [*words])


if __name__ == "__main__":
    TABLE.write_text(table())
