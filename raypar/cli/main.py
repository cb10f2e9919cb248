"""The command line: ``raypar train``, ``step``, ``verify``, ``draw``, ``check``, ``simulate``, ``report`` and more."""

from __future__ import annotations

import errno
import logging
import os
import pkgutil
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, ClassVar, TextIO

from raypar.cli.words.help_text import Command, help_text

if TYPE_CHECKING:
    from raypar.planner.resource_needs import Rows

OK = 0
DIFFERENT = 1
MISTAKE = 2
FAILED = 4
NO_ROOM = 5
NOT_FINITE = 6
INTERRUPTED = 130
TERMINATED = 143

_LONG = 80  # letters of a path that are shown
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tabs and line ends
_MORE = "raypar plan shows bytes and seconds, and compares levels of ZeRO"

_OF_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)  # errors of paths that nothing can have
_MEANT = {"repl": "step", "shell": "step", "resume": "train --resume", "run": "train"}


def run_command(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: The words after ``raypar``; None for those of this process.

    Returns:
        The exit code, see --help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _command(words)
    except SystemExit as stop:  # tyro has printed its help or a wrong flag, or SIGTERM has come
        if stop.code == signal.SIGTERM:
            return _stopped("terminated", TERMINATED, stop)
        _say("", end="")
        return stop.code if isinstance(stop.code, int) else MISTAKE
    except BrokenPipeError:
        if not {"-h", "--help"} & set(words):  # only tyro's help prints without _say
            raise
        return _hush()
    except KeyboardInterrupt as pressed:
        return _stopped("interrupted", INTERRUPTED, pressed)
    except OSError as error:
        if error.errno not in _OF_PATHS or not isinstance(error.filename, str):
            raise
        path = error.filename if len(error.filename) < _LONG else f"{error.filename[: _LONG - 3]}..."
        return _fail(f"{path!r} can't be a path here ({error.strerror}): give another one", MISTAKE)


def _command(words: list[str]) -> int:
    if not words:
        return _fail(f"a command is missing\n\n{help_text(_TABLE)}", MISTAKE)
    name, rest = words[0], words[1:]
    if name in ("-h", "--help", "help"):
        return _say(help_text(_TABLE), end="")
    if name == "--version":
        from importlib.metadata import version  # takes as long to import as all else that help needs

        return _say(f"raypar {version('raypar')}")
    if name not in _COMMANDS:
        return _fail(f"there is no command {name!r}: {_meant(name)}", MISTAKE)
    command = _COMMANDS[name]
    with ExitStack() as stack:
        if command.level is not None:
            stack.enter_context(_messages(command.level))
        if command.has_actors:
            stack.enter_context(_terminable())
        return _run(command, rest)


def _meant(name: str) -> str:
    """Say which command may be meant by one that there is not."""
    from raypar.config.recipes import RECIPES
    from raypar.schedules.nearest_name import did_you_mean

    meant = f"train {name}" if name in RECIPES or name.endswith(".toml") else _MEANT.get(name)
    return f"did you mean {meant!r}?" if meant else did_you_mean(name, _COMMANDS, "see raypar --help", spelled=repr)


def _run(command: Command, words: list[str]) -> int:
    """Run a command, and return the exit code; what users can mend, and how an actor has failed, is printed."""
    from raypar.actors.errors import NonFiniteError
    from raypar.errors import ConfigError, JobError, RoomError
    from raypar.schedules.schedule import ScheduleError

    try:
        return _print_outcome(_outcome(command, words), styled=command.is_styled and sys.stdout.isatty())
    except ScheduleError as error:
        return _fail(str(error), MISTAKE)
    except RoomError as error:
        return _fail(f"no room, no step was taken:\n{error}", NO_ROOM)
    except ConfigError as error:
        if not command.has_steps:
            return _fail(_mistakes(error.faults), MISTAKE)
        from raypar.cli.words.flags import named_as_typed

        count = "a mistake" if len(error.faults) == 1 else f"{len(error.faults)} mistakes"
        return _fail(f"{count}, no step was taken:\n{ConfigError(named_as_typed(error.faults, words))}", MISTAKE)
    except NonFiniteError as error:
        return _fail(str(error), NOT_FINITE, error)
    except JobError as error:
        return _fail(str(error).partition("\nTraceback ")[0], FAILED, error)


def _mistakes(faults: Sequence[str]) -> str:
    return faults[0] if len(faults) == 1 else "\n- ".join([f"{len(faults)} mistakes:", *faults])


def _outcome(command: Command, words: list[str]) -> object:
    """Run a command's function, which takes the words and, by name, what it needs of the terminal."""
    run = pkgutil.resolve_name(f"raypar.cli.{command.function}")  # whose imports --help does without
    terminal = {"terminal": sys.stdout.isatty(), "say": _say, "write": _write, "read": input}
    return run(words, **{name: terminal[name] for name in signature(run).parameters if name in terminal})


def _print_outcome(outcome: object, *, styled: bool) -> int:
    """Print what a command returns, by its shape, and return the exit code."""
    match outcome:
        case None:
            return OK
        case str(text):
            return _say(text, styled=styled)
        case bool(is_sound):
            return OK if is_sound else DIFFERENT
        case list(rows):
            return _say(_table(rows), styled=True)
        case object(picture=picture, rows=rows, verdict=verdict):  # of a dry run
            needs = f"{_table(rows)}\n\n{printable(verdict)}; no actor was started\n{_MORE}"
            return _say(f"{picture}\n\n{needs}", styled=sys.stdout.isatty())
        case object(rows=rows, lost=lost):  # of a run that took all its steps
            said = _say(_table(rows), styled=True)
            return _fail(lost, FAILED) if lost else said
        case object(text=text, sound=is_sound, lost=lost):
            said = _say(text)
            if lost:
                return _fail(_mistakes(lost), MISTAKE)
            return said if is_sound else DIFFERENT
        case object(ok=is_equal):  # of verify
            _say(str(outcome))
            return OK if is_equal else DIFFERENT
    raise TypeError(f"a command returned a {type(outcome).__name__}")


def _write(text: str, end: str = "\n") -> int:
    """Print what a model has written; a file gets it as it is."""
    return _say(text, end, styled=not sys.stdout.isatty())


class _Messages(logging.StreamHandler[TextIO]):
    """Prints log messages to standard error, and an error as the sentence that ends the command, ahead of its end.

    Attributes:
        errors: The errors that were printed.
    """

    errors: ClassVar[set[str]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.errors.clear()

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        text = record.getMessage()
        if record.levelno < logging.ERROR:
            return printable(text)
        self.errors.add(text)
        return printable(f"raypar: {text}")


@contextmanager
def _messages(level: int = logging.INFO) -> Iterator[None]:
    """Print raypar's log messages of a level and above to standard error while a command runs."""
    logger, handler = logging.getLogger("raypar"), _Messages()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])  # and forgets what it found to be enabled
        logger.propagate = before[1]


@contextmanager
def _terminable() -> Iterator[None]:
    """Make SIGTERM unwind the stack, as Ctrl-C does, so that the actors are ended."""
    from raypar.cluster.interrupts import Sigterm

    sigterm = Sigterm()
    before, notes = signal.signal(signal.SIGTERM, sigterm), list[str]()
    try:
        yield
    except BaseException as error:
        notes += getattr(error, "__notes__", [])
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        if sigterm.came:  # again, because Ray may have replaced the SystemExit by another error
            terminated = SystemExit(int(signal.SIGTERM))
            for note in notes:
                terminated.add_note(note)
            raise terminated


def _table(rows: Rows) -> str:
    """Format rows as a table for a terminal, and as plain lines otherwise."""
    rows = [(name, printable(figure)) for name, figure in rows]
    if not sys.stdout.isatty():
        return "\n".join(f"{name + ':':<22} {figure}" for name, figure in rows)
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for name, figure in rows:
        table.add_row(name, figure)
    console = Console()
    with console.capture() as captured:
        console.print(table, highlight=False)
    return captured.get().rstrip("\n")


def printable(text: str) -> str:
    """Return a text with its control characters, which may be commands to a terminal, spelled: a name may have some."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def _say(text: str, end: str = "\n", *, styled: bool = False) -> int:
    """Print to standard output and return the exit code. A closed pipe, as by ``head``, is no error.

    Args:
        text: The text.
        end: What follows it.
        styled: Whether control characters in it are meant as such, as colours are.
    """
    try:
        print(text if styled else printable(text), end=end, flush=True)
    except BrokenPipeError:
        return _hush()
    except OSError as error:
        _hush()
        return _fail(f"standard output can't be written ({error.strerror})", FAILED)
    return OK


def _hush() -> int:
    """Redirect standard output to /dev/null, for the flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return OK


def _stopped(how: str, code: int, error: BaseException) -> int:
    """Print that a signal has ended the command, and how to go on, which the notes of the error say if it had begun."""
    return _fail(how if getattr(error, "__notes__", ()) else f"{how}: the same command begins anew", code, error)


def _fail(text: str, code: int, error: BaseException | None = None) -> int:
    """Print why a command fails, unless the log has it already, and the notes of the error; return the exit code."""
    if text not in _Messages.errors:
        print(printable(f"raypar: {text}"), file=sys.stderr)
    for note in getattr(error, "__notes__", []):
        print(printable(note), file=sys.stderr)
    return code


_RUN = partial(Command, level=logging.INFO, has_actors=True, has_steps=True)
_TEXT = partial(Command, level=logging.ERROR, has_actors=True, has_steps=True)
_TABLE = {  # the commands by how they are used, under the headings of help
    "with actors": {
        "train [RECIPE|FILE.toml] [flags]": _RUN(
            "train.train:train",
            "train; recipes: gpt-tiny, gpt-small (default), gpt-124m, llama-tiny, llama-small, moe-tiny, moe-small",
        ),
        "sft EXAMPLES --model FOLDER [flags]": _RUN(
            "train.finetune:sft", "fine-tune a model of Hugging Face; flags are those of train"
        ),
        "step [RECIPE|FILE.toml] [flags]": _RUN(
            "train.short_runs:step", "a Python REPL in which you take a step action by action (gpt-tiny)"
        ),
        "verify [RECIPE|FILE.toml|RUN] [flags]": _RUN(
            "train.short_runs:run_verify", "compare a few steps with one plain process, bit by bit"
        ),
        'generate RUN|FOLDER "PROMPT" ...': _TEXT(
            "text.generate:generate", "go on with prompts; FOLDER: a checkpoint, or one of Hugging Face"
        ),
        "chat RUN|FOLDER": _TEXT("text.generate:chat", "answer in the terminal, token by token"),
        "eval RUN|FOLDER [DATA]": _TEXT(
            "text.evaluate:evaluate", "loss, perplexity and bits per byte on validation data, or on a file"
        ),
        "recipes": Command("recipes:recipes", "list the recipes with their sizes"),
        "doctor [--json] [--sweep]": Command(
            "doctor:run_doctor",
            "what is wrong with this machine or the cluster at RAY_ADDRESS",
            logging.INFO,
            has_actors=True,
        ),
        "calibrate [--out FILE] [--seconds N]": Command(
            "calibrate:run_calibrate",
            "measure this machine or cluster, for predictions in seconds",
            logging.WARNING,
            has_actors=True,
        ),
    },
    "without actors, in no time (SCHEDULE may be code of yours: my.py:function or package.module:function)": {
        "plan [RECIPE|FILE.toml] [flags]": _RUN(
            "plan.planning:run_plan",
            "memory by kind and bytes sent, at every level of ZeRO; "
            "with --gpus N the best layouts on a cluster on paper",
        ),
        "draw SCHEDULE|FILE.csv [flags]": Command(
            "schedules.schedules:draw", "draw a schedule: text, SVG, CSV, Chrome trace", logging.INFO, is_styled=True
        ),
        "check SCHEDULE|FILE.csv [flags]": Command("schedules.schedules:prove", "prove that a schedule can run"),
        "simulate SCHEDULE|FILE.csv [flags]": Command(
            "schedules.schedules:measure", "how long a schedule takes, and how much of it is bubble"
        ),
        "gallery [-o schedules.html]": Command(
            "schedules.gallery:gallery", "all schedules side by side: what each takes and holds"
        ),
        "compare A B [C ...] [-o both.html]": Command(
            "schedules.compare:compare", "some of them, or of yours: also versions, messages, where rows differ"
        ),
    },
    "examples, as a run learns them": {
        "data show EXAMPLES|RUN [flags]": Command(
            "data:show", "print sequences, with what is learned in colour", logging.INFO, is_styled=True
        ),
    },
    "checkpoints, which raypar train --folder FOLDER writes": {
        "ckpt ls FOLDER": Command("checkpoints:run_ckpt", "list them"),
        "ckpt verify PATH": Command("checkpoints:run_ckpt", "read every byte of one, or of all in a folder"),
        "ckpt export RUN FOLDER": Command("checkpoints:run_ckpt", "write one as a folder of Hugging Face"),
    },
    "run folders, which raypar train --folder RUN writes": {
        "report RUN [-o report.html]": Command(
            "run_folder:run_report", "one HTML file: losses, speed, times, memory, messages"
        ),
        "report RUN RUN ...": Command("run_folder:run_report", "one HTML file that compares runs"),
        "report RUN --live [--port N]": Command(
            "run_folder:run_report", "the same, served on 127.0.0.1 and refreshed while training goes on"
        ),
        "trace RUN [-o trace.json]": Command("run_folder:run_trace", "the latest measured step, for ui.perfetto.dev"),
    },
}
_COMMANDS = {usage.split()[0]: command for group in _TABLE.values() for usage, command in group.items()}


if __name__ == "__main__":
    sys.exit(run_command())
