"""The examples that words of a command name: one path, or several with a weight behind each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest


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
        f"{path!r} has the weight {told!r}, and it must be a number above 0, as in talks.jsonl 0.7 facts.jsonl 0.3"
        for path, told in pairs
        if not _is_weight(told)
    ]
    faults += [f"{path!r} is named twice: give it one weight" for path in {*paths} if paths.count(path) > 1]
    return {} if faults else {path: float(told) for path, told in pairs}, faults


def _is_weight(word: str) -> bool:
    try:
        return 0 < float(word) < float("inf")
    except ValueError:
        return False
