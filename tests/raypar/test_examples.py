"""The examples run and do what they say."""

from __future__ import annotations

import importlib.util
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def load(name):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_train_your_text(cluster, tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "b.txt").write_text("pack my box with five dozen liquor jugs. " * 200)
    evaluation = load("train_your_text").main(str(tmp_path), steps=8)
    assert evaluation.loss < 5.0
    assert evaluation.tokens == 4 * 8 * 4 * 128


def test_own_model(cluster):
    example = load("own_model")
    first, last = example.main(steps=30)
    assert last < 0.7 * first
    assert all(bool((a == b).all()) for a, b in zip(example.batch(3, 1, 0), example.batch(3, 1, 0), strict=True))


def test_first_steps_cell_by_cell(cluster, capsys, monkeypatch):
    path = EXAMPLES / "first_steps.py"
    cells, space, shown = path.read_text().split("\n# %% ")[1:], {"__name__": "first_steps"}, {}
    for cell in cells:
        exec(compile("# " + cell, str(path), "exec"), space)
        shown[cell.partition("\n")[0]] = capsys.readouterr().out
    out = "".join(shown.values())
    assert "0B0 waits for 1SEND_B0 + 0RECV_B0" in out
    assert "values for other actions" in out
    assert "bitwise equal to the recording" in out
    assert "resumed from step-00000002: the same losses" in out
    assert len(cells) == 10
    assert space["by_hand"].step == 1
