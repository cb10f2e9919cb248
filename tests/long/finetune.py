"""docs/finetune.md from start to end: SmolLM2-135M learns a manner of speech from 200 conversations, and answers in it.

    python -m tests.long.finetune FOLDER

FOLDER is SmolLM2-135M as docs/finetune.md makes it. Prints the validation losses, the seconds and the answers. Exit
code 1 if the last validation loss is not below half of the first, an answer lacks the manner, or the training takes ten
minutes.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from raypar.actors.data.tokenizers.tokenizer import Tokenizer

DOCS = Path(__file__).parents[2] / "docs" / "finetune.md"
COMMAND = [sys.executable, "-c", "from raypar.cli.main import run_command as main; raise SystemExit(main())"]
FLAGS = ["--mesh.pp", "2", "--model.seq", "256", "--microbatches", "4", "--optim.lr", "2e-3", "--folder", "run"]
QUESTIONS = ("What is the capital of Germany?", "What is 20 plus 5?")
MOST_SECONDS = 600


def said(home, *words):
    """What a command of raypar says, and ends this process if it fails."""
    ran = subprocess.run([*COMMAND, *words], cwd=home, capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"raypar {' '.join(words)}: {ran.returncode}\n{ran.stderr}")
    return ran.stdout + ran.stderr


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__)
        return 2
    folder = str(Path(sys.argv[1]).absolute())
    (makes,) = [block for block in re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.S) if "Ahoy!" in block]
    with tempfile.TemporaryDirectory() as home:
        subprocess.run([sys.executable, "-c", makes], cwd=home, check=True)
        began = time.perf_counter()
        told = said(home, "sft", "talks.jsonl", "--model", folder, *FLAGS)
        seconds = time.perf_counter() - began
        losses = [float(loss) for loss in re.findall(r"after step \d+: validation loss ([\d.]+)", told)]
        said(home, "ckpt", "export", "run", "my-model")
        template = Tokenizer(folder).template
        assert template is not None
        prompts = [template.prompt([{"role": "user", "content": question}]) for question in QUESTIONS]
        answers = said(home, "generate", "my-model", *prompts, "--max-new-tokens", "32")
    print(f"validation losses {losses}\n{seconds:.0f} s\n{answers}")
    falls = losses[-1] < losses[0] / 2
    in_style = all(answers.count(part) == len(QUESTIONS) for part in ("Ahoy! ", " Fair winds!"))
    return int(not falls or not in_style or seconds >= MOST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
