"""Named pipes and devices in place of a user's files: a message at once, and no waiting for who writes into them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CASES = {
    "config.json": ("train", "--model.hf", "HERE", "--dry-run"),
    "model.safetensors": ("train", "--model.hf", "HERE", "--dry-run"),
    "model.safetensors.index.json": ("eval", "HERE"),
    "tokenizer.json": ("data", "show", "HERE/some.jsonl", "--tokenizer", "HERE"),
    "adapter.toml": ("train", "HERE/adapter.toml", "--dry-run"),
    "code.py": ("draw", "HERE/code.py:fn", "--ranks", "2"),
    "rows.csv": ("check", "HERE/rows.csv"),
    "text.txt": ("train", "gpt-tiny", "--data.path", "HERE/text.txt", "--dry-run"),
    "talks.jsonl": ("data", "show", "HERE/talks.jsonl"),
    "faults.toml": ("train", "gpt-tiny", "--chaos", "HERE/faults.toml", "--dry-run"),
}
PROGRAM = "import sys; from raypar.cli.main import run_command as main; sys.exit(main())"


@pytest.mark.sampled
@pytest.mark.timeout(60)
@pytest.mark.parametrize("file", CASES)
def test_a_pipe_in_place_of_a_file_is_told_at_once(file, tmp_path):
    (tmp_path / "some.jsonl").write_text('{"text": "a"}\n')
    if file.startswith("model"):
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    os.mkfifo(tmp_path / file)
    words = [word.replace("HERE", str(tmp_path)) for word in CASES[file]]
    run = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, timeout=50)
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
