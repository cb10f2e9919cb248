"""The chat template of a tokenizer: Jinja that writes a conversation as text, as transformers renders it.

It needs the jinja2 package, which torch brings. Templates run in jinja2's sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from jinja2 import Template as JinjaTemplate
from jinja2 import TemplateError
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from raypar.actors.data.tokenizers.example_shapes import ExampleError, ExampleText, Messages, Span

_BEGIN, _END, _OTHER = "\U0010fffe", "\U0010ffff", "\U0010fffd"  # noncharacters of Unicode: no text has them
_REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning


class _Generation(Extension):
    """The block ``{% generation %}`` of transformers' templates, around the text that a model generates."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own spelling)

    def parse(self, parser: Parser) -> Node:
        """Parse the block."""
        self.environment.extend(has_marks=True)
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class ChatTemplate:
    """A chat template.

    A model learns the text in the template's blocks ``{% generation %}``. If there are none, it learns each answer as
    it appears in the whole text, including the special token that ends it.

    Args:
        source: The template; or several by name, of which ``tool_use`` is for conversations with tools, and ``default``
            for others.
        tokens: The special tokens that the template may use, by name, such as ``eos_token``.
        special: All special tokens that may end an answer.

    Raises:
        ExampleError: The template has a syntax error.
    """

    def __init__(self, source: str | Mapping[str, str], tokens: Mapping[str, str], special: Sequence[str] = ()) -> None:
        named = {"default": source} if isinstance(source, str) else source
        self._templates = {name: _compiled(one) for name, one in named.items()}
        self._tokens = dict(tokens)
        self._special = tuple({token: None for token in (*tokens.values(), *special) if token})

    def text_and_learned_spans(self, messages: Messages, learned: Sequence[int], **more: Any) -> ExampleText:
        """Write a conversation; see ``Template.text_and_learned_spans``."""
        messages = [_plain(message) for message in messages]
        text, spans = _without_marks(self._rendered(messages, more))
        if getattr(self._template(more).environment, "has_marks", False):
            chosen = [*self._chosen(spans, messages, learned, more)]
        else:
            chosen = [self._answer(text, messages, number, more) for number in learned]
        return ExampleText(text, chosen, is_chat=True)

    def prompt(self, messages: Messages, **more: Any) -> str:
        """Write a conversation, up to where the assistant answers."""
        return self._text([_plain(message) for message in messages], more, prompts=True)

    def ends_answers(self) -> bool:
        """Return whether a special token ends an answer, and not just the marker of the next message."""
        talk = [{"role": role, "content": f"{role}s"} for role in ("user", "assistant", "user")]
        try:
            found = self.text_and_learned_spans(talk, [1])
        except ExampleError:  # the template refuses this conversation
            return True
        return any(self._is_ended(found.text[start:stop]) for start, stop in found.learned)

    def _template(self, more: Mapping[str, Any]) -> JinjaTemplate:
        """Return the template for a conversation."""
        if more.get("tools") and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if (found := self._templates.get("default")) is None:
            names = ", ".join(sorted(self._templates))
            raise ExampleError(f"has several chat templates and no default one ({names}): give one as data.template")
        return found

    def _rendered(self, messages: Messages, more: Mapping[str, Any], *, prompts: bool = False) -> str:
        values: dict[str, Any] = {"tools": None, "documents": None}
        values |= {"messages": messages, "add_generation_prompt": prompts}
        values |= self._tokens | dict(more)
        values |= values.pop("chat_template_kwargs", None) or {}
        try:
            return self._template(more).render(**values)
        except ExampleError:
            raise
        except Exception as error:  # a template may do anything that the sandbox allows
            raise ExampleError(f"is refused by the chat template ({error}): correct it, or data.template") from error

    def _text(self, messages: Messages, more: Mapping[str, Any], *, prompts: bool = False) -> str:
        return _without_marks(self._rendered(messages, more, prompts=prompts))[0]

    def _chosen(
        self, spans: Sequence[Span], messages: Messages, learned: Sequence[int], more: Mapping[str, Any]
    ) -> Iterator[Span]:
        """Yield the marked spans of the messages that are learned; an answer may have several."""
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if len(learned) == len(answers):
            yield from spans
        elif len(spans) == len(answers):
            yield from (span for span, number in zip(spans, answers, strict=True) if number in learned)
        else:
            parts = (self._rendered(messages[:count], more) for count in range(1, len(messages) + 1))
            counts = [len(_without_marks(part)[1]) for part in parts]
            if sorted(counts) != counts:
                raise ExampleError("has answers whose marks depend on what follows: give all of it as messages")
            for number in learned:
                yield from spans[counts[number - 1] if number else 0 : counts[number]]

    def _answer(self, text: str, messages: Messages, number: int, more: Mapping[str, Any]) -> Span:
        """Return the span of an answer in the whole text, including the special token that ends it.

        It is found as the part of the text that changes when the answer is replaced.
        """
        other = {**messages[number], "content": _OTHER}
        for name in ("tool_calls", *_REASONING):
            other.pop(name, None)
        changed = self._text([*messages[:number], other, *messages[number + 1 :]], more)
        if changed.count(_OTHER) != 1:
            raise ExampleError(
                f"has message {number}, an answer that is not found in what the chat template writes of the whole "
                "conversation: mark it there with {% generation %} ... {% endgeneration %}, as data.template"
            )
        position = changed.index(_OTHER)
        start = _common_prefix(text, changed[:position])
        stop = len(text) - _common_prefix(text[start:][::-1], changed[position + 1 :][::-1])
        try:
            upto = messages[:number]
            before, head = (self._text(upto, more, prompts=prompts) if upto else "" for prompts in (False, True))
        except ExampleError:  # the template refuses a part of a conversation
            before = head = ""
        if head != before and text.startswith(head) and len(head) <= start:
            start = len(head)
        return start, self._end_of(text, start, stop)

    def _end_of(self, text: str, start: int, stop: int) -> int:
        """Return where an answer ends: after its special token at the end, if it has one.

        Args:
            text: The whole conversation.
            start: Where the answer's text begins.
            stop: Where it ends.
        """
        if self._is_ended(text[start:stop]):
            return start + len(text[start:stop].rstrip())
        gap = len(text[stop:]) - len(text[stop:].lstrip())
        token = self._token_at(text, stop + gap)
        return stop + gap + len(token) if token and token not in self._begins else stop

    @cached_property
    def _begins(self) -> frozenset[str]:
        """The special tokens that begin messages, and so end none."""
        found = set[str]()
        for roles in (("user", "assistant", "user"), ("system", "user"), ("user", "assistant", "tool")):
            talk, before = [{"role": role, "content": "a"} for role in roles], ""
            for count in range(1, len(talk) + 1):
                try:
                    upto = self._text(talk[:count], {})
                except ExampleError:  # the template refuses this conversation
                    break
                found.add(self._token_at(upto, len(before)) if upto.startswith(before) else "")
                before = upto
        return frozenset(found)

    def _is_ended(self, text: str) -> bool:
        return text.rstrip().endswith(self._special or (_OTHER,))

    def _token_at(self, text: str, position: int) -> str:
        """Return the special token that begins at a position of a text; "" if none does."""
        return max((token for token in self._special if text.startswith(token, position)), key=len, default="")


def _compiled(source: str) -> JinjaTemplate:
    """Compile a template with the filters and functions of transformers. Raises ExampleError."""
    extensions = [_Generation, "jinja2.ext.loopcontrols"]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    try:
        return environment.from_string(source)
    except (TemplateError, SyntaxError, RecursionError, MemoryError) as error:
        # all but the first are of Python: jinja2 generates Python source
        why = "nested too deeply" if isinstance(error, RecursionError | MemoryError) else error
        raise ExampleError(f"template: the chat template is broken ({why}): give another one") from error


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message without the fields that are null, and with its reasoning under all names."""
    found = {name: value for name, value in message.items() if value is not None}
    reasoning = next((found[name] for name in _REASONING if name in found), None)
    return found if reasoning is None else {"thinking": reasoning, **found, "reasoning_content": reasoning}


def _common_prefix(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts."""
    differences = (i for i, (one, other) in enumerate(zip(first, second, strict=False)) if one != other)
    return next(differences, min(len(first), len(second)))


def _without_marks(text: str) -> tuple[str, list[Span]]:
    """Return the text without marks, and the spans that they enclosed."""
    parts, marks, length = list[str](), list[int](), 0
    for part in re.split(f"([{_BEGIN}{_END}])", text):
        if part in (_BEGIN, _END):
            marks.append(length)
        else:
            parts.append(part)
            length += len(part)
    return "".join(parts), [*zip(marks[::2], marks[1::2], strict=False)]


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Write a value as JSON, as transformers' templates expect it: jinja2's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **more)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _refuse(message: str) -> str:
    raise TemplateError(message)
