"""Apply the fixes of a run's faults as they are printed, as somebody would who types what the messages say."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import raypar as rp
from raypar.config.mended import changed

_WORDS = {"none": None, "true": True, "false": False}
_PATH = r"(?P<path>[a-z_]+(?:\.[a-z_]+)*)"
_VALUE = r"(?P<value>'[^']*'|\([^)]*\)|\{[^}]*\}|[\w.+-]+)"


_NEEDED = ("data.fn", "data.path")


def settings(part: Any, below: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the paths of all fields of a run and its parts, with their values."""
    for one in fields(part):
        value = getattr(part, one.name)
        yield f"{below}{one.name}", value
        if is_dataclass(value) and type(value).__module__.startswith("raypar."):
            yield from settings(value, f"{below}{one.name}.")


def usual(run: rp.Run, path: str) -> Any:
    """Return the value that a field has if it is left out; KeyError if it must be given."""
    part: Any = run
    *heads, name = path.split(".")
    for head in heads:
        part = getattr(part, head)
    return getattr(type(part)(**_needed(part)), name)


def _needed(part: Any) -> dict[str, Any]:
    return {
        one.name: getattr(part, one.name)
        for one in fields(part)
        if one.default is MISSING and one.default_factory is MISSING
    }


class Fixer:
    """Applies fixes to a run.

    Args:
        run: The run with faults.
        before: The run before the faults were planted, of which fields are that must be given.
    """

    def __init__(self, run: rp.Run, before: rp.Run) -> None:
        self.run, self._before = run, before

    def path_of(self, words: str, subject: str) -> str | None:
        """Return the full path of a field that a message names, maybe without the part that it is in."""
        known = dict(settings(self.run))
        if words == "it":
            words = subject
        if words in known:
            return words
        same = [path for path in known if path.endswith(f".{words}")]
        near = [path for path in same if path.rpartition(".")[0] == subject.rpartition(".")[0]]
        return (near or same or [None])[0]

    def subject_of(self, fault: str) -> str:
        """Return the field that a fault is about: the first that it names."""
        known = dict(settings(self.run))
        for word in re.findall(r"[A-Za-z_]+(?:\.[A-Za-z_]+)*", fault):
            if word in known:
                return word
        return ""

    def apply(self, fault: str) -> bool:
        """Apply the first fix of a fault that can be typed; return whether there is one."""
        subject = self.subject_of(fault)
        if (must := re.match(rf"{_PATH}(?P<item>[.\[].*?)? is .*: it must be (?P<what>.*)$", fault, re.S)) is not None:
            return self._before_it(must["path"])
        if (returned := re.match(r"data.fn returns .*: (?:give|return) (?P<count>\d+)", fault)) is not None:
            name = "length" if "sequences of" in fault else "sequences"  # the function is the test's own
            self.run = changed(self.run, f"data.fn.{name}", int(returned["count"]))
            return True
        if (meant := re.search(r"did you mean '(?P<value>[^']*)'", fault)) is not None:
            return self._meant(subject, meant["value"])
        if (known := re.search(r"known are (?P<value>[\w-]+)", fault)) is not None:
            return self._meant(subject, known["value"])
        again = r": (correct the |give another path|a model's folder has|use up to 100 letters)"
        if re.search(again, fault):  # only its author knows which path was meant
            return self._before_it(subject)
        if (pattern := re.match(r"(?P<path>[a-z_.]+): '(?P<name>[^']*)'.*: leave it out", fault)) is not None:
            return self._left_out(pattern["path"], pattern["name"])
        _, _, fix = fault.rpartition(": ")
        ways = re.split(r", or |; | or (?=set |use |leave |let |give )", fix)
        return any(self._typed(way, subject) for way in ways)

    def _before_it(self, path: str) -> bool:
        """Leave a field out, or give it the value that it had before, if it must be given."""
        try:
            value = usual(self.run, path)
        except (AttributeError, TypeError):
            return False
        if is_dataclass(value) or path in _NEEDED:
            value = dict(settings(self._before))[path]
        self.run = changed(self.run, path, value)
        return True

    def _meant(self, path: str, value: str) -> bool:
        """Take a name for one that was misspelled: of a text the whole, of a dictionary its first key."""
        now = dict(settings(self.run))[path]
        self.run = changed(self.run, path, {value: next(iter(now.values()))} if isinstance(now, dict) else value)
        return True

    def _left_out(self, path: str, name: str) -> bool:
        """Leave one name out of a tuple or a dictionary."""
        now = dict(settings(self.run))[path]
        fewer = {key: one for key, one in now.items() if key != name} if isinstance(now, dict) else ()
        self.run = changed(
            self.run, path, fewer or tuple(one for one in now if one != name and not isinstance(now, dict))
        )
        return True

    def _typed(self, fix: str, subject: str) -> bool:
        patterns = [
            (rf"(?:set|make) {_PATH}(?: \([^)]*\))? to {_VALUE}", "set"),
            (rf"let {_PATH} be {_VALUE}", "set"),
            (rf"(?:use|give) {_PATH}={_VALUE}", "set"),
            (r"leave one (?:of the two |of them )?out", "out"),
            (rf"leave (?:the |their )?{_PATH}(?: \((?P<inner>[a-z_.]+)\))? out", "out"),
            (rf"leave out {_PATH}", "out"),
            (rf"(?:use|give) {_VALUE} heads?", "heads"),
            (rf"(?:^|use ){_VALUE} layers", "layers"),
            (rf"(?:use|give|take) {_VALUE}(?!\w)", "subject"),
        ]
        for pattern, kind in patterns:
            if (found := re.search(pattern, fix)) is None:
                continue
            groups = found.groupdict()
            words = groups.get("path") or (kind if kind in ("heads", "layers") else "it")
            if words in ("folder", "bound"):
                words = "it"
            words = groups.get("inner") or words
            path = self.path_of(words, subject)
            if path is None:
                continue
            try:
                value = usual(self.run, path) if kind == "out" else _value(groups["value"])
            except (AttributeError, TypeError, ValueError, SyntaxError):
                continue
            self.run = changed(self.run, path, value)
            return True
        return False


def _value(text: str) -> Any:
    return _WORDS[text.lower()] if text.lower() in _WORDS else ast.literal_eval(text)


def repaired(run: rp.Run, before: rp.Run, most: int = 6) -> tuple[rp.Run, int]:
    """Apply the fixes of all faults of a run, and of what they lead to.

    Args:
        run: The run with faults.
        before: The run before the faults were planted.
        most: Rounds of fixes that are tried.

    Returns:
        The run, and the rounds of fixes that it took. It has faults if one has no fix, or if fixes go round in circles.
    """
    for rounds in range(most):
        if not (faults := rp.faults(run)):
            return run, rounds
        fixer = Fixer(run, before)
        for fault in faults:
            if not fixer.apply(fault):
                return run, rounds
        run = fixer.run
    return run, most
