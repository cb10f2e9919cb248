"""``raypar sft``: fine-tune a model of Hugging Face on examples."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from pathlib import Path

from raypar.actors.data.examples.example_sets import missing_files
from raypar.actors.specs.data import Examples
from raypar.actors.specs.lora import Lora
from raypar.actors.specs.model import Llama
from raypar.actors.specs.run import Run
from raypar.cli.train.train import DryRunOutcome, Finished, TrainArgs, convert_data, train
from raypar.cli.words.examples import named_examples
from raypar.cli.words.flags import HELP
from raypar.cli.words.help_text import Wording
from raypar.cli.words.parsing import parse, values_of
from raypar.config.finetuning import derived_defaults, finetuning, lasting, settings_of, shortened_positions
from raypar.errors import ConfigError

log = logging.getLogger(__name__)

_WHAT = "Fine-tune a model of Hugging Face on examples."
_LASTING = ("steps", "eval_every", "eval_steps")
WORDING = Wording("EXAMPLES --model FOLDER", derived_defaults(), without=("resume",))
_OWN = ("model",)  # flags that train has not
_USAGE = f"raypar sft {WORDING.usage}"
_HELP = f"""{_WHAT}

  EXAMPLES  file, folder or glob of examples; or several of these, each followed by its weight: talks.jsonl 0.7 \
facts.jsonl 0.3
  --model FOLDER  folder of Hugging Face with the model and its tokenizer; adapters of it learn, unless --model.lora \
none is given

The other flags are those of raypar train, and change how FOLDER learns from EXAMPLES:"""


def sft(words: Sequence[str], terminal: bool) -> DryRunOutcome | Finished:
    """Run ``raypar sft``.

    Args:
        words: The words after ``sft``: the examples, or several, each followed by its weight, ``--model`` with the
            folder, and flags of ``raypar train``.
        terminal: Whether to draw a dry run's schedule in colours.

    Raises:
        ConfigError: The words, the folder or the examples have faults; no actor was started.
        JobError: The run failed.
        NonFiniteError: The gradients became infinite or NaN.
    """
    shown = settings_of(Llama(lora=Lora(), hf="FOLDER"), Examples("EXAMPLES", tokenizer="FOLDER"), adapters=True)
    if HELP & {*words}:
        parse(TrainArgs, words, "sft", _HELP, "sft", known={"sft": shown}, wording=WORDING)  # raises HelpAsked
    left = list(words)
    if any(word.partition("=")[0] == "--resume" for word in left):
        raise ConfigError(["sft begins a run: go on with one by raypar train --resume RUN"])
    folder = _taken(left, "--model")
    named = [*takewhile(lambda word: not word.startswith("-"), left)]
    model = next((word for word in named if (Path(word) / "config.json").is_file()), None)
    if folder is None and model is not None:
        examples = shlex.join(word for word in named if word != model) or "EXAMPLES"
        fix = f"raypar sft {examples} --model {shlex.quote(model)}"
        raise ConfigError([f"--model is missing before {model!r}, the folder of a model of Hugging Face: {fix}"])
    path, faults = named_examples(named, _USAGE)
    if folder is None:
        faults.append(f"--model is missing, the folder of a model of Hugging Face: {_USAGE}")
    left = left[len(named) :]
    if faults or folder is None:
        raise ConfigError([*faults, *_flag_faults(left, shown)])
    full = [word.lower() for word in left]
    adapters = "--model.lora=none" not in full and ("--model.lora", "none") not in pairwise(full)
    try:
        start = finetuning(path, folder, adapters=adapters)
    except ConfigError as error:
        missing = (f"data.{fault}" for fault in missing_files(Examples(path)))
        raise ConfigError([*missing, *error.faults, *_flag_faults(left, shown)]) from error
    flags = parse(TrainArgs, left, "sft", _WHAT, "sft", known={"sft": start}, others=_OWN)
    if flags.wrong:
        return train(left, terminal, start)  # which raises them, with all else that is wrong
    steps = flags.args.steps if [*values_of("--steps", left)] else None
    convert_data(flags.args.run())
    if (notice := shortened_positions(flags.args.run())) is not None:
        log.warning("%s", notice)
    long = lasting(flags.args.run(), steps)
    start = replace(start, optim=replace(start.optim, warmup=long.optim.warmup))
    return train(left, terminal, replace(start, **{name: getattr(long, name) for name in _LASTING}))


def _flag_faults(words: Sequence[str], shown: Run) -> list[str]:
    """Return what is wrong with flags where the model is not known; those of the model depend on its folder."""
    wrong = parse(TrainArgs, words, "sft", _WHAT, "sft", known={"sft": shown}, others=_OWN).wrong
    return [one.text for one in wrong if not one.path.startswith("model.")]


def _taken(words: list[str], flag: str) -> str | None:
    """Remove a flag and its value from the words, and return the value; None if it is not there."""
    for at, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return words.pop(at).partition("=")[2]
        if word == flag and at + 1 < len(words):
            words.pop(at)
            return words.pop(at)
    return None
