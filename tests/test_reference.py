"""The reference of the site: every name once, listed on its first page, and classes with tables of their fields."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "docs" / "reference"
HEAD = re.compile(r"^[A-Z]\w+:$")  # of a section of a docstring

PACKAGE = '''
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from annotated_types import Ge, Le, Lt

Count = Annotated[int, Ge(1), Le(10_000_000)]
Share = Annotated[float, Ge(0), Lt(1)]
Order = Literal["row", "dynamic"]
SECONDS = 60.0


@dataclass(frozen=True)
class Base:
    """A base."""

    width: Count
    """how wide"""

    def method(self) -> int:
        """Return one."""


@dataclass(frozen=True)
class Settings(Base):
    """Settings."""

    share: Share | None = None
    """a part"""
    order: tuple[Order, ...] = field(default=(), kw_only=True)
    """which first"""
    wait: float = SECONDS
    """seconds"""
    base: Base = field(default_factory=Base)
    """another"""

    @property
    def area(self) -> int:
        """Width by width."""


class Span(NamedTuple):
    """A span.

    Attributes:
        start: When it starts.
    """

    start: float = 0.0

    @property
    def is_first(self) -> bool:
        """Whether it is the first."""


class Held:
    """One thing.

    Attributes:
        first: The first.
        second: Which has no type.
    """

    def __init__(self):
        self.first: Settings = Settings()
        self.second = 2


def take(count: Count = SECONDS) -> None:
    """Take some.

    Args:
        count: How many.
    """
'''


def _directives() -> dict[str, list[str]]:
    """The names that each page of the reference describes. Modules without their members are left out."""
    pages = {page.name: page.read_text() for page in REFERENCE.glob("*.md")}
    names = re.compile(r"^::: (\S+)$(?!\n    options:\n      members: false)", re.MULTILINE)
    return {page: names.findall(text) for page, text in pages.items()}


def test_each_name_has_one_place_in_the_reference():
    names = [name for listed in _directives().values() for name in listed]
    assert not [name for name, times in Counter(names).items() if times > 1]
    assert not [(name, one) for name in names for one in names if one.startswith(f"{name}.")]


def test_the_first_page_of_the_reference_lists_every_name():
    text = (REFERENCE / "index.md").read_text()
    rows = dict(re.findall(r"^\| \[.*?\]\((\w+\.md)\) \| (.*) \|$", text, re.MULTILINE))
    assert rows.keys() == {page.name for page in REFERENCE.glob("*.md")} - {"index.md"}
    for page, names in _directives().items():
        if names:
            listed = set(re.findall(r"`(\w+)`", rows[page])) - {"formulas"}
            assert listed == {name.rpartition(".")[2] for name in names}, page


def test_doctests_are_in_the_section_examples():
    outside = [
        f"{path.relative_to(ROOT)}: {name}"
        for top in ("raypar", "actors", "schedules")
        for path in (ROOT / top).rglob("*.py")
        for name, text in _docstrings(path)
        if not _has_its_doctests_in_examples(text)
    ]
    assert not outside


@pytest.mark.parametrize(
    ("text", "sound"),
    [
        ("Add.\n\nExamples:\n    >>> 1 + 1\n    2\n", True),
        ("Add.\n\n>>> 1 + 1\n2\n", False),
        ("Add.\n\nArgs:\n    one: As\n        >>> 1\n", False),
    ],
)
def test_a_doctest_elsewhere_is_found(text, sound):
    assert _has_its_doctests_in_examples(text) == sound


def _docstrings(path: Path) -> Iterator[tuple[str, str]]:
    text = path.read_text()
    if ">>>" in text:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield getattr(node, "name", path.name), ast.get_docstring(node) or ""


def _has_its_doctests_in_examples(text: str) -> bool:
    section = ""
    for line in text.splitlines():
        section = line if HEAD.match(line) else section
        if line.lstrip().startswith(">>>") and section != "Examples:":
            return False
    return True


def test_names_of_the_first_page_become_links(tmp_path):
    (tmp_path / "run.md").write_text("# Runs\n\n::: raypar.actors.specs.run.Run\n")
    hooks = _loaded("hooks")
    row = "| [Runs](run.md) | `Run`, `other` |"
    linked = "| [Runs](run.md) | [`Run`](run.md#raypar.actors.specs.run.Run), `other` |"
    assert re.sub(r"^\| \[.*?\]\((\w+\.md)\) .*$", lambda match: hooks._linked(match, tmp_path), row) == linked


def test_bars_in_the_code_of_tables_lose_the_backslash_that_github_wants():
    page = SimpleNamespace(meta={}, file=SimpleNamespace(src_uri="runs.md"))
    text = "`a\\|b`\n\n| one | `a\\|b\\|c` | d\\|e |\n"
    assert _loaded("hooks").on_page_markdown(text, page=page) == "`a\\|b`\n\n| one | `a|b|c` | d\\|e |\n"


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """The package above as griffe reads it with the extension of the site."""
    griffe = pytest.importorskip("griffe", reason="of the extra docs, which reads docstrings for the site")
    folder = tmp_path_factory.mktemp("read")
    (folder / "sample.py").write_text(PACKAGE)
    extensions = griffe.load_extensions("dataclasses", _loaded("field_tables").FieldTables())
    return griffe.load("sample", search_paths=[folder], extensions=extensions, docstring_parser="google")


def _loaded(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "site" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _table(owner, kind):
    [section] = [one for one in owner.docstring.parsed if one.kind.value == kind]
    return [(row.name, str(row.annotation), row.value and str(row.value), row.description) for row in section.value]


def test_a_dataclass_has_one_table_of_its_fields_with_their_types_written_out(package):
    assert _table(package["Settings"], "parameters") == [
        ("width", "int ≥ 1", None, "how wide"),
        ("share", "0 ≤ float < 1 | None", "None", "a part"),
        ("wait", "float", "60.0", "seconds"),
        ("base", "Base", "Base()", "another"),
        ("order", "tuple['row' | 'dynamic', ...]", "()", "which first"),
    ]
    assert _table(package["Settings"], "attributes") == [("area", "int", None, "Width by width.")]
    assert not {"width", "share", "area"} & package["Settings"].all_members.keys()
    assert "method" in package["Base"].members


def test_fields_of_a_named_tuple_and_attributes_have_tables_too(package):
    assert _table(package["Span"], "parameters") == [("start", "float", "0.0", "When it starts.")]
    assert _table(package["Span"], "attributes") == [("is_first", "bool", None, "Whether it is the first.")]
    assert _table(package["Held"], "attributes") == [
        ("first", "Settings", None, "The first."),
        ("second", "None", None, "Which has no type."),
    ]


def test_types_of_arguments_are_written_out(package):
    assert _table(package["take"], "parameters") == [("count", "int ≥ 1", "60.0", "How many.")]
