"""The commands of ``raypar``: which function runs each, and the classes whose fields are its flags."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple


class Command(NamedTuple):
    """A command.

    Attributes:
        function: The function that runs it, below raypar.cli; it takes the words after the command's name.
        arguments: The classes of its arguments, below raypar.cli, by the words that follow its name, "" for none.
        level: The least level of the log messages that are printed; None: logging is as Python has it.
        has_actors: Whether it starts actors, which SIGTERM ends as Ctrl-C does.
        announces: Whether the log says which actors start, whatever the level.
        has_steps: Whether it takes steps: a mistake says that none was taken.
        is_styled: Whether its text has colours if it is printed to a terminal.
    """

    function: str
    arguments: Mapping[str, str] = MappingProxyType({})
    level: int | None = None
    has_actors: bool = False
    announces: bool = False
    has_steps: bool = False
    is_styled: bool = False


_RUN = partial(Command, level=logging.INFO, has_actors=True, has_steps=True)
_TEXT = partial(Command, level=logging.ERROR, has_actors=True, announces=True)
COMMANDS = {  # in the order of help.txt, which describes them
    "train": _RUN("train.train:train", {"": "train.train:TrainArgs"}),
    "sft": _RUN("train.finetune:sft", {"": "train.train:TrainArgs"}),
    "step": _RUN("train.short_runs:step", {"": "words.run_args:RunArgs"}),
    "verify": _RUN("train.short_runs:run_verify", {"": "words.run_args:RunArgs"}),
    "generate": _TEXT("text.generate:generate", {"": "text.generate:GenerateArgs"}),
    "chat": _TEXT("text.generate:chat", {"": "text.generate:ChatArgs"}),
    "eval": _TEXT("text.evaluate:evaluate", {"": "text.evaluate:EvalArgs"}),
    "plan": _RUN("plan.planning:run_plan", {"": "plan.planning:PlanArgs"}, has_steps=False),
    "draw": Command("schedules.schedules:draw", {"": "schedules.schedules:DrawArgs"}, logging.INFO, is_styled=True),
    "check": Command("schedules.schedules:prove", {"": "schedules.schedules:CheckArgs"}),
    "simulate": Command("schedules.schedules:measure", {"": "schedules.schedules:SimulateArgs"}),
    "gallery": Command("schedules.gallery:gallery", {"": "schedules.gallery:GalleryArgs"}),
    "compare": Command("schedules.compare:compare", {"": "schedules.compare:CompareArgs"}),
    "recipes": Command("recipes:recipes"),
    "doctor": Command("doctor:run_doctor", {"": "doctor:DoctorArgs"}, logging.INFO, has_actors=True),
    "calibrate": Command("calibrate:run_calibrate", {"": "calibrate:CalibrateArgs"}, logging.WARNING, has_actors=True),
    "data": Command("data:show", {"show": "data:ShowArgs"}, logging.INFO, is_styled=True),
    "ckpt": Command(
        "checkpoints:run_ckpt",
        {"ls": "checkpoints:LsArgs", "verify": "checkpoints:VerifyArgs", "export": "checkpoints:ExportArgs"},
    ),
    "report": Command("run_folder:run_report", {"": "run_folder:ReportArgs"}),
    "trace": Command("run_folder:run_trace", {"": "run_folder:TraceArgs"}),
    "completion": Command("completion:completion"),
}
