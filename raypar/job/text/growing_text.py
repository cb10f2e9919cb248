"""A request for generation, and the text of each prompt, which grows token by token until a stop."""

from __future__ import annotations

from dataclasses import dataclass

from raypar.actors.data.tokenizers.tokenizer import Tokenizer
from raypar.actors.specs.sampling import Sampling


@dataclass(frozen=True)
class Continuation:
    """The text that was generated for one prompt.

    Attributes:
        tokens: The ids of the new tokens, without one that has ended the text.
        text: Their text, up to a stop; None if the run has no tokenizer.
        is_stopped: Whether a stop has ended it, and not the number of tokens.
    """

    tokens: tuple[int, ...]
    text: str | None
    is_stopped: bool


@dataclass(frozen=True)
class Request:
    """A request for generation.

    Attributes:
        prompts: The token ids of each prompt.
        new_tokens: The most tokens that each gets.
        sampling: How tokens are chosen.
        stop_tokens: Ids that end a text, and are not part of it.
        stop_texts: Texts that end a text, and are not part of it.
        tokenizer: Makes text of tokens; None if the run has none.
    """

    prompts: tuple[tuple[int, ...], ...]
    new_tokens: int
    sampling: Sampling
    stop_tokens: frozenset[int]
    stop_texts: tuple[str, ...]
    tokenizer: Tokenizer | None


class GrowingText:
    """One text while it grows token by token: each character as soon as it is whole.

    Args:
        request: The request for generation.

    Attributes:
        tokens: Its tokens so far, without one that has ended it.
        is_over: Whether it is at a stop.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self.tokens: list[int] = []
        self.is_over = False
        self._text = ""  # of whole characters, without special tokens; "" without a tokenizer
        self._returned = 0  # characters of the text that were returned

    def add(self, token: int) -> str | None:
        """Take a token; return what it adds to the text that surely stays, None if it adds no token."""
        self.is_over = self.is_over or token in self._request.stop_tokens
        if self.is_over:
            return None
        self.tokens.append(token)
        if self._request.tokenizer is not None:
            whole = self._request.tokenizer.decoded(self.tokens, special=False).rstrip("\ufffd")
            self._text = max(self._text, whole, key=len)
        self.is_over = any(stop in self._text for stop in self._request.stop_texts)
        return self._new_text(len(self._cut()) if self.is_over else self._sure())

    def end(self) -> str:
        """Return the end of the text, which was held back because a stop might have begun in it."""
        return self._new_text(len(self._cut()))

    def continuation(self) -> Continuation:
        """Return the generated text so far."""
        return Continuation(tuple(self.tokens), None if self._request.tokenizer is None else self._cut(), self.is_over)

    def _new_text(self, stop: int) -> str:
        new, self._returned = self._text[self._returned : stop], max(self._returned, stop)
        return new

    def _cut(self) -> str:
        """Return the text up to its first stop."""
        found = (self._text.index(stop) for stop in self._request.stop_texts if stop in self._text)
        return self._text[: min(found, default=len(self._text))]

    def _sure(self) -> int:
        """Return how many characters can't become part of a stop."""
        starts = (stop[:length] for stop in self._request.stop_texts for length in range(1, len(stop)))
        return len(self._text) - max((len(start) for start in starts if self._text.endswith(start)), default=0)
