"""Generate text on the actors of a job: cut prompts into groups, keep steps under way, end texts at their stops."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from raypar.actors.data.tokenizers.example_shapes import ExampleError
from raypar.actors.data.tokenizers.tokenizer import Tokenizer
from raypar.actors.machine.this_machine import computes_here, free_memory
from raypar.actors.specs.data import Examples, Text
from raypar.actors.specs.model import Layers
from raypar.actors.specs.run import Run
from raypar.actors.specs.sampling import Prompt, Prompts, Sampling
from raypar.config.conflicts.generation import generation_faults, prompt_faults
from raypar.config.programs import zero_actions_of
from raypar.config.schedule import Loaded, with_zero
from raypar.errors import ConfigError
from raypar.job.start.loaded_run import LoadedRun
from raypar.job.steps.averages import use_averages
from raypar.job.text.growing_text import Continuation, GrowingText, Request
from raypar.planner.memory.kv_cache import cache_bytes
from raypar.schedules.action import Action, Op
from raypar.schedules.formatting import size
from raypar.schedules.schedule import Schedule

log = logging.getLogger(__name__)

Read = Callable[[Callable[[], list[Any]]], list[Any]]
OnToken = Callable[[int, int, str], object]

_ENOUGH = 8  # prompts of a group whose products of matrices take longer than to read a stage's weights
_AHEAD = 2  # steps that the actors have beside the one that is waited for


def request_of(
    run: Run,
    prompts: Sequence[str | Sequence[int]],
    new_tokens: int,
    sampling: Sampling,
    stop: Sequence[str | int] | None,
) -> Request:
    """Check a request for generation, before anything runs.

    Args:
        run: The run.
        prompts: Texts, which begin as the tokenizer begins one, or the token ids of each.
        new_tokens: The most tokens that each gets; 0 if they are scored.
        sampling: How tokens are chosen.
        stop: Token ids and texts that end a text; None: the ids in the tokenizer's folder.

    Raises:
        ConfigError: The run can't generate, or the prompts don't fit. Lists all faults.
    """
    faults, tokenizer = [*generation_faults(run)], None
    try:
        tokenizer = tokenizer_of(run)
    except ExampleError as error:
        faults.append(str(error))
    words = any(isinstance(one, str) for one in (*prompts, *(stop or ())))
    if words and tokenizer is None and not faults:
        faults.append("the run has no tokenizer for texts: give token ids, or a run whose data is rp.Text")
    ConfigError.raise_if(faults)
    encode = (lambda text: ()) if tokenizer is None else tokenizer.prompted
    ids = tuple(encode(one) if isinstance(one, str) else tuple(one) for one in prompts)
    ConfigError.raise_if(prompt_faults(run.model, ids, new_tokens))
    ends = frozenset[int]() if tokenizer is None else tokenizer.ends
    stop_tokens = ends if stop is None else frozenset(one for one in stop if isinstance(one, int))
    stop_texts = tuple(one for one in stop or () if isinstance(one, str))
    return Request(ids, new_tokens, sampling, stop_tokens, stop_texts, tokenizer)


def tokenizer_of(run: Run) -> Tokenizer | None:
    """Return the tokenizer of a run: that of its text or examples, that of its model's folder, or bytes.

    None if its data are token ids or batches of the user's, and the model has no folder with a tokenizer.

    Raises:
        ExampleError: It can't be read.
    """
    data, model = run.data, run.model
    if isinstance(data, Text | Examples) and data.tokenizer is not None:
        return Tokenizer(data.tokenizer, data.template if isinstance(data, Examples) else None)
    folder = model.hf
    if folder is not None and (Path(folder) / "tokenizer.json").exists():
        return Tokenizer(folder)
    is_text = isinstance(data, Examples) or (isinstance(data, Text) and not data.path.endswith(".bin"))
    return Tokenizer(None) if is_text and model.vocab >= 256 else None


class TextGeneration:
    """One generation on the actors of a job.

    After a failure that the run survives it begins again, with the prompts and the tokens so far.

    Args:
        request: What to generate.
        loaded: Returns the run as the actors have it now.
        read: Makes a call to the actors, and handles its failure as the job does.
        ema: Whether the actors use the averages of their weights.

    Raises:
        ConfigError: The caches take more memory than is free here.
    """

    def __init__(self, request: Request, loaded: Callable[[], LoadedRun], read: Read, *, ema: bool = False) -> None:
        self._request = request
        self._loaded = loaded
        self._read = read
        self._ema = ema
        self._texts = [GrowingText(request) for _ in request.prompts]
        self._begun_on: LoadedRun | None = None  # None before it begins, and after a failure
        self._handed: deque[list[Any]] = deque()
        self._groups: dict[int, list[list[int]]] = {}  # by replica and group, the numbers of its prompts
        self._made = 0  # tokens that each text has got, or would have if it were not at its end
        if isinstance(loaded().run.model, Layers):
            log.warning(
                "modules of transformers keep no keys and values here: each token computes its whole text again"
            )
        self._demand_room(loaded())

    def run(self, on: OnToken | None = None) -> list[Continuation]:
        """Generate, and return the continuation of each prompt.

        Args:
            on: Called with every new token: the number of its prompt, its id, and what it adds to the text, "" as long
                as that is no whole character, or might be the beginning of a stop.
        """
        try:
            while self._made < self._request.new_tokens and not all(text.is_over for text in self._texts):
                drawn = self._read(self._next)
                self._made += 1
                for number, token in drawn:
                    added = self._texts[number].add(token)
                    if on is not None and added is not None:
                        on(number, token, added)
        finally:
            if self._begun_on is not None:
                self._read(self._end)
        for number, text in enumerate(self._texts):
            rest = text.end()
            if on is not None and rest:
                on(number, text.tokens[-1], rest)
        return [text.continuation() for text in self._texts]

    def _next(self) -> list[tuple[int, int]]:
        """Hand over steps, wait for the oldest one, and return the number of each prompt with its new token."""
        loaded = self._loaded()
        again, self._begun_on = self._begun_on is not loaded, None
        if again:
            self._begin(loaded)
        while len(self._handed) <= min(_AHEAD, self._request.new_tokens - self._made - 1):
            self._handed.append(loaded.calls.submit("generate", "next", ranks=range(loaded.run.mesh.size)))
        found = loaded.calls.gather(self._handed.popleft(), f"token {self._made + 1}", range(loaded.run.mesh.size))
        self._begun_on = loaded
        tokens = {loaded.world.at(rank)["dp"]: drawn for rank, drawn in enumerate(found) if drawn}
        return [
            (number, token)
            for dp, groups in self._groups.items()
            for numbers, drawn in zip(groups, tokens[dp], strict=True)
            for number, token in zip(numbers, drawn, strict=False)
        ]

    def _begin(self, loaded: LoadedRun) -> None:
        """Make the actors read the prompts with the tokens that they have got so far."""
        self._handed.clear()
        schedule = forwards_of(loaded, _num_groups(loaded, len(self._texts)))
        self._groups = prompt_groups(len(self._texts), loaded.run.mesh.dp, schedule.num_microbatches)
        whole = [(*prompt, *text.tokens) for prompt, text in zip(self._request.prompts, self._texts, strict=True)]
        orders = [
            (Prompts(schedule, groups, self._slots(groups), self._request.sampling),)
            for groups in groups_by_rank(loaded, self._groups, whole, whole[0][:1])
        ]
        if self._ema:
            use_averages(loaded.calls, use=True)
        loaded.calls.each("generate", orders, what="reading the prompts", ranks=range(loaded.run.mesh.size))

    def _slots(self, groups: Sequence[Sequence[Prompt]]) -> tuple[int, ...]:
        """Return the positions of the caches of each group: the last token is in none."""
        left = self._request.new_tokens - self._made - 1
        return tuple(max(len(prompt.tokens) for prompt in group) + left for group in groups)

    def _end(self) -> list[Any]:
        """Wait for the steps under way, and let the actors drop their caches."""
        loaded, self._begun_on = self._begun_on, None
        if loaded is None:  # the run goes on on other actors
            return []
        ranks = range(loaded.run.mesh.size)
        while self._handed:
            loaded.calls.gather(self._handed.popleft(), "the last tokens", ranks)
        ended = loaded.calls.some(ranks, "generate", "end", what="the end of the generation")
        if self._ema:
            use_averages(loaded.calls, use=False)
        return ended

    def _demand_room(self, loaded: LoadedRun) -> None:
        """Raise ConfigError if the caches take more memory than is free here."""
        run = loaded.run
        free = free_memory() if computes_here(run.device) else None
        needed = sum(self.cache_bytes(loaded)) * run.mesh.dp * run.mesh.tensor_ranks
        if free is not None and needed > free:
            takes = f"the keys and values of {len(self._texts)} prompts take {size(needed)}"
            raise ConfigError([f"{takes}, and {size(free)} are free here: give fewer prompts, or less max_new_tokens"])

    def cache_bytes(self, loaded: LoadedRun) -> list[int]:
        """Return the bytes of the caches of an actor of each pipeline rank, of the replica with the most."""
        if isinstance(loaded.run.model, Layers):  # they keep nothing
            return [0] * loaded.run.mesh.pp
        count, lengths = _num_groups(loaded, len(self._texts)), [len(prompt) for prompt in self._request.prompts]
        groups = prompt_groups(len(lengths), loaded.run.mesh.dp, count)[0]
        rows = [(len(one), max(lengths[number] for number in one) + self._request.new_tokens - 1) for one in groups]
        return cache_bytes(loaded.run, loaded.run.model, loaded.schedule, rows)


def forwards_of(loaded: LoadedRun, groups: int) -> Schedule:
    """Return the lowered and checked schedule of a step that gives each of so many groups a token: forwards alone."""
    schedule = loaded.schedule
    rows = [
        [Action(stage, Op.F, group) for stage in schedule.stages_of(rank) for group in range(groups)]
        for rank in range(schedule.num_ranks)
    ]
    lowered = Loaded(Schedule.of(f"{schedule.name} generation", rows)).lowered()
    return with_zero({"evaluate": lowered}, zero_actions_of(loaded.run))["evaluate"]


def prompt_groups(prompts: int, replicas: int, groups: int) -> dict[int, list[list[int]]]:
    """Divide prompts over replicas, and those of each into groups; returns their numbers by replica and group."""
    return {
        dp: [list(range(prompts))[dp::replicas][group::groups] for group in range(groups)] for dp in range(replicas)
    }


def groups_by_rank(
    loaded: LoadedRun,
    numbers: Mapping[int, Sequence[Sequence[int]]],
    texts: Sequence[Sequence[int]],
    filler: Sequence[int],
) -> list[tuple[tuple[Prompt, ...], ...]]:
    """Return the groups of prompts of each worker, by rank.

    Args:
        loaded: The run.
        numbers: The numbers of the prompts by replica and group.
        texts: The token ids of each prompt.
        filler: Those of a group without prompts: all replicas take part in every step, also with nothing to do.
    """
    return [
        tuple(
            tuple(Prompt(number, tuple(texts[number])) for number in group) or (Prompt(-1, tuple(filler)),)
            for group in numbers[loaded.world.at(rank)["dp"]]
        )
        for rank in range(loaded.run.mesh.size)
    ]


def _num_groups(loaded: LoadedRun, prompts: int) -> int:
    """Return into how many groups the prompts of a replica are cut: as many as pipeline ranks, if there are enough.

    Few prompts stay together. A stage takes the time to read its weights for each group, however few prompts that has,
    so groups that are computed at once save no time then, and cost each stage one more reading. Where whole texts are
    computed again, a text alone is enough.
    """
    each, enough = -(-prompts // loaded.run.mesh.dp), 1 if isinstance(loaded.run.model, Layers) else _ENOUGH
    return max(1, min(loaded.schedule.num_ranks, each // enough))
