"""The command line: ``raypar train``, ``step``, ``verify``, ``draw``, ``check``, ``simulate``, ``report`` and more."""

from __future__ import annotations

import errno
import io
import logging
import os
import pkgutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from raypar.cli.commands import COMMANDS, Command
from raypar.reporting.screen import (
    ScreenHandler,
    console_of,
    folded_below,
    in_colors,
    plain_rows,
    printable,
    show_rows,
    show_text,
    without_colors,
)

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
_VERBOSE = {"-v", "--verbose"}
_MORE = "raypar plan shows bytes and seconds, and compares levels of ZeRO"

_OF_PATHS = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)  # errors of paths that nothing can have
_MEANT = {"repl": "step", "shell": "step", "resume": "train --resume", "run": "train"} | dict.fromkeys(
    ["finetune", "fine-tune", "tune", "lora"], "sft"
)


def run_command(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: The words after ``raypar``; None for those of this process.

    Returns:
        The exit code, see --help.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")  # of a terminal or pipe without UTF-8, as standard error is
    try:
        return _command(words)
    except SystemExit as stop:  # tyro has printed a wrong flag, or SIGTERM has come
        if stop.code == signal.SIGTERM:
            return _stopped("terminated", TERMINATED, stop)
        _say("", end="")
        return stop.code if isinstance(stop.code, int) else MISTAKE
    except KeyboardInterrupt as pressed:
        return _stopped("interrupted", INTERRUPTED, pressed)
    except OSError as error:
        if error.errno not in _OF_PATHS or not isinstance(error.filename, str):
            raise
        path = error.filename if len(error.filename) < _LONG else f"{error.filename[: _LONG - 3]}..."
        return _fail(f"{path!r} can't be a path here ({error.strerror}): give another one", MISTAKE)


def _command(words: list[str]) -> int:
    if not words:
        return _fail(f"a command is missing\n\n{_help_text()}", MISTAKE)
    name, rest = words[0], words[1:]
    if name in ("-h", "--help", "help"):
        asked, *about = [word for word in rest if not word.startswith("-")] or [""]
        return _command([asked, "--help", *about]) if asked else _say_help(_help_text())
    if name == "--version":
        from importlib.metadata import version  # takes as long to import as all else that help needs

        return _say(f"raypar {version('raypar')}")
    if name not in COMMANDS:
        return _fail(f"there is no command {name!r}: {_meant(name)}", MISTAKE)
    command = COMMANDS[name]
    with ExitStack() as stack:
        if command.level is not None:
            verbose = bool(_VERBOSE & {*rest})
            stack.enter_context(_messages(command.level, announces=command.announces, verbose=verbose))
        if command.has_actors:
            from raypar.cluster.interrupts import answered

            stack.enter_context(answered())
            stack.enter_context(_terminable())
        return _run(command, rest)


def _help_text() -> str:
    """Return what ``raypar --help`` prints: the commands, examples and the exit codes."""
    from raypar.cli.words.columns import fitted, terminal_width

    return fitted(Path(__file__).with_name("help.txt").read_text().rstrip(), terminal_width())


def _meant(name: str) -> str:
    """Say which command may be meant by one that there is not."""
    from raypar.config.recipe_tables import ENDINGS, RECIPES
    from raypar.schedules.nearest_name import did_you_mean

    if name.endswith(ENDINGS):
        return f"did you mean {f'sft {name} --model FOLDER'!r}?"
    meant = f"train {name}" if name in RECIPES or name.endswith(".toml") else _MEANT.get(name)
    return f"did you mean {meant!r}?" if meant else did_you_mean(name, COMMANDS, "see raypar --help", spelled=repr)


def _run(command: Command, words: list[str]) -> int:
    """Run a command, and return the exit code; what users can mend, and how an actor has failed, is printed."""
    try:
        return _print_outcome(_outcome(command, words), styled=command.is_styled and sys.stdout.isatty())
    except Exception as error:
        code = _code_of(error, command, words)
        if code is None:
            raise
        return code


def _code_of(error: Exception, command: Command, words: list[str]) -> int | None:
    """Print the error that ends a command, and return the exit code; None if it is raypar's own mistake."""
    from raypar.actors.errors import NonFiniteError
    from raypar.cli.words.help_text import HelpAsked
    from raypar.errors import ConfigError, JobError, RoomError
    from raypar.schedules.schedule import ScheduleError

    match error:
        case HelpAsked():
            return _say_help(str(error))
        case ScheduleError():
            return _fail(str(error), MISTAKE)
        case RoomError():
            return _fail(f"no room{', no step was taken' if command.has_steps else ''}:\n{error}", NO_ROOM)
        case ConfigError():
            from raypar.cli.words.flags import named_as_typed

            faults = named_as_typed(error.faults, words)
            if not command.has_steps or "--help" in words or "-h" in words:
                return _fail(_mistakes(faults), MISTAKE)
            count = "a mistake" if len(faults) == 1 else f"{len(faults)} mistakes"
            return _fail(f"{count}, no step was taken:\n{ConfigError(faults)}", MISTAKE)
        case NonFiniteError():
            return _fail(str(error), NOT_FINITE, error)
        case JobError():
            return _fail(str(error).partition("\nTraceback ")[0], FAILED, error)
    return None


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
            return _say_rows(rows)
        case object(picture=picture, rows=rows, verdict=verdict):  # of a dry run
            _say(f"{picture}\n", styled=sys.stdout.isatty())
            _say_rows(rows)
            return _say(f"\n{verdict}; no actor was started\n{_MORE}")
        case object(rows=rows, lost=lost, follow=follow):  # of a run that took all its steps
            said = _say_rows(rows)
            if follow:
                said = _say(f"next: {follow}", wraps=False)
            return _fail(lost, FAILED) if lost else said
        case object(text=text, sound=is_sound):
            said = _say(text)
            return said if is_sound else DIFFERENT
        case object(ok=is_equal):  # of verify
            _say(str(outcome))
            return OK if is_equal else DIFFERENT
    raise TypeError(f"a command returned a {type(outcome).__name__}")


def _write(text: str, end: str = "\n") -> int:
    """Print what a model has written; a file gets it as it is."""
    return _say(text, end, styled=not sys.stdout.isatty(), wraps=False)


class _Messages(ScreenHandler):
    """Prints log messages to standard error, and an error as the sentence that ends the command, ahead of its end.

    Attributes:
        errors: The errors that were printed.
    """

    errors: ClassVar[set[str]] = set()

    def __init__(self, *, verbose: bool = False) -> None:
        super().__init__(verbose=verbose)
        self.errors.clear()

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a record."""
        text = record.getMessage()
        if record.levelno < logging.ERROR:
            return printable(text)
        self.errors.add(text)
        return printable(f"raypar: {text}")


@contextmanager
def _messages(level: int = logging.INFO, *, announces: bool = False, verbose: bool = False) -> Iterator[None]:
    """Print raypar's log messages of a level and above to standard error while a command runs, and those of signals.

    Args:
        level: The level.
        announces: Whether to print which actors start, and what they wait for, also if the level is higher.
        verbose: Whether a terminal gets all messages whole.
    """
    logger, handler = logging.getLogger("raypar"), _Messages(verbose=verbose)
    own_levels = {"interrupts": logging.WARNING, "lifecycle": logging.INFO if announces else logging.NOTSET}
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(level)
    for name, own in own_levels.items():
        logging.getLogger(f"raypar.cluster.{name}").setLevel(own)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        for name in own_levels:
            logging.getLogger(f"raypar.cluster.{name}").setLevel(logging.NOTSET)
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


def _say_rows(rows: Rows) -> int:
    """Print rows of a name and a figure, and return the exit code."""
    console = console_of(sys.stdout)
    return _printed(
        partial(print, plain_rows(rows), flush=True) if console is None else partial(show_rows, console, rows)
    )


def _say(text: str, end: str = "\n", *, styled: bool = False, wraps: bool = True) -> int:
    """Print to standard output and return the exit code.

    Args:
        text: The text.
        end: What follows it.
        styled: Whether control characters in it are meant as such, as colours are. Then lines with some stay as they
            are.
        wraps: Whether a terminal gets lines that end between words.
    """
    console = console_of(sys.stdout)
    if styled and console is not None:
        text = folded_below(text, console)
        text = text if in_colors(sys.stdout) else without_colors(text)
    console = console if wraps and not styled and end == "\n" else None
    text = text if styled else printable(text)
    return _printed(partial(print, text, end=end, flush=True) if console is None else partial(show_text, console, text))


def _printed(write: Callable[[], None]) -> int:
    """Call what prints to standard output, and return the exit code. A closed pipe, as by ``head``, is no error."""
    try:
        write()
    except BrokenPipeError:
        return _hush()
    except OSError as error:
        _hush()
        return _fail(f"standard output can't be written ({error.strerror})", FAILED)
    return OK


def _say_help(text: str) -> int:
    """Print help, with flags, commands and titles in bold on a terminal."""
    text, console = printable(text), console_of(sys.stdout)
    if console is None:
        return _say(text)
    from rich.text import Text

    shown = Text(text)
    shown.highlight_regex(r"(?m)^ *(--?[a-z]\S*(, --\S+)*|raypar [a-z]+)|^\S.*:$", "bold")
    with console.capture() as captured:
        console.print(shown, soft_wrap=True, end="")
    return _say(captured.get(), styled=True)


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
        _complain(f"raypar: {text}")
    for note in getattr(error, "__notes__", []):
        _complain(note, "note")
    return code


def _complain(text: str, style: str = "") -> None:
    """Print to standard error."""
    console = console_of(sys.stderr)
    if console is None:
        print(printable(text), file=sys.stderr)
    else:
        show_text(console, printable(text), style)


if __name__ == "__main__":
    sys.exit(run_command())
