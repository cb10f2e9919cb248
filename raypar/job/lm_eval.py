"""A job as a model of lm-eval, EleutherAI's evaluation harness, which scores texts and generates on the actors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from raypar.config.arguments import checked_arguments
from raypar.config.conflicts.generation import generation_faults
from raypar.errors import ConfigError
from raypar.job.text.generation import tokenizer_of
from raypar.schedules.float_sum import float_sum

if TYPE_CHECKING:
    from raypar.job.job import Job

_NEW_TOKENS = 256  # of an answer, if a task does not say


@checked_arguments
def lm_eval_model(job: Job) -> Any:
    """Return a job as an ``lm_eval.api.model.LM``, for ``lm_eval.simple_evaluate(model=rp.lm_eval_model(job))``.

    Args:
        job: The job. It needs a tokenizer, and is used as it is at each request.

    Raises:
        ConfigError: lm-eval is not installed, or the job has no tokenizer or can't generate.
    """
    ConfigError.raise_if(generation_faults(job.run))
    assert job.run.model.seq is not None
    tokenizer = tokenizer_of(job.run)
    if tokenizer is None:
        raise ConfigError(["lm-eval gives texts, and the run has no tokenizer for them: give one with its data"])
    try:
        base = import_module("lm_eval.api.model").LM
    except ImportError as error:
        raise ConfigError([f"lm-eval can't be imported ({error}): pip install 'raypar[lm-eval]'"]) from error
    ends = sorted(tokenizer.ends)
    begin = next((one for one in (tokenizer.begin, *ends) if one is not None), tokenizer.encoded("\n")[0])
    adapter = HarnessModel(job.score, job.generate, tokenizer.encoded, job.run.model.seq, begin, ends)
    methods = ("loglikelihood", "loglikelihood_rolling", "generate_until")
    made = type("RayparModel", (base,), {name: staticmethod(getattr(adapter, name)) for name in methods})
    return made()


@dataclass
class HarnessModel:
    """The methods that lm-eval calls on a model. A request's ``args`` are a tuple of its texts.

    Texts are tokenized as by lm-eval's HFLM with its defaults: without special tokens, but for the token of the
    beginning before a text without context.

    Attributes:
        score: Scores lists of token ids, as ``Job.score`` does.
        generate: Goes on with lists of token ids, as ``Job.generate`` does.
        encode: Returns the token ids of a text.
        seq: Most tokens in a sequence.
        begin: The token before a text without context.
        ends: The tokens that end an answer, besides those of a request.
    """

    score: Callable[..., Any]
    generate: Callable[..., Any]
    encode: Callable[[str], Sequence[int]]
    seq: int
    begin: int
    ends: Sequence[int] = ()

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return of each (context, continuation) the logarithm of its probability, and whether greedy choice gives it.

        A context that is too long is cut at its beginning.
        """
        pairs = [self._split(*request.args) for request in requests]
        if long := [number for number, (_, rest) in enumerate(pairs) if len(rest) > self.seq]:
            raise ConfigError([f"request {long[0]} has a continuation of more than {self.seq} tokens, the model's seq"])
        asked = [(head, rest) for head, rest in pairs if rest]
        found = iter(self.score([(*head, *rest)[-self.seq - 1 :] for head, rest in asked]) if asked else [])
        return [_of_last(next(found), len(rest)) if rest else (0.0, True) for _, rest in pairs]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the logarithm of the probability of each (text,).

        A longer text is cut into pieces that score ``seq`` tokens each; the last scores the rest, after as much context
        as fits.
        """
        every = [(self.begin, *self.encode(request.args[0])) for request in requests]
        cut = [[*self._pieces(ids)] for ids in every]
        pieces = [piece for one in cut for piece, _ in one]
        found = iter(self.score(pieces) if pieces else [])
        return [float_sum(_of_last(next(found), count)[0] for _, count in one) for one in cut]

    def _pieces(self, ids: Sequence[int]) -> Iterator[tuple[Sequence[int], int]]:
        """Yield pieces of a text, each with the number of tokens at its end that it scores."""
        for start in range(1, len(ids), self.seq):
            stop = min(start + self.seq, len(ids))
            yield ids[max(0, stop - self.seq - 1) : stop], stop - start

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return what goes on with each (context, settings).

        Settings are ``until``, ``max_gen_toks``, and with ``do_sample`` also ``temperature`` and ``top_p``.
        """
        return [self._go_on(*request.args) for request in requests]

    def _go_on(self, context: str, settings: dict[str, Any]) -> str:
        until = settings.get("until") or []
        most = min(int(settings.get("max_gen_toks", _NEW_TOKENS)), self.seq - 1)
        ids = tuple(self.encode(context))[-(self.seq - most) :] or (self.begin,)
        sampled = settings.get("do_sample", False)
        (made,) = self.generate(
            [ids],
            most,
            temperature=float(settings.get("temperature", 1.0)) if sampled else 0.0,
            top_p=float(settings.get("top_p", 1.0)) if sampled else 1.0,
            stop=[*([until] if isinstance(until, str) else until), *self.ends],
        )
        return str(made.text)

    def _split(self, context: str, continuation: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the token ids of both: spaces at the end of the context belong to the continuation's first token."""
        if not context:
            return (self.begin,), tuple(self.encode(continuation))
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        head, whole = tuple(self.encode(context)), tuple(self.encode(context + continuation))
        return head or (self.begin,), whole[len(head) :]


def _of_last(scored: Any, count: int) -> tuple[float, bool]:
    """Return the logarithm of the probability of the last tokens together, and whether each is the likeliest."""
    return float_sum(scored.logs[-count:]), all(scored.likeliest[-count:])
