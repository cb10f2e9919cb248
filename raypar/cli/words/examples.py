"""The examples that words of a command name: one path, or several, each followed by its weight."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

_WEIGHTED = "talks.jsonl 0.7 facts.jsonl 0.3"


def named_examples(words: Sequence[str], usage: str) -> tuple[str | dict[str, float], list[str]]:
    """Return the examples that words name, and what is wrong with the words.

    Args:
        words: The words.
        usage: How the command is used.
    """
    if not words:
        return "", [f"the examples are missing: {usage}"]
    if len(words) == 1:
        return words[0], []
    pairs = [*zip_longest(words[::2], words[1::2], fillvalue="")]
    paths = [path for path, _ in pairs]
    faults = [
        f"{path!r} is no file of examples: give these alone, or each followed by its weight, as in {_WEIGHTED}"
        if Path(weight).is_file() and not Path(path).exists()
        else f"{path!r} has the weight {weight!r}, and it must be a number above 0, as in {_WEIGHTED}"
        for path, weight in pairs
        if not _is_weight(weight)
    ]
    if faults and len(files := [word for word in words if Path(word).is_file()]) == len(words):
        faults = [f"{len(files)} files have no weights: give a pattern in quotes, {pattern_of(files)}, or weights"]
    faults += [f"{path!r} is named twice: give it one weight" for path in {*paths} if paths.count(path) > 1]
    return {} if faults else {path: float(weight) for path, weight in pairs}, faults


def _is_weight(word: str) -> bool:
    try:
        return 0 < float(word) < float("inf")
    except ValueError:
        return False


def pattern_of(files: Sequence[str]) -> str:
    """Return a pattern that matches files, in quotes, as a shell has to leave it.

    Args:
        files: Paths, one at least.
    """
    folders = {str(Path(file).parent) for file in files}
    endings = {Path(file).suffix for file in files}
    names = f"*{endings.pop()}" if len(endings) == 1 else "*"
    below = names if len(folders) == 1 else f"**/{names}"
    return f"'{Path(os.path.commonpath([*map(os.path.abspath, folders)] if len(folders) > 1 else [*folders])) / below}'"
