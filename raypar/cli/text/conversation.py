"""What was said in a chat, as the prompt of the next answer."""

from __future__ import annotations

from collections.abc import Sequence

from raypar.actors.data.tokenizers.tokenizer import Tokenizer


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
