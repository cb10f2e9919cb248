"""The chat template of a tokenizer: Jinja that writes a conversation as text, as transformers renders it.

It needs the jinja2 package, which torch brings. Templates run in jinja2's sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from raypar.actors.data.example_shapes import ExampleError, Span, Written

_BEGIN, _END = "\U0010fffe", "\U0010ffff"  # no characters: no text has them


class _Generation(Extension):
    """The block ``{% generation %}`` of transformers' templates, around what a model is to write."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own spelling)

    def parse(self, parser: Parser) -> Node:
        """Parse the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class ChatTemplate:
    """A chat template.

    What of a conversation is learned is what stands in the template's blocks ``{% generation %}``. Without these, it is
    what a message of the assistant adds to the prompt for it.

    Args:
        source: The template.
        tokens: The special tokens that it may name, such as ``eos_token``.

    Raises:
        ExampleError: It is no template.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        extensions = [_Generation, "jinja2.ext.loopcontrols"]
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ExampleError(f"template: the chat template is broken ({error}): give another one") from error
        self._tokens, self._marks = dict(tokens), re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        self._special = tuple(token for token in tokens.values() if token)

    def written(self, messages: Sequence[Mapping[str, Any]], learned: Sequence[int], **more: Any) -> Written:
        """Write a conversation; see ``Template.written``."""
        text = self._rendered(messages, more)
        if self._marks:
            text, spans = _without_marks(text)
            spans = [*self._chosen(spans, messages, learned)]
        else:
            spans = [self._added(text, messages, number, more) for number in learned]
        return Written(text, spans, is_chat=True)

    def prompt(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        """Write a conversation, up to where the assistant answers."""
        return _without_marks(self._rendered(messages, more, prompts=True))[0]

    def _rendered(
        self, messages: Sequence[Mapping[str, Any]], more: Mapping[str, Any], *, prompts: bool = False
    ) -> str:
        values = {"messages": messages, "add_generation_prompt": prompts, **self._tokens, **more}
        values |= values.pop("chat_template_kwargs", {})
        try:
            return self._template.render(**values)
        except Exception as error:  # a template may do anything that the sandbox allows
            raise ExampleError(f"is refused by the chat template ({error}): correct it, or data.template") from error

    def _chosen(
        self, spans: Sequence[Span], messages: Sequence[Mapping[str, Any]], learned: Sequence[int]
    ) -> Iterator[Span]:
        """Yield the marked spans of the messages that are learned."""
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) != len(answers):
            yield from spans
            return
        yield from (span for span, number in zip(spans, answers, strict=True) if number in learned)

    def _added(self, text: str, messages: Sequence[Mapping[str, Any]], number: int, more: Mapping[str, Any]) -> Span:
        """Return what a message of the assistant adds to the text."""
        upto = self._rendered(messages[: number + 1], more)
        head = self._rendered(messages[:number], more, prompts=True) if number else ""
        if not upto.startswith(head):
            head = self._rendered(messages[:number], more) if number else ""
        if not text.startswith(upto) or not upto.startswith(head):
            raise ExampleError(
                "is written by a chat template that changes earlier messages when later ones come, so that answers "
                "can't be told from it: mark them there with {% generation %} ... {% endgeneration %}, as data.template"
            )
        stop = len(upto)
        bare = upto.rstrip()
        if len(bare) > len(head) and bare.endswith(self._special or ("\0",)):
            stop = len(bare)  # after the token that ends an answer nothing is generated
        return len(head), stop


def _without_marks(text: str) -> tuple[str, list[Span]]:
    """Return the text without marks, and where they were."""
    parts, spans, at, begun = list[str](), list[Span](), 0, 0
    for part in re.split(f"([{_BEGIN}{_END}])", text):
        if part == _BEGIN:
            begun = at
        elif part == _END:
            spans.append((begun, at))
        else:
            parts.append(part)
            at += len(part)
    return "".join(parts), spans


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Write a value as JSON, as transformers' templates expect it: jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _refuse(message: str) -> str:
    raise TemplateError(message)
