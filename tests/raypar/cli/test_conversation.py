"""The prompts of a chat: by the chat template, or line by line; what was said first is forgotten first."""

from __future__ import annotations

import pytest

from raypar.actors.data.tokenizers.tokenizer import Tokenizer
from raypar.cli.text.generate import Conversation

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def said(prompt):
    return bytes(prompt).decode()


@pytest.fixture
def templated(tmp_path):
    (tmp_path / "t.jinja").write_text(TEMPLATE)
    return Tokenizer(None, str(tmp_path / "t.jinja"))


def test_lines_are_joined_without_a_template():
    chat = Conversation(Tokenizer(None), room=100)
    assert said(chat.ask("once")) == "once"
    chat.answer(" upon a time")
    assert said(chat.ask("there")) == "once upon a time\nthere"


def test_the_template_writes_the_conversation(templated):
    chat = Conversation(templated, room=100)
    assert said(chat.ask("hi")) == "<user>hi\n<assistant>"
    chat.answer("ho")
    assert said(chat.ask("?")) == "<user>hi\n<assistant>ho\n<user>?\n<assistant>"


def test_what_was_said_first_is_forgotten_first(templated):
    chat = Conversation(templated, room=40)
    chat.ask("the first question")
    chat.answer("its answer")
    assert said(chat.ask("second")) == "<user>second\n<assistant>"
    assert len(chat.ask("long " * 20)) == 40, "of a question that has no room, the end"
