"""What is learned of conversations: templates without marks learn what marks would say, as transformers has them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from datetime import datetime

import pytest

import raypar as rp
from raypar.actors.data.tokenizers.example_shapes import ExampleError, example_as_text
from raypar.actors.data.tokenizers.tokenizer import Tokenizer
from raypar.job.start.batch_checks import warn_of_batches
from tests.support.examples import made_jsonl, made_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

EXTRA = ["<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "</s>"]
_CHATML = (
    "{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}[[{{ m.content }}<|im_end|>]]{% else %}"
    "{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}"
)
_ASKS = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"


def each(body, before="", behind=""):
    return before + "{% for m in messages %}" + body + "{% endfor %}" + behind


TEMPLATES = {  # [[ and ]] stand around what an answer is
    "chatml": each(_CHATML, behind=_ASKS),
    "without a prompt for an answer": each(_CHATML),
    "an inserted system prompt": each(
        _CHATML,
        "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}",
        _ASKS,
    ),
    "a refused system prompt, and a turn of its own end": each(
        "{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% if m.role == 'assistant' %}{{ '<start_of_turn>model\\n' }}[[{{ m.content | trim }}<end_of_turn>]]"
        "{% else %}{{ '<start_of_turn>' + m.role + '\\n' + m.content | trim + '<end_of_turn>' }}{% endif %}{{ '\\n' }}",
        behind="{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    ),
    "instructions": each(
        "{% if m.role == 'assistant' %} [[{{ m.content | trim }} </s>]]{% else %}[INST] "
        "{{ m.content }} [/INST]{% endif %}"
    ),
    "an end at the very end": each(
        "{{ m.role + ': ' }}{% if m.role == 'assistant' %}[[{{ m.content }}{% if loop.last %}{{ eos_token }}"
        "{% endif %}]]"
        "{% else %}{{ m.content }}{% endif %}{{ '\\n' }}",
        behind="{% if add_generation_prompt %}assistant: {% endif %}",
    ),
    "no end": each(
        "{{ '### ' + m.role + ':\\n' }}{% if m.role == 'assistant' %}[[{{ m.content }}]]{% else %}"
        "{{ m.content }}{% endif %}"
        "{{ '\\n' }}",
        behind="{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}",
    ),
    "markers that are special, and no end": each(
        "{{ '<|' + m.role + '|>\\n' }}{% if m.role == 'assistant' %}[[{{ m.content }}]]{% else %}"
        "{{ m.content }}{% endif %}"
        "{{ '\\n' }}",
        behind="{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    ),
    "markers that are special, and an end": each(
        "{{ '<|' + m.role + '|>\\n' }}{% if m.role == 'assistant' %}[[{{ m.content }}</s>]]{% else %}"
        "{{ m.content }}</s>"
        "{% endif %}{{ '\\n' }}",
        behind="{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}",
    ),
    "earlier reasoning dropped": each(
        "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}[[{% if loop.last %}"
        "{{ m.content }}{% else %}"
        "{{ m.content.split('</think>')[-1].lstrip('\\n') }}{% endif %}<|im_end|>]]{% else %}{{ m.content }}<|im_end|>"
        "{% endif %}{{ '\\n' }}",
        behind=_ASKS,
    ),
    "reasoning of its own": each(
        "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}[[{% if m.reasoning_content is defined %}"
        "{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content }}<|im_end|>]]{% else %}"
        "{{ m.content }}"
        "<|im_end|>{% endif %}{{ '\\n' }}",
        behind=_ASKS,
    ),
    "tools": each(_CHATML, "{% if tools is not none %}{{ tools | tojson }}{{ '\\n' }}{% endif %}", _ASKS),
    "the day": each(_CHATML, "{{ strftime_now('%Y') }}{{ '\\n' }}", _ASKS),
    "content in parts": each(
        "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}[[{% if m.content is string %}"
        "{{ m.content }}"
        "{% else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}<|im_end|>]]{% else %}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}{{ part.text }}"
        "{% endfor %}{% endif %}"
        "<|im_end|>{% endif %}{{ '\\n' }}",
        behind=_ASKS,
    ),
    "answers that call tools": each(
        "{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}[[{% if m.content %}"
        "{{ m.content }}{% endif %}"
        "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>]]{% else %}"
        "{{ m.content }}"
        "<|im_end|>{% endif %}{{ '\\n' }}",
        behind=_ASKS,
    ),
    "blanks": each(
        "{% if m.role == 'assistant' %}A: [[{{ m.content }} </s>]]{% else %}Q: {{ m.content }}{% endif %}"
        "{{ '\\n\\n' }}",
        behind="{% if add_generation_prompt %}A: {% endif %}",
    ),
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


def talk(*contents, first="user"):
    roles = ["user", "assistant"] if first == "user" else ["assistant", "user"]
    return [{"role": roles[number % 2], "content": content} for number, content in enumerate(contents)]


SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]}
TALKS = {
    "one": {"messages": talk("hi", "hello")},
    "two": {"messages": talk("hi", "hello", "and", "so on")},
    "with a system prompt": {"messages": [SYSTEM, *talk("hi", "hello")]},
    "begins with the assistant": {"messages": talk("hello", "hi", "fine", first="assistant")},
    "ends with the user": {"messages": talk("hi", "hello", "bye")},
    "of equal words": {"messages": talk("same", "same", "same", "same")},
    "two answers in a row": {"messages": [*talk("hi", "hello"), *talk("again", "bye", first="assistant")]},
    "an empty answer": {"messages": talk("hi", "", "and", "yes")},
    "blanks around an answer": {"messages": talk("hi", " hello \n", "and", "\n yes")},
    "reasoning inside": {"messages": talk("hi", "<think>a</think>\n\nb", "and", "<think>c</think>\n\nd")},
    "reasoning beside": {"messages": [*talk("hi"), {"role": "assistant", "content": "b", "reasoning": "a"}]},
    "nulls": {"messages": [{**one, "tool_calls": None, "name": None} for one in talk("hi", "hello")]},
    "tools": {"messages": talk("hi", "hello"), "tools": TOOLS},
    "parts": {"messages": talk([{"type": "text", "text": "hi"}], [{"type": "text", "text": "hello"}])},
    "a call": {"messages": [*talk("hi"), CALL, {"role": "tool", "content": "2"}, *talk("it is 2", first="assistant")]},
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """For each template a tokenizer with marks, and one without."""
    made = {}
    for number, (name, template) in enumerate(TEMPLATES.items()):
        for kind, (begin, end) in {"marked": ("{% generation %}", "{% endgeneration %}"), "plain": ("", "")}.items():
            folder = tmp_path_factory.mktemp(f"{kind}{number}")
            made[name, kind] = made_tokenizer(folder, template.replace("[[", begin).replace("]]", end), EXTRA)
    return made


def found(folder, record):
    """Ids, and which are learned; None if it is refused."""
    tokenizer = Tokenizer(str(folder))
    try:
        one = example_as_text(record, tokenizer.template, tokenizer.end, learns_all=False)
    except ExampleError:
        return None
    (tokens,) = tokenizer.tokens_with_loss_mask([one])
    return tokens.ids.tolist(), tokens.loss_mask.tolist()


def shown(folder, made):
    """The learned parts as text, for a message."""
    tokenizer = Tokenizer(str(folder))
    return None if made is None else tokenizer.decoded([one if is_so else 0 for one, is_so in zip(*made, strict=True)])


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_marks_it_is_what_marks_would_say(name, tokenizers):
    wrong = {}
    for title, record in TALKS.items():
        marked, plain = (found(tokenizers[name, kind], record) for kind in ("marked", "plain"))
        if marked != plain:
            wrong[title] = (shown(tokenizers[name, "marked"], marked), shown(tokenizers[name, "plain"], plain))
    assert not wrong


@pytest.mark.parametrize("name", TEMPLATES)
def test_marks_and_ids_are_those_of_transformers(name, tokenizers):
    transformers = pytest.importorskip("transformers")
    folder = tokenizers[name, "marked"]
    theirs, wrong = transformers.AutoTokenizer.from_pretrained(folder), {}
    for title, record in TALKS.items():
        try:
            made = theirs.apply_chat_template(
                record["messages"],
                tools=record.get("tools"),
                return_assistant_tokens_mask=True,
                return_dict=True,
                tokenize=True,
            )
            right = made["input_ids"], made["assistant_masks"]
        except Exception:
            right = None
        if found(folder, record) != right:
            wrong[title] = (found(folder, record), right)
    assert not wrong


def test_an_answer_that_a_prompt_has_is_not_learned_however_many_marks_it_has(tmp_path):
    """A mark for each word."""
    template = each(
        "{{ m.role + ':' }}{% for word in m.content.split(' ') %}{% if m.role == 'assistant' %}"
        "{% generation %}{{ word }}"
        "{% endgeneration %}{% else %}{{ word }}{% endif %}{{ ' ' }}{% endfor %}"
    )
    folder = made_tokenizer(tmp_path, template)
    talked = talk("a", "one two", "b", "three four")
    ids, learned = found(folder, {"prompt": talked[:3], "completion": talked[3:]})
    tokenizer = Tokenizer(str(folder))
    assert tokenizer.decoded([one for one, is_so in zip(ids, learned, strict=True) if is_so]) == "threefour"


def test_answers_whose_marks_become_fewer_by_what_follows_are_refused(tmp_path):
    """The last message has a mark for each word, one before it has one."""
    template = (
        "{% for m in messages %}{{ m.role + ':' }}{% if m.role != 'assistant' %}{{ m.content }}{% elif loop.last %}"
        "{% for word in m.content.split(' ') %}{% generation %}{{ word }}{% endgeneration %}{% endfor %}"
        "{% else %}{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}"
    )
    folder = made_tokenizer(tmp_path, template)
    talked = talk("a", "one two three", "b", "four five")
    with pytest.raises(ExampleError, match="whose marks depend on what follows: give all of it as messages"):
        example_as_text(
            {"prompt": talked[:3], "completion": talked[3:]}, Tokenizer(str(folder)).template, "", learns_all=False
        )
    ids, learned = found(folder, {"messages": talked})
    text = Tokenizer(str(folder)).decoded([one for one, is_so in zip(ids, learned, strict=True) if is_so])
    assert text == "one two threefourfive"


def test_tools_as_text_are_parsed_and_broken_ones_are_told(tokenizers):
    folder = tokenizers["tools", "plain"]
    record = TALKS["tools"]
    assert found(folder, record | {"tools": json.dumps(TOOLS)}) == found(folder, record)
    assert found(folder, record | {"tools": [json.dumps(TOOLS[0])]}) == found(folder, record)
    with pytest.raises(ExampleError, match="has tools that are no JSON"):
        example_as_text(record | {"tools": "{"}, Tokenizer(str(folder)).template, "", learns_all=False)


def test_the_day_is_todays(tokenizers):
    template = Tokenizer(str(tokenizers["the day", "plain"])).template
    assert template.prompt(talk("hi")).startswith(str(datetime.now().year))


def test_of_several_templates_that_with_tools_is_taken_for_tools(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    template = Tokenizer(str(made_tokenizer(tmp_path / "a", named))).template
    assert (template.prompt(talk("hi")), template.prompt(talk("hi"), tools=TOOLS)) == ("plain", "with tools")
    odd = [{"name": "rag", "template": "x"}, {"name": "null", "template": None}, {"name": 1, "template": "y"}, "z"]
    alone = Tokenizer(str(made_tokenizer(tmp_path / "b", odd))).template
    with pytest.raises(ExampleError, match=r"no default one \(rag\)"):
        alone.prompt(talk("hi"))


@pytest.mark.parametrize(
    "template", ["{{ " + "(" * 50_000 + ")" * 50_000 + " }}", "{% if true %}" * 50_000, "{{ " + "[" * 50_000 + " }}"]
)
def test_a_template_that_is_nested_too_deeply_is_broken(template, tmp_path):
    folder = made_tokenizer(tmp_path / "a", "fine")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ExampleError, match="the chat template is broken"):
        Tokenizer(str(folder)).template.prompt(talk("hi"))


def test_named_templates_may_be_files_and_go_before_the_settings(tmp_path):
    folder = made_tokenizer(tmp_path / "a", "of the settings")
    (folder / "chat_template.jinja").write_text("plain")
    assert Tokenizer(str(folder)).template.prompt(talk("hi"), tools=TOOLS) == "plain"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    template = Tokenizer(str(folder)).template
    assert (template.prompt(talk("hi")), template.prompt(talk("hi"), tools=TOOLS)) == ("plain", "with tools")
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    assert theirs.apply_chat_template(talk("hi"), tools=TOOLS, tokenize=False) == "with tools"


def test_marks_leave_nothing_in_the_text_however_they_are_spelled(tmp_path):
    template = "{%+ generation %}a{%+ endgeneration +%}b"
    one = Tokenizer(str(made_tokenizer(tmp_path, template))).template.text_and_learned_spans(talk("hi", "hello"), [1])
    assert (one.text, list(one.learned)) == ("ab", [(0, 1)])


def test_whether_a_token_ends_an_answer_is_known(tokenizers):
    ends = {name: Tokenizer(str(tokenizers[name, "plain"])).template.ends_answers() for name in TEMPLATES}
    assert {name for name, does in ends.items() if not does} == {
        "no end",
        "markers that are special, and no end",
        "an end at the very end",
    }


def test_a_launch_warns_of_a_template_that_ends_no_answer(tokenizers, tmp_path, caplog):
    path = made_jsonl(tmp_path / "talks.jsonl", [TALKS["two"]] * 4)
    for name, count in (("chatml", 0), ("no end", 1)):
        data = rp.Examples(str(path), tokenizer=str(tokenizers[name, "plain"]))
        caplog.clear()
        with caplog.at_level(logging.WARNING, "raypar"):
            warn_of_batches(rp.Run(model=rp.GPT(vocab=300), data=data))
        assert len(caplog.messages) == count, name
    assert "ends an answer by what follows it" in caplog.messages[0]


def test_a_launch_warns_where_most_examples_are_left_out(tmp_path, caplog):
    """Their answers begin after the last token of a sequence."""
    long, short = {"prompt": "x" * 50, "completion": "y"}, {"prompt": "x", "completion": "y"}
    path = made_jsonl(tmp_path / "pairs.jsonl", [long] * 30 + [short] * 10)
    model, data = rp.GPT(seq=16), rp.Examples(str(path), tokenizer=None, packing=False, cache=str(tmp_path))
    with caplog.at_level(logging.WARNING, "raypar"):
        warn_of_batches(rp.Run(model=model, data=data))
        (said,) = caplog.messages
        assert "examples are left out and" in said and "in the first 16 tokens" in said
        warn_of_batches(rp.Run(model=replace(model, seq=64), data=data))
    assert len(caplog.messages) == 1
