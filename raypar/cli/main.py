"""The command line: ``raypar train``, ``step``, ``verify``, ``draw``, ``check``, ``simulate``, ``report`` and more."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, ClassVar, TextIO

from raypar.cli.words.help_text import HELP

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
_MORE = "raypar plan tells bytes and seconds, and compares levels of ZeRO"

_PAPER = ("draw", "check", "simulate")
_RUNS = ("train", "sft", "step", "verify", "plan")
_SIDES = ("gallery", "compare")
_TEXTS = ("generate", "chat", "eval")
_DISK = ("ckpt", "data", "report", "trace")
_COMMANDS = (*_PAPER, *_RUNS, *_DISK, *_SIDES, *_TEXTS, "recipes", "doctor", "calibrate")
_OF_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)  # errors of paths that nothing can have
_MEANT = {"repl": "step", "shell": "step", "resume": "train --resume", "run": "train"}


def run_command(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: The words after ``raypar``; None for those of this process.

    Returns:
        The exit code, see HELP.
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
        return _fail(f"a command is missing\n\n{HELP}", MISTAKE)
    command, rest = words[0], words[1:]
    if command in _PAPER:
        return _on_paper(command, rest)
    if command in _RUNS:
        with _messages(), _terminable():
            return _with_actors(command, rest)
    if command in _TEXTS:
        with _messages(logging.ERROR), _terminable():
            return _with_actors(command, rest)
    if command in _DISK:
        return _on_disk(command, rest)
    if command == "recipes":
        return _recipes(rest)
    if command in _SIDES:
        return _side_by_side(command, rest)
    if command == "doctor":
        return _doctor(rest)
    if command == "calibrate":
        return _calibrate(rest)
    if command in ("-h", "--help", "help"):
        return _say(HELP, end="")
    if command == "--version":
        return _say(f"raypar {version('raypar')}")
    from raypar.config.recipes import RECIPES
    from raypar.schedules.nearest_name import nearest

    close = _MEANT.get(command) or nearest(command, _COMMANDS)
    close = f"train {command}" if command in RECIPES or command.endswith(".toml") else close
    guess = f"did you mean {close!r}?" if close else "see raypar --help"
    return _fail(f"there is no command {command!r}: {guess}", MISTAKE)


def _on_paper(command: str, words: list[str]) -> int:
    from raypar.cli.schedules import schedules
    from raypar.schedules.schedule import ScheduleError

    try:
        if command == "draw":
            with _messages():
                drawing = schedules.draw(words, terminal=sys.stdout.isatty())
            return _say(drawing, styled=sys.stdout.isatty())
        return _say(schedules.prove(words) if command == "check" else schedules.measure(words))
    except ScheduleError as error:
        return _fail(str(error), MISTAKE)


def _side_by_side(command: str, words: list[str]) -> int:
    from raypar.cli.schedules.compare import compare
    from raypar.cli.schedules.gallery import gallery
    from raypar.errors import ConfigError

    try:
        return _say(gallery(words) if command == "gallery" else compare(words))
    except ConfigError as error:
        return _fail(_mistakes(error.faults), MISTAKE)


def _recipes(words: list[str]) -> int:
    from raypar.cli.recipes import recipes

    if words and not {"-h", "--help"} & set(words):
        return _fail(f"recipes takes no {words[0]!r}: raypar train RECIPE --dry-run says more of one", MISTAKE)
    return _say(recipes())


def _doctor(words: list[str]) -> int:
    from raypar.cli import doctor
    from raypar.errors import ConfigError

    try:
        with _messages(), _terminable():
            return OK if doctor.run_doctor(words, _say) else DIFFERENT
    except ConfigError as error:
        return _fail(_mistakes(error.faults), MISTAKE)


def _calibrate(words: list[str]) -> int:
    from raypar.cli import calibrate
    from raypar.errors import ConfigError, JobError

    try:
        with _messages(logging.WARNING), _terminable():
            return _say(calibrate.run_calibrate(words, _say))
    except ConfigError as error:
        return _fail(_mistakes(error.faults), MISTAKE)
    except JobError as error:
        return _fail(str(error).partition("\nTraceback ")[0], FAILED, error)


def _on_disk(command: str, words: list[str]) -> int:
    from raypar.cli import checkpoints, run_folder
    from raypar.errors import ConfigError

    try:
        if command == "data":
            from raypar.cli import data

            with _messages():
                return _say(data.show(words, terminal=sys.stdout.isatty()), styled=sys.stdout.isatty())
        if command != "ckpt":
            written = run_folder.run_report_or_trace(command, words, _say)
            said = _say(written.text)
            return _fail(_mistakes(written.lost), MISTAKE) if written.lost else said
        outcome = checkpoints.run_ckpt(words)
    except ConfigError as error:
        return _fail(_mistakes(error.faults), MISTAKE)
    _say(outcome.text)
    return OK if outcome.sound else DIFFERENT


def _mistakes(faults: Sequence[str]) -> str:
    return faults[0] if len(faults) == 1 else "\n- ".join([f"{len(faults)} mistakes:", *faults])


def _with_actors(command: str, words: list[str]) -> int:
    from raypar.actors.errors import NonFiniteError
    from raypar.cli.train import short_runs, train
    from raypar.errors import ConfigError, JobError, RoomError

    try:
        if command == "verify":
            verdict = short_runs.run_verify(words)
            _say(str(verdict))
            return OK if verdict.ok else DIFFERENT
        if command == "plan":
            from raypar.cli.plan.planning import run_plan

            return _say(run_plan(words))
        if command == "step":
            short_runs.step(words)
            return OK
        if command == "eval":
            from raypar.cli.text.evaluate import evaluate

            return _say(_table(evaluate(words)), styled=True)
        if command in _TEXTS:
            from raypar.cli.text import generate

            say = partial(_say, styled=not sys.stdout.isatty())  # a file gets the text as the model has written it
            generate.generate(words, say) if command == "generate" else generate.chat(words, say, input)
            return OK
        if command == "sft":
            from raypar.cli.train import finetune

            outcome = finetune.sft(words, terminal=sys.stdout.isatty())
        else:
            outcome = train.train(words, terminal=sys.stdout.isatty())
        if isinstance(outcome, train.DryRunOutcome):
            needs = f"{_table(outcome.rows)}\n\n{printable(outcome.verdict)}; no actor was started\n{_MORE}"
            return _say(f"{outcome.picture}\n\n{needs}", styled=sys.stdout.isatty())
        said = _say(_table(outcome.rows), styled=True)
        return _fail(outcome.lost, FAILED) if outcome.lost else said
    except RoomError as error:
        return _fail(f"no room, no step was taken:\n{error}", NO_ROOM)
    except ConfigError as error:
        from raypar.cli.words.flags import named_as_typed

        count = "a mistake" if len(error.faults) == 1 else f"{len(error.faults)} mistakes"
        return _fail(f"{count}, no step was taken:\n{ConfigError(named_as_typed(error.faults, words))}", MISTAKE)
    except NonFiniteError as error:
        return _fail(str(error), NOT_FINITE, error)
    except JobError as error:
        return _fail(str(error).partition("\nTraceback ")[0], FAILED, error)


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


if __name__ == "__main__":
    sys.exit(run_command())
