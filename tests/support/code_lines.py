"""Count the lines of code of the project, of a commit as well.

    python -m tests.support.code_lines [COMMIT ...]

Blank lines, comments, docstrings and imports are no code. An assignment of several values to as many names counts as
many lines as it has names, so that splitting it into lines changes nothing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tokenize
from collections import Counter
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("schedules", "actors", "raypar")
_LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.COMMENT, tokenize.ENCODING}


def code_lines(source: str) -> int:
    """Return the number of lines of code of a source text."""
    tokens = tokenize.tokenize(BytesIO(source.encode()).readline)
    lines = {line for token in tokens if token.type not in _LAYOUT for line in range(token.start[0], token.end[0] + 1)}
    packed = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)) or _is_docstring(node):
            lines -= set(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
            packed += sum(len(target.elts) - 1 for target in node.targets if isinstance(target, ast.Tuple))
    return len(lines) + packed


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def lines_of_folders(commit: str | None = None) -> Counter[str]:
    """Return the lines of code by folder, two names deep.

    Args:
        commit: A commit of this repository; None for the files as they are.
    """
    listed = ["git", "ls-files", *ROOMS] if commit is None else ["git", "ls-tree", "-r", "--name-only", commit, *ROOMS]
    counts: Counter[str] = Counter()
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split():
        if name.endswith(".py"):
            counts["/".join(Path(name).parent.parts[:2])] += code_lines(_source(name, commit))
    return counts


def _source(name: str, commit: str | None) -> str:
    if commit is None:
        return (ROOT / name).read_text()
    return subprocess.run(["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True, text=True).stdout


def main() -> None:
    """Print the lines of each folder, a column for the files as they are and for each commit."""
    columns = [lines_of_folders(commit) for commit in (*sys.argv[1:], None)]
    for folder in sorted(set().union(*columns)):
        print(f"{folder:32}", *(f"{counts[folder]:7,}" for counts in columns))
    print(f"{'all':32}", *(f"{counts.total():7,}" for counts in columns))


if __name__ == "__main__":
    main()
