"""The commands that generate text: ``raypar generate`` goes on with prompts, ``raypar chat`` answers in a terminal."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import tyro

from raypar.actors.data.tokenizers.example_shapes import ExampleError
from raypar.actors.data.tokenizers.tokenizer import Tokenizer
from raypar.actors.mesh.mesh import Mesh
from raypar.actors.specs.data import Examples, Text
from raypar.actors.specs.run import Run
from raypar.actors.specs.sampling import Sampling
from raypar.actors.specs.types import DeviceChoice
from raypar.cli.text.trained_model import TOKENIZER, trained_model
from raypar.cli.train.resuming import its_run
from raypar.cli.words.arguments import given, parse_command
from raypar.cluster.interrupts import unannounced
from raypar.config.conflicts.generation import generation_faults
from raypar.errors import ConfigError
from raypar.job.text.generation import request_of
from raypar.paths import absolute

if TYPE_CHECKING:
    from raypar.checkpoint.find import VerifiedCheckpoint
    from raypar.job.job import Job

_GENERATE = "Go on with prompts, with the weights of a run, a checkpoint or a folder of Hugging Face."
_CHAT = "Answer in a terminal, with the weights of a run, a checkpoint or a folder of Hugging Face."
_BYTES = 256  # ids of text without a tokenizer


class Conversation:
    """A conversation: written by the tokenizer's chat template, or else line by line.

    Args:
        tokenizer: The tokenizer.
        room: The most tokens of a prompt. What was said first is forgotten first.
    """

    def __init__(self, tokenizer: Tokenizer, room: int) -> None:
        self._tokenizer, self._template, self._room = tokenizer, tokenizer.template, room
        self._messages: list[dict[str, str]] = []

    def ask(self, line: str) -> Sequence[int]:
        """Add what the user says, and return the token ids of the prompt."""
        self._messages.append({"role": "user", "content": line})
        while len(prompt := self._prompt()) > self._room and len(self._messages) > 1:
            del self._messages[0]
            while self._messages[0]["role"] != "user":  # the answer to it
                del self._messages[0]
        return prompt[-self._room :]

    def answer(self, text: str) -> None:
        """Add the answer."""
        self._messages.append({"role": "assistant", "content": text})

    def _prompt(self) -> Sequence[int]:
        if self._template is not None:
            return self._tokenizer.encoded(self._template.prompt(self._messages))
        said = (message["content"] + "\n" * (message["role"] == "assistant") for message in self._messages)
        return self._tokenizer.prompted("".join(said))


class WriteText(Protocol):
    """Prints to standard output."""

    def __call__(self, text: str, end: str = "\n") -> int:
        """Print a text and what follows it."""


@dataclass(frozen=True)
class ChatArgs:
    """The flags of ``raypar chat``."""

    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN|FOLDER")] = ()
    """a run folder, a checkpoint, or a folder of Hugging Face"""
    max_new_tokens: int | None = None
    """the most tokens of an answer; None: 256, or half of the model's positions if these are fewer"""
    temperature: float = 0.7
    """what logits are divided by before a token is drawn; 0 takes the likeliest one"""
    top_k: int | None = None
    """draw only from so many of the likeliest tokens"""
    top_p: float = 0.9
    """draw only from the fewest of the likeliest tokens that have this probability together"""
    seed: int = 0
    """seed of what is drawn"""
    stop: tuple[str, ...] | None = None
    """texts that end a text; None: what the files beside the tokenizer say"""
    tokenizer: Path | None = None
    """a tokenizers JSON file, instead of the run's"""
    ema: bool = False
    """use the moving averages of the weights, which a run with ema keeps"""
    mesh: Mesh = field(default_factory=Mesh)
    """the actors that generate, which may be others than those that have trained"""
    device: DeviceChoice = "auto"
    """what they compute on"""

    def faults(self) -> Iterator[str]:
        """Yield which words are missing or too many, and which numbers are out of range."""
        if len(self.words) != 1:
            yield f"{given(len(self.words))}: raypar chat RUN|FOLDER"
        yield from self._wrong_numbers()

    def _wrong_numbers(self) -> Iterator[str]:
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            yield f"--max-new-tokens is {self.max_new_tokens}: it must be at least 1"
        if not 0 <= self.temperature < math.inf:
            yield f"--temperature is {self.temperature:g}: it must be at least 0"
        if self.top_k is not None and self.top_k < 1:
            yield f"--top-k is {self.top_k}: it must be at least 1"
        if not 0 < self.top_p <= 1:
            yield f"--top-p is {self.top_p:g}: it must be more than 0 and at most 1"

    def sampling(self) -> dict[str, Any]:
        """Return how tokens are chosen, as ``job.generate`` takes it."""
        how = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "seed": self.seed}
        return {"stop": self.stop, **how}


@dataclass(frozen=True)
class GenerateArgs(ChatArgs):
    """The flags of ``raypar generate``."""

    words: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN|FOLDER PROMPT ...")] = ()
    """a run folder, a checkpoint, or a folder of Hugging Face; and what to go on with"""
    max_new_tokens: int | None = None
    """the most tokens of a continuation; None: 64, or as many as the model has positions for"""
    temperature: float = 0.0
    """what logits are divided by before a token is drawn; 0 takes the likeliest one"""
    top_p: float = 1.0
    """draw only from the fewest of the likeliest tokens that have this probability together"""
    json: bool = False
    """one list of JSON: prompt, text, token ids, and whether a stop has ended the text, of each prompt"""

    def faults(self) -> Iterator[str]:
        """Yield which words are missing, and which numbers are out of range."""
        if len(self.words) < 2:
            yield f'{given(len(self.words))}: raypar generate RUN|FOLDER "PROMPT" ...'
        yield from self._wrong_numbers()


def generate(words: Sequence[str], write: WriteText) -> None:
    """Run ``raypar generate``: print every prompt with its continuation, a single one token by token.

    Args:
        words: The words after ``generate``.
        write: Prints to standard output.

    Raises:
        ConfigError: There are mistakes. No actor was started, or nothing was generated.
        JobError: An actor failed.
    """
    args = parse_command(GenerateArgs(), words, "generate", _GENERATE)
    source, *prompts = args.words
    with tempfile.TemporaryDirectory(prefix="raypar-") as folder:
        run, found, tokenizer = run_on(source, args, Path(folder))
        seq = _seq(run)
        most = args.max_new_tokens or max(1, min(64, seq - max(len(tokenizer.prompted(prompt)) for prompt in prompts)))
        sampling = args.sampling() | {"max_new_tokens": most}
        request_of(run, prompts, most, Sampling(), args.stop)  # before actors are launched for them
        with _launched(run, found) as job:
            if args.json:
                texts = zip(prompts, job.generate(prompts, **sampling), strict=True)
                write(json.dumps([{"prompt": prompt} | asdict(made) for prompt, made in texts], indent=1))
                return
            if len(prompts) == 1:
                write(prompts[0], end="")
                job.generate(prompts, on=lambda _, token, text: write(text, end=""), **sampling)
                write("")
                return
            for number, made in enumerate(job.generate(prompts, **sampling)):
                write(f"--- {number + 1} ---\n{prompts[number]}{made.text}")


def chat(words: Sequence[str], write: WriteText, read: Callable[[], str]) -> None:
    """Run ``raypar chat``: answer what is typed, until the end of the input. Ctrl-C ends an answer.

    Args:
        words: The words after ``chat``.
        write: Prints to standard output.
        read: Returns the next line that is typed. Raises EOFError or KeyboardInterrupt at the end.

    Raises:
        ConfigError: There are mistakes. No actor was started.
        JobError: An actor failed.
    """
    args = parse_command(ChatArgs(), words, "chat", _CHAT)
    with tempfile.TemporaryDirectory(prefix="raypar-") as folder:
        run, found, tokenizer = run_on(args.words[0], args, Path(folder))
        seq = _seq(run)
        most = min(args.max_new_tokens or min(256, seq // 2), seq - 1)
        with _launched(run, found) as job:
            write("Type, and Enter. Ctrl-C ends an answer; Ctrl-D, or Ctrl-C here, the chat.")
            said = Conversation(tokenizer, seq - most)
            while True:
                write("> ", end="")
                try:
                    line = read()
                except (EOFError, KeyboardInterrupt):
                    write("")
                    return
                if line:
                    said.answer(_answered(job, said.ask(line), write, args.sampling() | {"max_new_tokens": most}))


def _answered(job: Job, prompt: Sequence[int], write: WriteText, sampling: Mapping[str, Any]) -> str:
    """Print an answer token by token, and return it; what there is of it, if it is interrupted."""
    pieces = list[str]()

    def show(_: int, token: int, piece: str) -> None:
        pieces.append(piece)
        write(piece, end="")

    with suppress(KeyboardInterrupt), unannounced():
        job.generate([prompt], on=show, **sampling)
    write("")
    return "".join(pieces)


def _launched(run: Run, found: VerifiedCheckpoint | None) -> Job:
    from raypar.job.launch import launch  # imports torch and Ray

    return launch(run, resume=found)


def _seq(run: Run) -> int:
    """Return the number of positions of a run's model."""
    assert run.model.seq is not None
    return run.model.seq


def run_on(source: str, args: ChatArgs, folder: Path) -> tuple[Run, VerifiedCheckpoint | None, Tokenizer]:
    """Return the run of a job that generates, the checkpoint that it begins with (None: a folder's weights), and its
    tokenizer.

    The run has the model and the weights of the source, and the mesh of the arguments. Its data are a few numbers
    instead of the text that it was trained on, which need not be here.

    Args:
        source: A run folder, a checkpoint, or a folder of Hugging Face.
        args: The flags.
        folder: Where the data are written.

    Raises:
        ConfigError: There is no such model, or it can't generate.
    """
    settings, found = trained_model(source, ema=args.ema, mesh=args.mesh, device=args.device)
    template = None
    if found is None:
        beside = absolute(source) / TOKENIZER
        file = beside if beside.exists() else None
    else:
        trained = its_run(found)
        file = _tokenizer_of(trained)
        template = trained.data.template if isinstance(trained.data, Examples) else None
    model, wrong, file = settings["model"], list[str](), args.tokenizer or file
    if file is None and model.vocab > _BYTES:
        wrong.append(f"{source!r} has no tokenizer, and its model {model.vocab} token ids: give --tokenizer FILE")
    try:
        tokenizer = Tokenizer(None if file is None else str(file), template)
    except ExampleError as error:
        raise ConfigError([*wrong, str(error)]) from error
    if model.seq is not None:
        numbers = folder / "numbers.txt"
        numbers.write_text(" ".join(map(str, range(64 * (model.seq + 2)))))
        settings["data"] = Text(str(numbers), None if file is None else str(file), cache=str(folder))
    run = Run(micro_batch_size=1, **settings)
    ConfigError.raise_if([*wrong, *generation_faults(run)])
    return run, found, tokenizer


def _tokenizer_of(run: Run) -> Path | None:
    """Return the tokenizer file of a run's data, or of its model's folder; None for bytes."""
    named = run.data.tokenizer if isinstance(run.data, Text | Examples) else None
    if named is None:
        named = run.model.hf
    path = None if named is None else Path(named)
    if path is not None and path.is_dir():
        path = path / TOKENIZER
        return path if path.exists() else None
    return path
