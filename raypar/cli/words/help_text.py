"""The commands of ``raypar``, and what ``raypar --help`` prints of them, with examples and the exit codes."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import NamedTuple

_USAGE, _LINE = 46, 70  # characters of the columns


class Command(NamedTuple):
    """A command, or one of its uses.

    Attributes:
        function: The function that runs it, below raypar.cli; it takes the words after the command's name.
        line: What it does, for help.
        level: The least level of the log messages that are printed; None: logging is as Python has it.
        has_actors: Whether it starts actors, which SIGTERM ends as Ctrl-C does.
        has_steps: Whether it is about a run: a mistake in it says that no step was taken.
        is_styled: Whether its text has colours if it is printed to a terminal.
    """

    function: str
    line: str
    level: int | None = None
    has_actors: bool = False
    has_steps: bool = False
    is_styled: bool = False


def help_text(table: Mapping[str, Mapping[str, Command]]) -> str:
    """Return what ``raypar --help`` prints.

    Args:
        table: By heading, the commands by how they are used, from the name on.
    """
    groups = [
        "\n".join([f"{heading}:", *(_row(usage, command.line) for usage, command in commands.items())])
        for heading, commands in table.items()
    ]
    return "\n\n".join([_BEFORE, *groups, _AFTER])


def _row(usage: str, line: str) -> str:
    below = f"\n{' ' * (_USAGE + 2)}"
    lines = textwrap.wrap(line, _LINE, break_on_hyphens=False)
    return f"  {f'raypar {usage}':<{_USAGE}}{below.join(lines)}"


_BEFORE = """\
usage: raypar COMMAND [...]

Train PyTorch models in parallel with Ray actors."""

_AFTER = """\
  raypar COMMAND --help                         the flags of a command
  raypar --version

examples:
  raypar train gpt-tiny --mesh.pp 4 --schedule interleaved --folder runs/first
  raypar train gpt-tiny --mesh.dp 2 --data-parallel parameter_server --trace step.json
  raypar train --model.layers 12 --data.path 'books/*.txt' --optim.kind sgd --dry-run
  raypar train gpt-small --folder runs/second --save-every 20 --keep-last 3 --track tensorboard
  raypar train --resume runs/second
  raypar step gpt-tiny --schedule gpipe --microbatches 4
  raypar report runs/second
  raypar generate runs/second "def main(" --temperature 0.8
  raypar verify --schedule gpipe
  raypar draw 1f1b --ranks 4 --microbatches 8 --out 1f1b.svg

exit codes:
  0    done
  1    verify found a difference; ckpt found a checkpoint that is not sound; doctor found something wrong
  2    a mistake in flags, file or schedule; each is listed with its fix, and no step was taken (report shows the
       runs that it finds)
  4    the run failed: an actor died, stalled, or raised an error; or its last checkpoint could not be saved
  5    the cluster has no room for the actors, or had none in time: the same command may succeed later
  6    the gradients became infinite or NaN
  130  stopped with Ctrl-C, after a checkpoint if there is a folder; the actors are gone
  143  ended by SIGTERM, as with Ctrl-C; a second one ends the run at once
"""
