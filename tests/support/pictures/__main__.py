"""The pictures of README.md and docs/ that are made from this repository, and the recording of a terminal.

python -m tests.support.pictures [terminal]     with the word, a short run is recorded too
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.pictures.badges import badges
from tests.support.pictures.benchmarks import benchmarks
from tests.support.pictures.diagrams import pictures
from tests.support.pictures.terminal import recorded

DOCS = Path(__file__).parents[3] / "docs"

if __name__ == "__main__":
    (DOCS / "badges.svg").write_text(badges())
    (DOCS / "benchmarks.svg").write_text(benchmarks())
    for file, draw in pictures().items():
        (DOCS / "pictures" / file).write_text(draw(), encoding="utf-8")
    if "terminal" in sys.argv[1:]:
        (DOCS / "terminal.svg").write_text(recorded("raypar train gpt-tiny --steps 30 --folder runs/first"))
