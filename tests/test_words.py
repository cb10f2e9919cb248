"""Names, docstrings, comments, messages and pages are plain English: words of a private dialect are refused."""

import ast
import re
import tokenize
from io import StringIO

import pytest

from tests.test_house import ROOMS, ROOT, project_files, python_files

REFUSED = (
    "told tell tells telling stands standing stood lent lend lends lending owed owes owing wish wishes wished doubt "
    "doubts doubtful whoever seat seats seated home homes behind desk manyth"
)
ALLOWED = re.compile(
    r"home (?:folder|directory|page)|Path\.home\(\)|/home/|HOME|stands? for|stand-ins?|stands alone"
    r"|^lent$|\(\"lent\"\)",  # a kind of costs in calibration files
    re.IGNORECASE,
)
PAGES = [
    path
    for path in project_files()
    if path.suffix == ".md" and path.parts[0] in ("docs", "README.md", "CONTRIBUTING.md")
    if path.parts[:2] != ("docs", "decisions")  # history
]
_CODE = re.compile(  # fences, code within lines, and link targets
    r"^(`{3,}).*?^\1$|(?<!`)(`+)(?!`)(?:(?!\n\n).)+?(?<!`)\2(?!`)|(?<=\])\([^)\s]+\)", re.MULTILINE | re.DOTALL
)
_WORDS = re.compile(rf"\b(?:{REFUSED.replace(' ', '|')})\b", re.IGNORECASE)
_IN_NAMES = re.compile(rf"(?:^|_)(?:{REFUSED.replace(' ', '|')})(?=_|$)")
_TITLES = "|".join(word.title() for word in REFUSED.split())  # as in MySeat
_ANYWHERE = re.compile(rf"(?<![a-zA-Z])(?i:{REFUSED.replace(' ', '|')})(?![a-z])|(?:{_TITLES})(?![a-z])")


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
    if not _ANYWHERE.search(source):
        return []
    found = [fault for line, text in texts(source) for fault in _refused(line, text)]
    return found + [f"{line}: the name {name}" for line, name in names(source) if _IN_NAMES.search(_words_of(name))]


def page_dialect(page):
    """Return the words of the dialect in the prose of a Markdown page, outside of code and link targets."""
    prose = _CODE.sub(lambda code: "\n" * code[0].count("\n"), page)
    return [fault for line, text in enumerate(prose.splitlines(), 1) for fault in _refused(line, text)]


def script_dialect(script):
    """Return the words of the dialect in the comments of a shell script or a YAML file."""
    comments = [(line, text.partition("# ")[2]) for line, text in enumerate(script.splitlines(), 1)]
    return [fault for line, text in comments for fault in _refused(line, text)]


def _refused(line, text):
    """Return the refused words of a text, with what is around them."""
    plain = ALLOWED.sub("", text)
    found = _WORDS.finditer(plain)
    return [f"{line}: {word[0]!r} in {plain[max(0, word.start() - 30) : word.end() + 30]!r}" for word in found]


def _words_of(name):
    """Return a name in small letters with a line between its words."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@pytest.mark.parametrize("room", (*ROOMS, "examples"))
def test_there_is_no_dialect(room):
    found = [f"{path}:{fault}" for path in python_files(room) for fault in dialect((ROOT / path).read_text())]
    assert not found, f"{len(found)} words: " + "\n".join(found[:40])


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_there_is_no_dialect_in_pages(page):
    assert not (found := page_dialect((ROOT / page).read_text())), "\n".join(found)


def test_there_is_no_dialect_in_scripts_of_examples():
    scripts = [path for path in project_files() if path.parts[0] == "examples" and path.suffix != ".py"]
    found = [f"{path}:{fault}" for path in scripts for fault in script_dialect((ROOT / path).read_text())]
    assert scripts
    assert not found, "\n".join(found)


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


@pytest.mark.parametrize(
    "page",
    [
        "## What is told",
        "| a | b |\n|---|---|\n| `x` | comes behind `y` |",
        "[whoever](a.md)",
        "```\nx\n```\nIt stands.",
    ],
)
def test_a_word_of_the_dialect_is_found_in_a_page(page):
    assert [int(fault.split(":")[0]) for fault in page_dialect(page)] == [len(page.splitlines())]


@pytest.mark.parametrize(
    "page",
    [
        "```text\nwhat is told\n```",
        "````\n```\nwhat is told\n```\n````",
        "`told` and ``a ` behind`` and `two\nlines, behind`",
        "[link](a.md#what-is-told)",
        "with stand-ins, in /home/me, in the home folder",
    ],
)
def test_code_and_plain_words_are_allowed_in_a_page(page):
    assert not page_dialect(page)


def test_a_word_of_the_dialect_is_found_in_a_comment_of_a_script():
    assert script_dialect("cd $HOME\nls  # whoever is there")
    assert not script_dialect("echo told\n#!/bin/sh")
