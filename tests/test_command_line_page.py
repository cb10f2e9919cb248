"""docs/reference/command_line.md is what the table of commands says."""

from __future__ import annotations

import re
from pathlib import Path

from raypar.cli.commands import COMMANDS
from tests.support.command_line_page import page

PAGE = Path(__file__).parents[1] / "docs/reference/command_line.md"


def test_the_page_is_what_the_table_of_commands_says():
    assert PAGE.read_text() == page(), "run python -m tests.support.command_line_page > docs/reference/command_line.md"


def test_the_page_has_every_command_and_each_flag_of_a_run_once():
    text = PAGE.read_text()
    assert re.findall(r"^## (\w+)$", text, re.MULTILINE)[: len(COMMANDS)] == [*COMMANDS]
    assert text.count("| `--micro-batch-size` |") == 2, "of a run, and of eval"
    assert text.count("| `--model.moe.top-k` |") == 1
