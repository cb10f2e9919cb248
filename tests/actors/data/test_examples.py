"""Examples for fine-tuning: their shapes, what of them is learned, and how they share sequences."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

import raypar as rp
from raypar.actors.data.examples.example_batches import IGNORED, ExampleBatches, example_faults, open_sequences
from raypar.actors.data.examples.example_blocks import blocks_of_examples
from raypar.actors.data.examples.example_files import open_examples
from raypar.actors.data.examples.mixing import mixed
from raypar.actors.data.examples.packing import pack_best_fit
from raypar.actors.data.tokenizers.example_shapes import ExampleText
from raypar.actors.data.tokenizers.tokenizer import Tokenizer
from tests.support.examples import CHATML, MARKED, TALK, made_jsonl, made_tokenizer

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return made_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def opened(tmp_path, folder, records, **changes):
    path = made_jsonl(tmp_path / "data.jsonl", records)
    fields = {"tokenizer": str(folder), "cache": str(tmp_path / "cache")}
    return open_examples("path", str(path), rp.Examples(str(path), **fields | changes))


def parts_of(converted, folder, learned):
    """The texts of the learned, or the other, tokens of each example."""
    tokenizer, found, start = Tokenizer(str(folder)), [], 0
    for end in converted.ends.tolist():
        ids, mask = converted.ids[start:end], converted.loss_mask[start:end]
        found.append(tokenizer.decoded(ids[mask == learned].tolist()))
        start = end
    return found


SHAPES = [
    ({"text": "abc"}, "abc<|im_end|>", ""),
    ({"prompt": "2+2=", "completion": " 4"}, " 4<|im_end|>", "2+2="),
    (
        {"messages": TALK},
        "fine, and you<|im_end|>good<|im_end|>",
        "<|im_start|>user\nhow are you<|im_end|>\n<|im_start|>assistant\n\n<|im_start|>user\nfine<|im_end|>\n"
        "<|im_start|>assistant\n\n",
    ),
    (
        {"prompt": TALK[:3], "completion": TALK[3:]},
        "good<|im_end|>",
        "<|im_start|>user\nhow are you<|im_end|>\n<|im_start|>assistant\nfine, and you<|im_end|>\n"
        "<|im_start|>user\nfine<|im_end|>\n<|im_start|>assistant\n\n",
    ),
]


@pytest.mark.parametrize(("record", "learned", "other"), SHAPES, ids=["text", "completion", "messages", "both"])
@pytest.mark.parametrize("template", [CHATML, MARKED], ids=["plain", "marked"])
def test_of_every_shape_the_answers_are_learned(record, learned, other, template, tmp_path):
    folder = made_tokenizer(tmp_path / "tokenizer", template)
    converted = opened(tmp_path, folder, [record, record])
    assert parts_of(converted, folder, 1) == [learned] * 2
    assert parts_of(converted, folder, 0) == [other] * 2
    converted = opened(tmp_path, folder, [record], learn="all")
    assert parts_of(converted, folder, 0) == [""]


@pytest.mark.parametrize("talk", [TALK, TALK[:2], [{"role": "system", "content": "Grüße 🙂"}, *TALK]])
def test_the_mask_is_that_of_transformers(talk, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = made_tokenizer(tmp_path / "tokenizer", MARKED)
    theirs = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        talk, return_assistant_tokens_mask=True, return_dict=True, tokenize=True
    )
    converted = opened(tmp_path, folder, [{"messages": talk}])
    assert converted.ids.tolist() == theirs["input_ids"]
    assert converted.loss_mask.tolist() == theirs["assistant_masks"]
    plain = opened(tmp_path, made_tokenizer(tmp_path / "plain"), [{"messages": talk}])
    assert (plain.ids.tolist(), plain.loss_mask.tolist()) == (theirs["input_ids"], theirs["assistant_masks"])


def test_a_template_that_leaves_earlier_answers_out_is_told(tmp_path):
    forgets = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.role + m.content }}{% endif %}{% endfor %}"
    )
    folder = made_tokenizer(tmp_path / "tokenizer", forgets)
    path = str(made_jsonl(tmp_path / "data.jsonl", [{"text": "a"}, *[{"messages": TALK}] * 7]))
    (fault,) = example_faults(rp.Examples(path, str(folder), cache=str(tmp_path)), 64, 300)
    assert (
        "path: line 2 of data.jsonl has message 1, an answer that is not found in what the chat template writes"
        in fault
    )
    assert fault.endswith("(and 6 more of the 8 examples that were read)")


def test_all_that_is_wrong_is_told_and_nothing_is_left(folder, tmp_path):
    lines = [
        "{",
        '{"texts": 1}',
        "5",
        '{"messages": []}',
        '{"messages": [{"role": "user"}]}',
        '{"prompt": 1, "completion": 2}',
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(lines))
    faults = example_faults(rp.Examples(str(path), str(folder), cache=str(tmp_path / "cache")), 64, 300)
    assert [fault.partition(":")[2][:57].strip() for fault in faults] == [
        "line 1 of data.jsonl is not JSON (Expecting property nam",
        "line 2 of data.jsonl has texts: an example has text, mes",
        "line 3 of data.jsonl is 5: an example is an object with",
        "line 4 of data.jsonl has messages []: they are a list wi",
        "line 5 of data.jsonl has message 0 {'role': 'user'}: a m",
    ]
    assert not list((tmp_path / "cache").rglob("*.json"))
    (tmp_path / "none").mkdir()
    told = {
        rp.Examples(str(tmp_path / "gone.jsonl")): "(there is no such file or folder): correct the path",
        rp.Examples(str(tmp_path / "gone*.jsonl")): "(the pattern matches no file): correct the path",
        rp.Examples(str(tmp_path / "none")): "has no file of .jsonl",
        rp.Examples(str(path), str(tmp_path)): "has no tokenizer.json: give a folder that has it (save_pretrained",
        rp.Examples(str(path), "qwen/tiny"): "tokenizer: there is no 'qwen/tiny': give a folder that has it",
        rp.Examples(str(path), "nothing"): "tokenizer: there is no 'nothing': give a folder that has it",
        rp.Examples(str(path), "qwen/small"): "hf download qwen/small --local-dir small fetches it: give small",
        rp.Examples(str(path), str(path)): "is not a tokenizers JSON file",
        rp.Examples(str(path), template=str(tmp_path / "gone")): "template: ",
        rp.Examples(str(folder / "tokenizer.json")): "example 1 of tokenizer.json has ",
        rp.Examples(str(made_jsonl(tmp_path / "chat.jsonl", [{"messages": TALK}]))): "there is no chat template",
        rp.Examples(str(made_jsonl(tmp_path / "one.jsonl", [{"text": "a"}]))): "needs two, one for validation",
    }
    for spec, says in told.items():
        (fault,) = example_faults(spec, 64, 300)
        assert says in fault


def test_a_folder_without_a_tokenizer_is_no_name_of_a_model(tmp_path, monkeypatch):
    """An export of a model of bytes has none, and "mine/tokenizer.json" looks like a name at huggingface.co."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (fault,) = example_faults(rp.Examples(str(made_jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * 2)), "mine"), 64, 300)
    assert "'mine' has no tokenizer.json: give a folder that has it" in fault
    assert "huggingface.co" not in fault


def test_a_vocabulary_that_is_too_small_and_examples_without_answers_are_told(folder, tmp_path):
    path = str(made_jsonl(tmp_path / "data.jsonl", [{"messages": TALK[:1]}] * 3))
    faults = example_faults(rp.Examples(path, str(folder), cache=str(tmp_path)), 64, 100)
    assert "the largest token id is 257, but model.vocab is 100: set model.vocab to 258" in faults[0]
    assert "no token of its examples is a target" in faults[1] and "how are you<|im_end|>" in faults[1]


def test_a_path_whose_sets_both_lack_a_target_has_one_fault(folder, tmp_path):
    talks = [{"messages": [{"role": "user", "content": f"{number}"}]} for number in range(20)]
    (fault,) = example_faults(rp.Examples(str(made_jsonl(tmp_path / "a.jsonl", talks)), str(folder)), 64, 300)
    assert fault.startswith(
        "path: no token of its examples is a target in the first 65 tokens (model.seq + 1), such as"
    )
    assert "data.learn 'all' (--data.learn all)" in fault


def test_packing_leaves_little_room_and_every_piece_is_in_one_sequence():
    lengths = np.random.default_rng(0).integers(1, 65, 3000)
    found = pack_best_fit(lengths, 64)
    assert sorted(found.pieces.tolist()) == list(range(3000))
    sums = [int(lengths[found.of(row)].sum()) for row in range(len(found.ends))]
    assert max(sums) <= 64
    assert len(sums) <= 1.02 * -(-int(lengths.sum()) // 64)


@pytest.mark.parametrize("packing", [True, False])
def test_an_epoch_has_every_target_once_and_goes_on_in_the_middle(packing, folder, tmp_path):
    texts = [chr(97 + i) * (3 + 5 * i) for i in range(20)]  # the longest has 98 letters, more than a sequence
    path = str(made_jsonl(tmp_path / "data.jsonl", [{"text": text} for text in texts]))
    spec = rp.Examples(path, str(folder), packing=packing, val_path=path, cache=str(tmp_path))
    train, _ = open_sequences(spec, 32)
    batches = ExampleBatches(spec, 32, 1, 1, 1, seed=3)
    for epoch in range(2):
        steps = range(epoch * len(train), (epoch + 1) * len(train))
        rows = [batches.batch("train", step, 0, 0) for step in steps]
        found = torch.cat([targets[targets != IGNORED] for _, targets, _ in rows]).tolist()
        letters = Tokenizer(str(folder)).decoded(found).replace("<|im_end|>", "")
        assert {letter: letters.count(letter) for letter in letters} == {text[0]: len(text) - 1 for text in texts}
        assert found.count(257) == 20
        for inputs, _, extents in rows:
            for at, start in enumerate(extents.starts[0].tolist()):
                assert start == at or inputs[0, start] == inputs[0, at], "a token sees only its own example"
    again = ExampleBatches(spec, 32, 1, 1, 1, seed=3).batch("train", len(train) + 1, 0, 0)
    assert same(again, rows[1])
    shared = ExampleBatches(spec, 32, 1, 2, 2, seed=3)
    together = torch.cat([shared.batch("train", 0, m, dp)[0] for m in range(2) for dp in range(2)])
    assert torch.equal(together, torch.cat([batches.batch("train", step, 0, 0)[0] for step in range(4)]))


def test_a_conversation_that_is_too_long_is_cut_and_one_without_answers_left_out(folder, tmp_path):
    silent = [{"role": "user", "content": "x" * 100}, {"role": "assistant", "content": "y"}]
    path = str(made_jsonl(tmp_path / "data.jsonl", [{"messages": TALK}, {"messages": silent}, {"text": "ab"}]))
    train, _ = open_sequences(rp.Examples(path, str(folder), val_path=path, cache=str(tmp_path)), 40)
    (part,) = train.parts.values()
    assert (part.pieces.cut, part.pieces.dropped, len(part.pieces.firsts)) == (2, 1, 2)
    assert sorted(part.pieces.lengths.tolist()) == [2, 40]


def test_without_a_tokenizer_the_bytes_of_what_is_learned_are():
    text = "é? für 日!"
    (found,) = Tokenizer(None).tokens_with_loss_mask([ExampleText(text, [(3, 6), (7, 9)])])
    assert bytes(found.ids.astype("uint8")).decode() == text
    learned = [byte for byte, is_so in zip(found.ids.tolist(), found.loss_mask.tolist(), strict=True) if is_so]
    assert bytes(learned).decode() == "für日!"


FINE = b'{"text": "fine"}\n' * 3
HALF = "line 4 of it.jsonl has half of a character, \\ud800, which no text can have: write all of it"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("it.jsonl", FINE + b'{"text": "a\\ud800b"}\n', HALF),
        ("it.jsonl", FINE + b'{"prompt": "a", "completion": "b\\ud800"}\n', HALF),
        ("it.jsonl", b'{"text": ""}\n' * 20, "none of its 20 examples has a token: give texts that are not empty"),
        ("it.txt", b"", "none of its 1 examples has a token"),
        ("it.txt", "für alle".encode("latin-1"), "it.txt is no UTF-8 text: byte 1 (0xfc) is not UTF-8: convert it, if"),
    ],
)
@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_texts_that_are_none_are_told_with_their_place(folder, tmp_path, name, content, says, has_tokenizer):
    (tmp_path / name).write_bytes(content)
    spec = rp.Examples(str(tmp_path / name), str(folder) if has_tokenizer else None, cache=str(tmp_path / "cache"))
    (fault,) = rp.faults(rp.Run(model=rp.Llama(vocab=300, seq=64), data=spec))
    if has_tokenizer and content in (b"", b'{"text": ""}\n' * 20):  # an end token is one
        assert "has 1 example, and needs two" in fault or "no token of its examples is a target" in fault
    else:
        assert says in fault


def test_ids_that_are_no_byte_stand_for_nothing():
    assert Tokenizer(None).decoded([97, 255, 256, 98, 300]) == "a\ufffdb"


def test_what_is_read_of_rows_adds_up_to_their_file(tmp_path):
    parquet, pyarrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    path, read = tmp_path / "a.parquet", []
    parquet.write_table(pyarrow.Table.from_pylist([{"text": str(number)} for number in range(3000)]), path)
    assert len([*blocks_of_examples([path], read.append)]) > 1
    assert sum(read) == path.stat().st_size and min(read) > 0


def test_a_folder_has_the_examples_of_all_its_files(folder, tmp_path):
    (tmp_path / "many" / "inner").mkdir(parents=True)
    made_jsonl(tmp_path / "many" / "b.jsonl", [{"text": "two"}])
    made_jsonl(tmp_path / "many" / "inner" / "a.jsonl", [{"text": "three"}])
    (tmp_path / "many" / "notes.md").write_text("no examples")
    found = open_examples("path", str(tmp_path / "many"), rp.Examples("", cache=str(tmp_path / "cache")))
    assert bytes(found.ids.astype("uint8")) == b"twothree"


def test_a_byte_order_mark_is_no_character(folder, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone")
    found = open_examples("path", str(tmp_path / "a.txt"), rp.Examples("", cache=str(tmp_path / "cache")))
    assert bytes(found.ids.astype("uint8")) == b"one"


@pytest.mark.parametrize("damaged", [".ids", ".learned", ".ends", None])
def test_what_was_converted_is_converted_again_only_if_a_file_of_it_is_not_whole(folder, tmp_path, damaged):
    path = made_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "another"}])
    spec = rp.Examples("", str(folder), cache=str(tmp_path / "cache"))
    before = open_examples("path", str(path), spec).ids.tolist()
    kept = {file.suffix: file for file in (tmp_path / "cache").rglob("*.*")}
    made = kept[".json"].stat().st_ino
    if damaged is not None:
        kept[damaged].write_bytes(kept[damaged].read_bytes()[:-1])
    assert open_examples("path", str(path), spec).ids.tolist() == before
    assert (kept[".json"].stat().st_ino == made) == (damaged is None)


def test_other_files_have_the_same_examples(folder, tmp_path):
    records = [{"text": "one"}, {"text": "two"}]
    (tmp_path / "a.json").write_text(json.dumps(records))
    (tmp_path / "b.txt").write_text("one")
    spec = rp.Examples("", str(folder), cache=str(tmp_path / "cache"))
    wanted = opened(tmp_path, folder, records).ids.tolist()
    assert open_examples("path", str(tmp_path / "a.json"), spec).ids.tolist() == wanted
    assert open_examples("path", str(tmp_path / "b.txt"), spec).ids.tolist() == wanted[:4]
    assert open_examples("path", str(tmp_path / "*.[jt]*"), spec).facts.examples == 2 + 1 + 2
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(records), tmp_path / "c.parquet")
    assert open_examples("path", str(tmp_path / "c.parquet"), spec).ids.tolist() == wanted


def mixture(tmp_path, folder, **changes):
    """Two sets of texts, each of letters that no other text has: 40 of Latin, and 15 that are Greek."""
    sets = {
        "latin.jsonl": [chr(97 + i % 26) * (3 + i % 7) + str(i) for i in range(40)],
        "greek.jsonl": [chr(0x3B1 + i % 24) * (2 + i % 5) + str(i) for i in range(15)],
    }
    weights = {"latin.jsonl": 0.75, "greek.jsonl": 0.25}
    paths = {
        str(made_jsonl(tmp_path / name, [{"text": t} for t in texts])): weights[name] for name, texts in sets.items()
    }
    spec = rp.Examples(paths, str(folder), cache=str(tmp_path), **changes)
    return spec, [text for texts in sets.values() for text in texts]


def same(one, other):
    """Whether two batches are the same, with their documents and padding."""
    pairs = zip((*one[:2], *one[2]), (*other[:2], *other[2]), strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def texts_in(rows, folder):
    """The texts of sequences, whole."""
    tokenizer, found = Tokenizer(str(folder)), []
    for inputs, targets, (starts, _) in rows:
        for begin in dict.fromkeys(starts[0].tolist()):
            place = (starts[0] == begin).nonzero().flatten()
            if targets[0, place[0]] != IGNORED:
                ids = [int(inputs[0, place[0]]), *targets[0, place].tolist()]
                found.append(tokenizer.decoded(ids).replace("<|im_end|>", ""))
    return found


def test_a_shuffled_mixed_packed_epoch_goes_on_in_its_middle_with_every_document_once(folder, tmp_path):
    spec, texts = mixture(tmp_path, folder)
    val = str(made_jsonl(tmp_path / "val.jsonl", [{"text": "validation"}] * 2))
    spec = replace(spec, val_path=val)
    train, _ = open_sequences(spec, 32)
    sizes, block = [len(part) for part in train.parts.values()], train.shares.tolist()
    assert block == [3, 1] and sizes[0] > sizes[1] > 2
    whole = 4 * max(-(-size // share) for size, share in zip(sizes, block, strict=True))  # an epoch of both
    alone = ExampleBatches(spec, 32, 1, 1, 1, seed=3)  # a step is a sequence
    rows = [alone.batch("train", step, 0, 0) for step in range(whole)]
    stopped = 8  # it goes on in another process, with two replicas and two microbatches
    others = ExampleBatches(spec, 32, 1, 2, 2, seed=3)
    went_on = [
        others.batch("train", step, microbatch, dp)
        for step in range(stopped // 4, whole // 4)
        for microbatch in range(2)
        for dp in range(2)
    ]
    for one, other in zip(rows[stopped:], went_on, strict=True):
        assert same(one, other)
    rows = rows[:stopped] + went_on
    part, _ = mixed(np.arange(len(rows)), train.shares, 3)
    for which, size in enumerate(sizes):
        epoch = [row for row, of in zip(rows, part.tolist(), strict=True) if of == which][:size]
        own = texts[:40] if which == 0 else texts[40:]
        assert sorted(texts_in(epoch, folder)) == sorted(own), "every document comes once"


def test_each_set_keeps_some_for_validation_and_faults_of_all_are_told(folder, tmp_path):
    spec, _ = mixture(tmp_path, folder)
    _, val = open_sequences(spec, 32)
    assert [len(part.pieces.firsts) for part in val.parts.values()] == [4, 2]
    batches = ExampleBatches(spec, 32, 1, 1, 1, seed=3)
    held = {text for step in range(len(val) * 4) for text in texts_in([batches.batch("evaluate", step, 0, 0)], folder)}
    assert len(held) == 6
    faults = example_faults(rp.Examples({str(tmp_path / "a.jsonl"): 1.0, str(tmp_path / "b.jsonl"): 2e4}), 32, 300)
    assert [fault.partition(":")[2][:50] for fault in faults] and len(faults) == 3
    assert "is less than one in 10,000 of all: leave it out" in faults[0]
    assert example_faults(rp.Examples({}), 32, 300) == [
        "path: it names nothing: give a file, or files with their weights"
    ]
