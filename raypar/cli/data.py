"""``raypar data show``: the sequences of a run as it learns them, decoded, with what is learned in colour."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro

from raypar.actors.data.examples.example_batches import IGNORED, Mixture, Row, example_faults, open_sequences
from raypar.actors.data.tokenizers.tokenizer import Tokenizer
from raypar.actors.specs.data import Examples, Learned
from raypar.cli.words.arguments import parse_command
from raypar.cli.words.examples import named_examples
from raypar.cli.words.flags import HELP
from raypar.config.toml import read_table, recorded_run
from raypar.errors import ConfigError
from raypar.job.start.batch_checks import warn_of_examples
from raypar.paths import RUN, holds_run

_WHAT = "Show sequences as a run learns them: decoded, with what is learned in green, or between « and » in a file."
_USAGE = "raypar data show EXAMPLES|RUN"
_GREEN, _PLAIN = "\x1b[38;5;29m", "\x1b[0m"


@dataclass(frozen=True)
class ShowArgs:
    """The words after ``raypar data show``."""

    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="EXAMPLES|RUN")] = ()
    """examples, or several, each followed by its weight; or a run folder"""
    tokenizer: str | None = None
    """folder of a Hugging Face model, or its tokenizer.json; None reads bytes"""
    template: str | None = None
    """file with the chat template, instead of the one in the tokenizer's folder"""
    learn: Learned = "answers"
    """which tokens are targets"""
    packing: bool = True
    """whether several examples share a sequence"""
    seq: int = 512
    """tokens of a sequence"""
    first: int = 0
    """the first sample to show"""
    number: int = 3
    """how many sequences to show"""
    seed: int = 0
    """seed of the order"""
    val_path: str | None = None
    """examples for validation; none: a tenth of the examples is kept for it"""
    validation: bool = False
    """whether to show those for validation"""

    def faults(self) -> Iterator[str]:
        """Yield which words are missing, and which numbers are out of range."""
        if not self.words:
            yield f"the examples are missing: {_USAGE}"
        for name, least in (("seq", 1), ("first", 0), ("number", 1)):
            if getattr(self, name) < least:
                yield f"--{name} is {getattr(self, name)}: it must be at least {least}"


def show(words: Sequence[str], terminal: bool) -> str:
    """Run ``raypar data``.

    Args:
        words: The words after ``data``.
        terminal: Whether to colour what is learned.

    Raises:
        ConfigError: The words or the data have faults.
    """
    if words and words[0] in HELP:
        words = ["show", *words]
    if words[:1] != ["show"]:
        given = f"there is no command {words[0]!r}" if words else "a command is missing"
        raise ConfigError([f"{given}: {_USAGE}"])
    spec, args = _spec(parse_command(ShowArgs(), words[1:], "data show", _WHAT))
    faults = example_faults(spec, args.seq, sys.maxsize)
    ConfigError.raise_if(f"data.{fault}".replace("--data.", "--").replace("model.seq", "--seq") for fault in faults)
    warn_of_examples(spec, args.seq)
    train, val = open_sequences(spec, args.seq)
    samples = np.arange(args.first, args.first + args.number, dtype=np.int64)
    rows = (val if args.validation else train).rows(samples, args.seed, ordered=args.validation)
    tokenizer = Tokenizer(spec.tokenizer, spec.template)
    texts = [_sequence_text(number, row, tokenizer, terminal) for number, row in enumerate(rows, args.first)]
    return "\n\n".join([_counts(train, val, args), *texts])


def _counts(train: Mixture, val: Mixture, args: ShowArgs) -> str:
    """Say how many sequences there are, and whether those that are asked for come from a second pass."""
    shown, others = ("validation", "training") if args.validation else ("training", "validation (--validation)")
    one, other = (len(val), len(train)) if args.validation else (len(train), len(val))
    more = f"; from sequence {one:,} on they come again" if args.first + args.number > one else ""
    return f"{one:,} sequence{'s' * (one != 1)} for {shown}, {other:,} for {others}{more}"


def _spec(args: ShowArgs) -> tuple[Examples, ShowArgs]:
    """Return the data to show, and the arguments with what a run folder says. Raises ConfigError."""
    if len(args.words) == 1 and holds_run(Path(args.words[0])):
        run = recorded_run(read_table(Path(args.words[0]) / RUN))
        if not isinstance(run.data, Examples) or run.model.seq is None:
            raise ConfigError([f"the run in {args.words[0]!r} has no examples: {_USAGE}"])
        return run.data, replace(args, seq=run.model.seq, seed=run.seed)
    path, faults = named_examples(args.words, _USAGE)
    ConfigError.raise_if(faults)
    return Examples(path, args.tokenizer, args.template, args.learn, args.packing, val_path=args.val_path), args


def _sequence_text(number: int, row: Row, tokenizer: Tokenizer, terminal: bool) -> str:
    """Return a sequence as text, each example below a line of its own."""
    examples = [*_examples(row)]
    used, learned = sum(len(ids) - 1 for ids, _ in examples), sum(sum(mask) for _, mask in examples)
    many = f"{len(examples)} piece{'s' * (len(examples) != 1)} of examples"
    head = f"sequence {number}: {many}, {used} of {len(row.inputs)} tokens, {learned} learned"
    return "\n".join([head, *(f"- {_marked(ids, mask, tokenizer, terminal)}" for ids, mask in examples)])


def _examples(row: Row) -> Iterator[tuple[list[int], list[bool]]]:
    """Yield the token ids of each piece in a sequence, and which of them are learned."""
    for start in dict.fromkeys(row.starts.tolist()):
        positions = np.flatnonzero(row.starts == start)
        targets = row.targets[positions]
        if (targets == IGNORED).all():
            continue  # what is left of the sequence
        last = [int(targets[-1])] if targets[-1] != IGNORED else []
        ids = [*row.inputs[positions].tolist(), *last]
        yield ids, [False, *(targets[: len(ids) - 1] != IGNORED).tolist()]


def _marked(ids: Sequence[int], mask: Sequence[bool], tokenizer: Tokenizer, terminal: bool) -> str:
    """Return tokens as text, in which those that are learned are marked."""
    before, after = (_GREEN, _PLAIN) if terminal else ("«", "»")
    parts = list[str]()
    for learned, group in groupby(zip(ids, mask, strict=True), key=lambda one: one[1]):
        text = _printable(tokenizer.decoded([one for one, _ in group]))
        parts.append(f"{before}{text}{after}" if learned else text)
    return "".join(parts)


def _printable(text: str) -> str:
    """Return a text without characters that change a terminal: these are written as Python writes them."""
    return "".join(one if one == "\n" or unicodedata.category(one) != "Cc" else repr(one)[1:-1] for one in text)
