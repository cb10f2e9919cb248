"""Names, docstrings, comments and messages are plain English: words of a private dialect are refused."""

import ast
import re
import tokenize
from io import StringIO

import pytest

from tests.test_house import ROOMS, ROOT, python_files

REFUSED = (
    "told tell tells telling stands standing stood lent lend lends lending owed owes owing wish wishes wished doubt "
    "doubts doubtful whoever seat seats seated home homes behind desk manyth"
)
ALLOWED = re.compile(
    r"home (?:folder|directory|page)|Path\.home\(\)|/home/|HOME|stands? for|stand-ins?|stands alone"
    r"|^lent$|\(\"lent\"\)",  # a kind of costs in calibration files
    re.IGNORECASE,
)
_WORDS = re.compile(rf"\b(?:{REFUSED.replace(' ', '|')})\b", re.IGNORECASE)
_IN_NAMES = re.compile(rf"(?:^|_)(?:{REFUSED.replace(' ', '|')})(?=_|$)")


def texts(source):
    """Yield the line and the text of each comment and of each string of a source text."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def names(source):
    """Yield the line and each name that a source text gives to a class, function, argument, variable or attribute."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def dialect(source):
    """Return the words of the dialect in a source text, each with its line."""
    found = [
        f"{line}: {match[0]!r} in {text[max(0, match.start() - 30) : match.end() + 30]!r}"
        for line, text in texts(source)
        for match in _WORDS.finditer(ALLOWED.sub("", text))
    ]
    return found + [f"{line}: the name {name}" for line, name in names(source) if _IN_NAMES.search(_words_of(name))]


def _words_of(name):
    """Return a name in small letters with a line between its words."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@pytest.mark.parametrize("room", ROOMS)
def test_there_is_no_dialect(room):
    found = [f"{path}:{fault}" for path in python_files(room) for fault in dialect((ROOT / path).read_text())]
    assert not found, f"{len(found)} words: " + "\n".join(found[:40])


@pytest.mark.parametrize(
    "source",
    [
        '"""Whoever is there."""',
        "x = 1  # as told",
        "told = 1",
        "class MySeat: ...",
        "def f(home_rank): ...",
        "self.lent = 1",
        "f'{x} stands there'",
    ],
)
def test_a_word_of_the_dialect_is_found(source):
    assert dialect(source)


@pytest.mark.parametrize(
    "source", ['"""W stands for weights."""', "x = Path.home()", "x = 'the home folder'", "understand = 1"]
)
def test_plain_words_are_allowed(source):
    assert not dialect(source)
