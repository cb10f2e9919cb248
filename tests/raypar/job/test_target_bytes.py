"""Bits per byte: the bytes of an evaluation's targets are those of the text that they are read from."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest

import raypar as rp
from raypar.actors.data.batches import batch_source
from raypar.actors.data.tokenizers.tokenizer import bytes_of_ids
from raypar.job.steps.evaluation import Evaluations, target_bytes
from raypar.reporting.evaluation import Evaluation
from raypar.reporting.progress import evaluation_line
from tests.support.examples import made_tokenizer

TEXT = "".join(f"Größe und Maß: 3 × {n} = {3 * n} – naïve café, 東京 and 🚀. " for n in range(60))
MODEL = rp.GPT(layers=2, hidden=16, heads=2, vocab=400, seq=16)


def trained(decoder, fallback=False):
    """A tokenizer of some merges."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    model = Tokenizer(models.BPE(byte_fallback=fallback, unk_token="<unk>" if fallback else None))
    first = [f"<0x{byte:02X}>" for byte in range(256)] if fallback else []
    alphabet = pre_tokenizers.ByteLevel.alphabet() if decoder == "bytes" else [*"abcdefghijklmnopqrstuvwxyz ."]
    if decoder == "bytes":
        model.pre_tokenizer, model.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:
        model.normalizer = normalizers.Replace(" ", "\u2581")
        parts = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        model.decoder = decoders.Sequence(parts)
    names = ["<unk>"] if fallback else []
    trainer = trainers.BpeTrainer(
        vocab_size=380, special_tokens=[*names, "<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator([TEXT if decoder == "bytes" else "some plain words and more words. " * 30], trainer)
    if fallback:
        told = json.loads(model.to_str())
        vocab = told["model"]["vocab"]
        vocab |= {one: len(vocab) + number for number, one in enumerate(first)}
        model = Tokenizer.from_str(json.dumps(told))
    return model


@pytest.mark.parametrize("kind", ["bytes", "spaces"])
def test_ids_stand_for_the_bytes_that_they_are_decoded_to(kind):
    pytest.importorskip("tokenizers")
    model = trained(kind, fallback=kind == "spaces")
    sizes = bytes_of_ids(model)
    for text in (TEXT, "some words", "", " a  b ", "0x41 東"):
        ids = model.encode(text).ids
        assert sizes[ids].sum() == len(text.encode()), text
        assert sizes[[*ids, model.token_to_id("<|end|>")]].sum() == len(text.encode()), "special tokens are none"


def test_tokens_without_their_spaces_do_not_say():
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, decoders, models

    model = Tokenizer(models.WordPiece({"a": 0, "##b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    model.decoder = decoders.WordPiece()
    assert bytes_of_ids(model) is None


@pytest.mark.parametrize("dp", [1, 2])
def test_the_targets_of_an_evaluation_are_counted(dp, tmp_path):
    pytest.importorskip("tokenizers")
    model = trained("bytes")
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "val.txt").write_text(TEXT[7:] * 3)
    data = rp.Text(
        str(tmp_path / "a.txt"),
        str(tmp_path / "tokenizer.json"),
        val_path=str(tmp_path / "val.txt"),
        cache=str(tmp_path / "cache"),
    )
    run = rp.Run(model=MODEL, data=data, mesh=rp.Mesh(dp=dp), microbatches=2, micro_batch_size=2)
    source = batch_source(data, MODEL, 2, 2, dp, run.seed)
    every = [source.targets("evaluate", s, m, d)[0] for s in range(3) for m in range(2) for d in range(dp)]
    # the text of a window of ids, byte by byte, with a table that tokenizers has and this code has not
    from tokenizers.pre_tokenizers import ByteLevel

    assert len(ByteLevel.alphabet()) == 256
    letters = sum(len(model.id_to_token(int(one))) for ids in every for one in ids.flatten())
    decoded = sum(len(model.decode(row.tolist()).encode()) for ids in every for row in ids)
    found = target_bytes(run, 3, sum(ids.numel() for ids in every))
    assert found == letters
    assert found == pytest.approx(decoded, abs=len(every) * 2 * 8), "but for characters that a window cuts"
    assert target_bytes(run, 3, 1) is None, "of other targets than were counted nothing is told"
    told = Evaluations(run).take(5, 3, lambda number: [result_of(every, number, dp)])
    nats = 2.0 * sum(ids.numel() for ids in every)
    assert told.bits_per_byte == pytest.approx(nats / math.log(2) / found, rel=1e-12)


def result_of(every, number, dp):
    """What an actor tells of an evaluation step, whose losses are 2 nats a token."""
    counts = tuple(ids.numel() for ids in every[number * 2 * dp : (number + 1) * 2 * dp])
    return SimpleNamespace(losses=(2.0,) * len(counts), counts=counts, metrics=())


def test_without_a_tokenizer_a_target_is_a_byte_and_ids_of_a_file_do_not_say(tmp_path):
    run = rp.Run(model=MODEL)
    assert target_bytes(run, 4, 77) == 77
    assert target_bytes(rp.Run(data=rp.Text("tokens.bin")), 4, 77) is None
    assert target_bytes(rp.Run(data=rp.Batches(lambda s, m, d: None)), 4, 77) is None


def test_what_is_not_learned_stands_for_no_bytes(tmp_path):
    pytest.importorskip("tokenizers")
    folder = made_tokenizer(tmp_path / "tok")
    lines = [json.dumps({"prompt": "What is it? ", "completion": f"Größe {n}"}) for n in range(40)]
    (tmp_path / "it.jsonl").write_text("\n".join(lines))
    data = rp.Examples(str(tmp_path / "it.jsonl"), str(folder), cache=str(tmp_path / "cache"))
    run = rp.Run(model=MODEL, data=data, microbatches=1, micro_batch_size=1)
    (labels,) = batch_source(data, MODEL, 1, 1, 1, 0).targets("evaluate", 0, 0, 0)
    learned = int((labels != -100).sum())
    ends = int(sum((labels == number).sum() for number in np.flatnonzero(zeros(folder))))
    assert 0 < target_bytes(run, 1, learned) == learned - ends, "of bytes each token is one, but the end is none"


def zeros(folder):
    from raypar.actors.data.tokenizers.tokenizer import Tokenizer

    return Tokenizer(str(folder)).id_bytes == 0


def test_evaluations_tell_them():
    one = Evaluation(3, math.log(2), 80, 0.1, num_bytes=160)
    assert one.bits_per_byte == pytest.approx(0.5)
    assert evaluation_line(one) == "after step 3: validation loss 0.6931, perplexity 2.00, 0.500 bits per byte"
    assert one.to_dict()["bits_per_byte"] == pytest.approx(0.5) and "0.5 bits per byte" in repr(one).replace(
        "0.50", "0.5"
    )
    assert "bits_per_byte" not in Evaluation(3, 1.0, 80, 0.1).to_dict()
    assert Evaluation(3, 1.0, 80, 0.1, is_cross_entropy=False, num_bytes=9).bits_per_byte is None
