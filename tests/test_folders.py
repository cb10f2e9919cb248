"""Folders by subject: few arrows between those of ``raypar/``, none crowded, few small files with one importer."""

from collections import Counter, defaultdict

from tests.support.code_lines import code_lines
from tests.test_house import ROOT, folder_of, imports_of_rooms

MAX_ARROWS = 30
MAX_FILES = 14
MAX_SMALL, SMALL = 25, 45  # files with so many lines of code at most, and one importer
ONE_A_PAPER = ("schedules/generators", "raypar/planner/formulas", "raypar/planner/operators")


def arrows(imports):
    """Return the pairs of folders of raypar/ of which the first imports the second."""
    pairs = ((_part(path), _part(other)) for path, others in imports.items() for other in others)
    return {(one, other) for one, other in pairs if one and other and one != other}


def _part(path):
    parts = str(path).split("/")
    return parts[1] if parts[0] == "raypar" and len(parts) > 2 else None


def crowded(imports):
    """Return the folders with too many files."""
    counts = Counter(folder_of(path) for path in imports if not str(path).endswith("__init__.py"))
    return {folder: count for folder, count in counts.items() if count > MAX_FILES and folder not in ONE_A_PAPER}


def small_files(imports, lines_of):
    """Return the small files that one file imports, with that file."""
    importers = defaultdict(set)
    for path, others in imports.items():
        for other in others:
            importers[other].add(path)
    return {
        path: next(iter(importers[path]))
        for path in imports
        if len(importers[path]) == 1
        and not str(path).endswith("__init__.py")
        and folder_of(path) not in ONE_A_PAPER
        and lines_of(path) <= SMALL
    }


def test_few_arrows_connect_the_folders_of_raypar():
    found = arrows(imports_of_rooms())
    assert len(found) <= MAX_ARROWS, sorted(found)


def test_no_folder_is_crowded():
    assert crowded(imports_of_rooms()) == {}


def test_small_files_are_in_the_files_of_their_subject():
    found = small_files(imports_of_rooms(), lambda path: code_lines((ROOT / path).read_text()))
    assert len(found) <= MAX_SMALL, found


def test_what_breaks_the_rules_is_seen():
    imports = {
        "raypar/job/a.py": {"raypar/cli/b.py"},
        "raypar/cli/b.py": set(),
        "raypar/errors.py": {"raypar/cli/b.py"},
    }
    assert arrows(imports) == {("job", "cli")}
    many = {f"raypar/job/{number}.py": set() for number in range(MAX_FILES + 1)}
    assert crowded(many) == {"raypar/job": MAX_FILES + 1}
    assert small_files({**imports, "raypar/errors.py": set()}, lambda _: SMALL) == {
        "raypar/cli/b.py": "raypar/job/a.py"
    }
    assert small_files({**imports, "raypar/errors.py": set()}, lambda _: SMALL + 1) == {}
