"""Texts begin and end alike wherever they are encoded: for training, generation, scores and lm-eval.

The right ids are those of the tokenizers package.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

import raypar as rp
from raypar.actors.data.tokenizers.example_shapes import ExampleText, example_as_text
from raypar.actors.data.tokenizers.tokenizer import Tokenizer
from raypar.actors.specs.sampling import Sampling
from raypar.job.text.generation import request_of

tokenizers = pytest.importorskip("tokenizers")

WORDS = {"[UNK]": 0, "<bos>": 1, "<eos>": 2, "<end>": 3, "a": 4, "b": 5, "c": 6}
FORMS = {"front": "<bos> $A", "both": "<bos> $A <eos>", "behind": "$A <eos>", "neither": "$A"}


def folder_of(path, form, **settings):
    """A folder with a tokenizer whose post-processor has one of the forms."""
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(WORDS, "[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.add_special_tokens(["<bos>", "<eos>", "<end>"])
    special = [(token, WORDS[token]) for token in ("<bos>", "<eos>")]
    model.post_processor = tokenizers.processors.TemplateProcessing(single=FORMS[form], special_tokens=special)
    path.mkdir(exist_ok=True)
    model.save(str(path / "tokenizer.json"))
    for name, values in settings.items():
        (path / f"{name}.json").write_text(json.dumps(values))
    return path, model


def ids_of(tokenizer, record):
    (found,) = tokenizer.tokens_with_loss_mask(
        [example_as_text(record, tokenizer.template, tokenizer.end, learns_all=False)]
    )
    return found.ids.tolist(), found.loss_mask.tolist()


EOS = {"tokenizer_config": {"eos_token": "<eos>", "bos_token": "<bos>"}}


@pytest.mark.parametrize("form", FORMS)
def test_a_text_has_the_front_once_and_one_end_that_is_learned(tmp_path, form):
    path, model = folder_of(tmp_path, form, **EOS)
    tokenizer, front = Tokenizer(str(path)), [1] if form in ("front", "both") else []
    theirs = model.encode("a b").ids
    assert [*front, 4, 5] == theirs[: len(front) + 2]
    assert ids_of(tokenizer, {"text": "a b"}) == ([*front, 4, 5, 2], [*(0 for _ in front), 1, 1, 1])
    assert ids_of(tokenizer, {"prompt": "a", "completion": " b"}) == ([*front, 4, 5, 2], [*(0 for _ in front), 0, 1, 1])
    assert ids_of(tokenizer, {"text": "<bos> a"})[0] == [1, 4, 2]
    assert list(tokenizer.prompted("a b")) == [*front, 4, 5]
    assert list(tokenizer.prompted("<bos> a")) == [1, 4]
    assert list(tokenizer.encoded("a b")) == [4, 5]


def test_what_a_chat_template_wrote_gets_nothing_more(tmp_path):
    path, _ = folder_of(tmp_path, "both", **EOS)
    (found,) = Tokenizer(str(path)).tokens_with_loss_mask([ExampleText("<bos> a b <eos>", [(0, 15)], is_chat=True)])
    assert found.ids.tolist() == [1, 4, 5, 2]


@pytest.mark.parametrize(
    ("settings", "form", "end"),
    [
        ({"generation_config": {"eos_token_id": [3, 2]}}, "front", 3),
        ({"config": {"eos_token_id": 3}}, "neither", 3),
        ({"tokenizer_config": {"bos_token": "<bos>"}}, "both", 2),
        ({"tokenizer_config": {"eos_token": "<end>"}, "config": {"eos_token_id": 2}}, "both", 3),
    ],
)
def test_the_end_is_what_the_folder_says_wherever_it_says_it(tmp_path, settings, form, end):
    path, _ = folder_of(tmp_path, form, **settings)
    ids, learned = ids_of(Tokenizer(str(path)), {"text": "a b"})
    assert (ids[-2:], learned[-2:]) == ([5, end], [1, 1])


def test_a_tokenizer_without_any_end_ends_nothing(tmp_path):
    path, _ = folder_of(tmp_path, "front")
    tokenizer = Tokenizer(str(path))
    assert (tokenizer.end, tokenizer.ends) == ("", frozenset())
    assert ids_of(tokenizer, {"text": "a b"})[0] == [1, 4, 5]


def test_a_prompt_begins_as_a_text_for_training_does(tmp_path):
    path, _ = folder_of(tmp_path, "both", **EOS)
    (tmp_path / "talks.jsonl").write_text('{"text": "a b"}\n' * 4)
    data = rp.Examples(str(tmp_path / "talks.jsonl"), tokenizer=str(path))
    run = rp.Run(model=rp.GPT(layers=1, hidden=8, heads=2, seq=8, vocab=7), data=data)
    request = request_of(run, ["a b", "<bos> c", [4, 4]], 2, Sampling(), None)
    assert request.prompts == ((1, 4, 5), (1, 6), (4, 4))
    assert request.stop_tokens == frozenset({2})


def test_bytes_have_neither():
    tokenizer = Tokenizer(None)
    assert tokenizer.prompted("ab") == (97, 98)
    (found,) = tokenizer.tokens_with_loss_mask([example_as_text({"text": "ab"}, None, tokenizer.end, learns_all=False)])
    assert found.ids.dtype == np.uint32
    assert found.ids.tolist() == [97, 98]
