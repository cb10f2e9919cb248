"""Score texts on the actors of a job: the probability of each token after those before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from raypar.actors.specs.sampling import Prompts, Sampling
from raypar.errors import ConfigError
from raypar.job.start.loaded_run import LoadedRun
from raypar.job.text.generation import Read, forwards_of, groups_by_rank, prompt_groups, request_of
from raypar.schedules.float_sum import float_sum

_FILLER = (0, 0)  # for groups without texts


@dataclass(frozen=True)
class Scored:
    """The scores of a text.

    Attributes:
        tokens: Its token ids.
        logs: The natural logarithm of the probability of each token but the first, after those before it.
        likeliest: Whether no other token was more likely there.
        num_bytes: Bytes of the text in UTF-8; None if it was given as token ids.
    """

    tokens: tuple[int, ...]
    logs: tuple[float, ...]
    likeliest: tuple[bool, ...]
    num_bytes: int | None = None

    @property
    def bits_per_byte(self) -> float:
        """The bits of all tokens but the first by the bytes of the text. Raises ValueError if these are not known."""
        if not self.num_bytes:
            raise ValueError("bits per byte are of a text with bytes, and this one was given as token ids: give texts")
        return -float_sum(self.logs) / log(2) / self.num_bytes


def scores(
    loaded: Callable[[], LoadedRun], read: Read, texts: Sequence[str | Sequence[int]], batch: int
) -> list[Scored]:
    """Score texts; see ``Job.score``.

    Args:
        loaded: Returns the run as the actors have it now.
        read: Makes a call to the actors, and handles its failure as the job does.
        texts: The texts.
        batch: The most texts that a stage computes at a time.
    """
    run = loaded().run
    if not texts:
        return []
    request = request_of(run, texts, 0, Sampling(), ())
    ConfigError.raise_if(_short(request.prompts))
    at_once, found = batch * run.mesh.dp * loaded().schedule.num_ranks, list[list[tuple[float, bool]]]()
    for first in range(0, len(request.prompts), at_once):
        some = request.prompts[first : first + at_once]
        found += read(lambda some=some: _scored(loaded(), some))  # type: ignore[misc]
    return [
        Scored(
            tuple(ids),
            tuple(value for value, _ in each),
            tuple(best for _, best in each),
            len(text.encode()) if isinstance(text, str) else None,
        )
        for text, ids, each in zip(texts, request.prompts, found, strict=True)
    ]


def _short(prompts: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield a fault for each text without a token to score."""
    for number, ids in enumerate(prompts):
        if len(ids) < 2:
            yield f"text {number} has {len(ids)} token, and the first one is not scored: give two at least"


def _scored(loaded: LoadedRun, texts: Sequence[Sequence[int]]) -> list[Any]:
    """Make the actors score some texts at once."""
    run, ranks = loaded.run, range(loaded.run.mesh.size)
    schedule = forwards_of(loaded, min(loaded.schedule.num_ranks, -(-len(texts) // run.mesh.dp)))
    prompt_numbers = prompt_groups(len(texts), run.mesh.dp, schedule.num_microbatches)
    orders = [
        (Prompts(schedule, groups, (1,) * len(groups), Sampling(), scored=True),)
        for groups in groups_by_rank(loaded, prompt_numbers, texts, _FILLER)
    ]
    found: dict[int, Any] = {}
    for rank, scored in enumerate(loaded.calls.each("generate", orders, what="scoring texts", ranks=ranks)):
        for numbers, each in zip(prompt_numbers[loaded.world.at(rank)["dp"]], scored, strict=False):
            found |= dict(zip(numbers, each, strict=False))
    return [found[number] for number in range(len(texts))]
