"""The command that evaluates: ``raypar eval`` prints loss, perplexity and bits per byte of a model on data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.data import Examples, Text
from raypar.actors.specs.run import Run
from raypar.actors.specs.types import DeviceChoice
from raypar.cli.text.trained_model import TOKENIZER, trained_model
from raypar.cli.train.resuming import its_run
from raypar.cli.words.arguments import given, parse_command
from raypar.errors import ConfigError
from raypar.paths import absolute
from raypar.planner.resource_needs import Rows
from raypar.reporting.loss_text import loss_text, metric_rows

if TYPE_CHECKING:
    from raypar.checkpoint.find import VerifiedCheckpoint

_WHAT = "Print loss, perplexity, bits per byte of a run, a checkpoint or a folder of Hugging Face on validation data."
_EXAMPLES = {".jsonl", ".json", ".parquet"}


@dataclass(frozen=True)
class EvalArgs:
    """The flags of ``raypar eval``."""

    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN|FOLDER [DATA]")] = ()
    """a run folder, a checkpoint, or a folder of Hugging Face; and a text file, or examples (.jsonl, .json, .parquet):
    without them the run's own validation data"""
    steps: int = 16
    """evaluation steps, each of a microbatch for each pipeline rank and replica"""
    micro_batch_size: int = 2
    """samples of a microbatch"""
    ema: bool = False
    """use the moving averages of the weights, which a run with ema keeps"""
    mesh: Mesh = field(default_factory=Mesh)
    """the actors that evaluate, which may be others than those that have trained"""
    device: DeviceChoice = "auto"
    """what they compute on"""

    def faults(self) -> Iterator[str]:
        """Yield which words are missing or too many, and which numbers are out of range."""
        if len(self.words) not in (1, 2):
            yield f"{given(len(self.words))}: raypar eval RUN|FOLDER [DATA]"
        if self.steps < 1:
            yield f"--steps is {self.steps}: it must be at least 1"


def evaluate(words: Sequence[str]) -> Rows:
    """Run ``raypar eval``, and return names and figures.

    Args:
        words: The words after ``eval``.

    Raises:
        ConfigError: There are mistakes. No actor was started.
        JobError: An actor failed.
    """
    args = parse_command(EvalArgs(), words, "eval", _WHAT)
    run, found = evaluated(args)
    from raypar.job.launch import launch  # imports torch and Ray

    try:
        with launch(run, resume=found) as job:
            result = job.evaluate(args.steps)
    except ConfigError as error:
        named = [re.sub(r"^data\.(val_)?path: ", "", fault) for fault in error.faults]  # DATA is both of them
        raise ConfigError(list(dict.fromkeys(named if args.words[1:] else error.faults))) from error
    unit = " nats a token" if result.loss is not None and result.perplexity is not None else ""
    rows = [("loss", f"{loss_text(result.loss)}{unit}"), ("tokens", f"{result.tokens:,}")]
    if result.perplexity is not None:
        rows.append(("perplexity", f"{result.perplexity:.2f}"))
    if result.bits_per_byte is not None:
        rows += [("bytes", f"{result.num_bytes:,}"), ("bits per byte", f"{result.bits_per_byte:.4f}")]
    rows += metric_rows(result.metrics)
    return rows


def evaluated(args: EvalArgs) -> tuple[Run, VerifiedCheckpoint | None]:
    """Return the run that evaluates, and the checkpoint that it begins with; None for a folder's weights.

    Args:
        args: The flags.

    Raises:
        ConfigError: There is no such model, or nothing to evaluate it on.
    """
    source = args.words[0]
    settings, found = trained_model(source, ema=args.ema, mesh=args.mesh, device=args.device)
    if found is None:
        file = absolute(source) / TOKENIZER
        data, tokenizer = None, str(file) if file.exists() else None
    else:
        data = its_run(found).data
        tokenizer = getattr(data, "tokenizer", None)
    if len(args.words) == 2:
        data = _data_of(args.words[1], tokenizer, data)
    if data is None:
        raise ConfigError([f"{source!r} is a folder of Hugging Face, and has no data: raypar eval FOLDER DATA"])
    return Run(**settings | {"data": data, "micro_batch_size": args.micro_batch_size, "eval_steps": args.steps}), found


def _data_of(file: str, tokenizer: str | None, like: Any) -> Text | Examples:
    """Return the data in a file: examples by its ending, else text."""
    if isinstance(like, Examples):
        return replace(like, path=file, val_path=file)
    if Path(file).suffix in _EXAMPLES:
        return Examples(file, tokenizer, val_path=file)
    path = None if tokenizer is None else Path(tokenizer)
    return Text(file, None if path is None else str(path / TOKENIZER if path.is_dir() else path), val_path=file)
