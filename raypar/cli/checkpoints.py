"""The commands for checkpoints on disk: ``raypar ckpt ls``, ``run_ckpt_verify`` and ``run_export``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from raypar.actors.errors import CheckpointError
from raypar.actors.specs.types import Format
from raypar.checkpoint import find
from raypar.checkpoint.check import checkpoint_faults as faults_of
from raypar.cli.train.resuming import checkpoint_at
from raypar.cli.words.arguments import Arguments, CommandOutcome, parse_command
from raypar.cli.words.columns import fitted, terminal_width
from raypar.cli.words.flags import HELP
from raypar.cli.words.help_text import HelpAsked
from raypar.errors import ConfigError
from raypar.paths import checkpoints_in, holds_run, run_folder_of, step_of
from raypar.reporting.run_folder.read import salvage
from raypar.schedules.formatting import size

_LS = "List the checkpoints of a folder or a run, newest first. Their shards are not read."
_VERIFY = "Read every byte of a checkpoint, or of all checkpoints of a folder or a run, and report all faults."
_EXPORT = "Write a checkpoint, or the newest one of a run, as a folder of Hugging Face, which transformers loads."
_USAGE = f"""\
usage: raypar ckpt COMMAND [...]

  raypar ckpt ls FOLDER  {_LS}
  raypar ckpt verify PATH  {_VERIFY}
  raypar ckpt export RUN FOLDER  {_EXPORT}"""


@dataclass(frozen=True)
class LsArgs(Arguments):
    """The words after ``raypar ckpt ls``."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """a run folder, or a folder of checkpoints"""


@dataclass(frozen=True)
class VerifyArgs(LsArgs):
    """The words after ``raypar ckpt verify``."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="PATH")]
    """a checkpoint, a run folder, or a folder of checkpoints"""


@dataclass(frozen=True)
class ExportArgs(Arguments):
    """The words after ``raypar ckpt export``."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN FOLDER")]
    """a run folder, a folder of checkpoints or a checkpoint; and the folder to write, which must not exist yet"""
    dtype: Format | None = None
    """dtype of the weights; None: the one that the run computes in"""
    ema: bool = False
    """write the moving averages of the weights, which a run with ema keeps"""

    adapter: bool = False
    """write the adapters alone, as PEFT reads them, instead of merging them into the model"""

    def faults(self) -> Iterator[str]:
        """Yield whether a path is missing, or one too many, and what does not go together."""
        if len(self.paths) != 2:
            yield f"{len(self.paths)} paths are given: raypar ckpt export RUN FOLDER"
        if self.adapter and self.dtype not in (None, "fp32"):
            yield f"--dtype is {self.dtype}, and an adapter is written in fp32: leave it out"


def run_ckpt(words: Sequence[str]) -> CommandOutcome:
    """Run ``raypar ckpt``.

    Args:
        words: The words after ``ckpt``.

    Raises:
        ConfigError: There are no checkpoints at the path, or it can't be read.
    """
    if words and words[0] in HELP:
        raise HelpAsked(fitted(_USAGE, terminal_width()))
    commands: Mapping[str, tuple[Arguments, str, str]] = {
        "ls": (LsArgs(Path()), _LS, "FOLDER"),
        "verify": (VerifyArgs(Path()), _VERIFY, "PATH"),
        "export": (ExportArgs(()), _EXPORT, ""),
    }
    if not words or words[0] not in commands:
        given = f"there is no command {words[0]!r}" if words else "a command is missing"
        raise ConfigError(
            [f"{given}: raypar ckpt ls FOLDER, or raypar ckpt verify PATH, or raypar ckpt export RUN FOLDER"]
        )
    (blank, what, takes), name = commands[words[0]], f"ckpt {words[0]}"
    try:
        args = parse_command(blank, words[1:], name, what, takes and f"a path is missing: raypar {name} {takes}")
        if isinstance(args, ExportArgs):
            return run_export(args)
        assert isinstance(args, LsArgs)
        if others := find.instead_of(args.path):
            raise ConfigError([others])
        return run_ckpt_verify(args.path) if isinstance(args, VerifyArgs) else run_ls(args.path)
    except CheckpointError as error:
        raise ConfigError(error.faults) from error


def run_ls(folder: Path) -> CommandOutcome:
    """List the checkpoints of a folder or a run, newest first. Their shards are not read."""
    listed = find.ls(checkpoints_in(folder))
    if not listed and not holds_run(folder):
        raise ConfigError([f"{str(folder)!r} is no run folder and has no checkpoints: give another path"])
    lines = [
        f"{line.path.name}  {size(line.size)}  {line.tensors - line.of_optimizer:,} tensors of the model, "
        f"{line.of_optimizer:,} of the optimizer{_marked(line.faults)}"
        for line in listed
    ]
    return CommandOutcome("\n".join(lines) or "no checkpoints", not any(line.faults for line in listed))


def run_ckpt_verify(path: Path) -> CommandOutcome:
    """Read every byte of a checkpoint, or of all checkpoints of a folder or a run, and report all faults."""
    if step_of(path.absolute().name) is None:
        paths = [found for _, found in find.listed(checkpoints_in(path))]
        if not paths:
            raise ConfigError([f"there is no checkpoint in {str(path)!r}: give another path"])
    else:
        paths = [path]
    verdicts = {one: faults_of(one) for one in paths}
    return CommandOutcome("\n".join(_verdict_lines(verdicts)), not any(verdicts.values()))


def run_export(args: ExportArgs) -> CommandOutcome:
    """Write a checkpoint, or the newest one of a run, as a folder of Hugging Face."""
    from raypar.checkpoint.adapter_export import export_adapter
    from raypar.checkpoint.hugging_face import export as write

    path, folder = args.paths
    found = checkpoint_at(path, ema=args.ema)
    if args.adapter:
        text = f"{export_adapter(found, folder)}: the adapters after {found.manifest.step} steps; PEFT loads them"
        return CommandOutcome(text)
    written = write(found, folder, args.dtype, _last_loss(found))
    return CommandOutcome(f"{written}: the model after {found.manifest.step} steps; transformers loads it")


def _last_loss(found: find.VerifiedCheckpoint) -> float | None:
    """Return the loss of the last step before a checkpoint; None if its run folder has none."""
    folder = run_folder_of(found.path)
    metrics = [] if folder is None else salvage(folder)[0].metrics
    losses = [line["loss"] for line in metrics if line.get("loss") is not None and line["step"] < found.manifest.step]
    return losses[-1] if losses else None


def _verdict_lines(verdicts: dict[Path, list[str]]) -> Iterator[str]:
    for path, faults in verdicts.items():
        yield f"{path}: {'NOT SOUND' if faults else 'ok'}"
        yield from (f"- {fault}" for fault in faults)


def _marked(faults: list[str]) -> str:
    return f"  NOT SOUND: {faults[0]}" if faults else ""
