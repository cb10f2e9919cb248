"""The shapes of examples for fine-tuning, and the parts of their text that are learned."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

Messages: TypeAlias = Sequence[Mapping[str, Any]]
Span: TypeAlias = tuple[int, int]  # of characters: the first, and the one after the last
SHAPES = "text, messages, or prompt and completion"


class ExampleError(ValueError):
    """An example that has none of the shapes, or that the template refuses."""


class ExampleText(NamedTuple):
    """An example as text.

    Attributes:
        text: The text.
        learned: The spans whose tokens are targets.
        is_chat: Whether a template has written the text, with all special tokens.
    """

    text: str
    learned: Sequence[Span]
    is_chat: bool = False


class Template(Protocol):
    """Writes a conversation as text."""

    def text_and_learned_spans(self, messages: Messages, learned: Sequence[int], **more: Any) -> ExampleText:
        """Write a conversation.

        Args:
            messages: Its messages, each with a role and a content.
            learned: Indices of the messages that are learned.
            **more: Further values for the template, such as tools.

        Raises:
            ExampleError: The template refuses it.
        """

    def prompt(self, messages: Messages, **more: Any) -> str:
        """Write a conversation up to where the assistant answers; see ``example_as_text``."""

    def ends_answers(self) -> bool:
        """Return whether a special token ends an answer, and not just the marker of the next message."""


def example_as_text(record: Any, template: Template | None, end: str, *, learns_all: bool) -> ExampleText:
    """Write an example as text.

    Args:
        record: The example, unchanged from its file.
        template: The chat template; None if there is none.
        end: The special token to append to a text and a completion; "" for none.
        learns_all: Whether all tokens are targets.

    Raises:
        ExampleError: It has none of the shapes, or needs a template and there is none.
    """
    if not isinstance(record, Mapping):
        raise ExampleError(f"is {_brief(record)}: an example is an object with {SHAPES}")
    if "messages" in record:
        found = _chat(record["messages"], 0, template, record)
    elif "prompt" in record and "completion" in record:
        found = _completed(record["prompt"], record["completion"], template, end, record)
    elif isinstance(record.get("text"), str):
        text = record["text"] + end
        found = ExampleText(text, [(0, len(text))])
    else:
        named = ", ".join(map(str, list(record)[:5])) or "nothing"
        raise ExampleError(f"has {named}: an example has {SHAPES}")
    try:
        found.text.encode()
    except UnicodeEncodeError as error:
        half = f"\\u{ord(found.text[error.start]):04x}"
        raise ExampleError(f"has half of a character, {half}, which no text can have: write all of it") from error
    return found._replace(learned=[(0, len(found.text))]) if learns_all else found


def _completed(
    prompt: Any, completion: Any, template: Template | None, end: str, record: Mapping[str, Any]
) -> ExampleText:
    """Write a prompt and its completion: two texts, or two lists of messages."""
    if isinstance(prompt, str) and isinstance(completion, str):
        text = prompt + completion + end
        return ExampleText(text, [(len(prompt), len(text))])
    if isinstance(prompt, list) and isinstance(completion, list):
        return _chat([*prompt, *completion], len(prompt), template, record)
    raise ExampleError("has a prompt and a completion that are not both texts or both lists of messages")


def _chat(messages: Any, first: int, template: Template | None, record: Mapping[str, Any]) -> ExampleText:
    """Write a conversation. The assistant's messages from index ``first`` on are learned."""
    if not isinstance(messages, list) or not messages:
        raise ExampleError(f"has messages {_brief(messages)}: they are a list with one at least")
    for number, message in enumerate(messages):
        said = isinstance(message, Mapping) and (message.get("tool_calls") or message.get("content") is not None)
        if not said or not isinstance(message.get("role"), str):
            fix = "a message has a role, and a content or tool_calls"
            raise ExampleError(f"has message {number} {_brief(message)}: {fix}")
    if template is None:
        fix = "give data.tokenizer a folder that has one, or data.template a file with one (--data.template FILE)"
        raise ExampleError(f"has messages, and there is no chat template: {fix}")
    answers = [i for i, message in enumerate(messages) if i >= first and message["role"] == "assistant"]
    names = "tools", "documents", "chat_template_kwargs"
    more = {name: _parsed(name, record[name]) for name in names if record.get(name) is not None}
    return template.text_and_learned_spans(messages, answers, **more)


def _parsed(name: str, value: Any) -> Any:
    """Return tools, documents or template arguments, which some files have as JSON. Raises ExampleError."""
    try:
        if isinstance(value, str):
            return json.loads(value)
        return [json.loads(one) if isinstance(one, str) else one for one in value] if isinstance(value, list) else value
    except ValueError as error:
        raise ExampleError(f"has {name} that are no JSON ({error}): write them as a list of objects") from error


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
