"""Folders that ``datasets.save_to_disk`` writes, written here as it writes them."""

from __future__ import annotations

import json

import pytest

import raypar as rp
from raypar.actors.data.examples.example_batches import example_faults
from raypar.actors.data.examples.example_files import open_examples
from raypar.actors.data.examples.saved_dataset import shards_of
from raypar.actors.data.tokenizers.example_shapes import ExampleError
from tests.support.examples import TALK, made_jsonl, made_tokenizer

RECORDS = [{"text": "one"}, {"text": "two"}, {"text": "three"}, {"text": "four"}, {"text": "five"}]


def described(folder, names, **more):
    """The JSON files of a dataset."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None, **more}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}}))
    return folder


def saved(folder, records, shards=2):
    """A dataset in shards, each of several record batches."""
    pyarrow = pytest.importorskip("pyarrow")
    names = [f"data-{i:05}-of-{shards:05}.arrow" for i in range(shards)]
    described(folder, names)
    schema = pyarrow.Table.from_pylist(records).schema
    share = -(-len(records) // shards)
    for i, name in enumerate(names):
        table = pyarrow.Table.from_pylist(records[i * share : (i + 1) * share], schema)
        with pyarrow.OSFile(str(folder / name), "wb") as sink, pyarrow.ipc.new_stream(sink, schema) as out:
            out.write_table(table, max_chunksize=2)
    return folder


def splits(folder, *names):
    folder.mkdir(exist_ok=True)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": names}))
    return folder


def test_a_saved_dataset_has_the_examples_of_its_shards_in_order(tmp_path):
    saved(tmp_path / "data", RECORDS)
    spec = rp.Examples("", cache=str(tmp_path / "cache"))
    wanted = open_examples("path", str(made_jsonl(tmp_path / "data.jsonl", RECORDS)), spec)
    found = open_examples("path", str(tmp_path / "data"), spec)
    assert found.ids.tolist() == wanted.ids.tolist() and found.ends.tolist() == wanted.ends.tolist()
    splits(tmp_path, "train", "test")
    saved(tmp_path / "train", RECORDS[:3])
    saved(tmp_path / "test", RECORDS[3:])
    assert open_examples("path", str(tmp_path), spec).facts.examples == 3
    assert open_examples("val_path", str(tmp_path / "test"), spec).facts.examples == 2


def test_columns_that_are_null_are_not_there(tmp_path):
    pytest.importorskip("jinja2"), pytest.importorskip("tokenizers")
    folder = made_tokenizer(tmp_path / "tokenizer")
    saved(tmp_path / "data", [{"text": "one", "messages": None}, {"text": None, "messages": TALK}])
    spec = rp.Examples("", str(folder), cache=str(tmp_path / "cache"))
    assert open_examples("path", str(tmp_path / "data"), spec).facts.examples == 2


def test_a_shard_that_ends_early_and_no_arrow_are_told(tmp_path):
    folder = saved(tmp_path / "data", [{"text": "x" * 1000}] * 20, shards=1)
    (shard,) = folder.glob("*.arrow")
    whole, spec = shard.read_bytes(), rp.Examples(str(folder), cache=str(tmp_path / "cache"))
    for content in (whole[: len(whole) // 2], b"this is no Arrow", b""):
        shard.write_bytes(content)
        (fault,) = example_faults(spec, 64, 300)
        assert fault.startswith(f"path: {shard.name} is broken, or of another kind (")
    parquet = tmp_path / "data.parquet"
    parquet.write_bytes(b"PAR1 but no more")
    (fault,) = example_faults(rp.Examples(str(parquet), cache=spec.cache), 64, 300)
    assert fault.startswith("path: data.parquet is broken, or of another kind (")
    assert not [*(tmp_path / "cache" / "examples").iterdir()]


def told(folder, trains=True):
    with pytest.raises(ExampleError) as caught:
        shards_of(folder, trains=trains)
    return str(caught.value)


def test_what_is_missing_is_told(tmp_path):
    folder = described(tmp_path / "data", ["a.arrow", "b.arrow"])
    (folder / "b.arrow").touch()
    assert told(folder) == f"'{folder}' lacks a.arrow, of 2 files: copy the folder again"
    (folder / "a.arrow").touch()
    assert [file.name for file in shards_of(folder, trains=True)] == ["a.arrow", "b.arrow"]
    assert "'../a.arrow', which leaves the folder" in told(described(folder, ["../a.arrow"]))
    assert "names no files of examples" in told(described(folder, []))
    assert "names no files of examples" in told(described(folder, [5]))
    assert "flatten_indices" in told(described(folder, ["a.arrow"], _indices_data_files=[{"filename": "i.arrow"}]))
    (folder / "state.json").write_text("{")
    assert "state.json' can't be read (" in told(folder)


def test_of_splits_one_is_named(tmp_path):
    splits(tmp_path, "train", "test")
    assert told(tmp_path, trains=False) == (
        f"'{tmp_path}' has several splits, so name one: '{tmp_path / 'train'}', '{tmp_path / 'test'}'"
    )
    assert "train/state.json is missing" in told(tmp_path)
    (fault,) = example_faults(rp.Examples(str(tmp_path / "dev"), cache=str(tmp_path)), 64, 300)
    assert fault == f"path: '{tmp_path}' has no split 'dev': give one of train, test"
    (fault,) = example_faults(rp.Examples(str(tmp_path / "test"), cache=str(tmp_path)), 64, 300)
    assert fault == f"path: '{tmp_path}' has a split 'test', but none of its files is there: copy the dataset again"
    splits(tmp_path, "test")
    assert told(tmp_path) == f"'{tmp_path}' has several splits, so name one: '{tmp_path / 'test'}'"
