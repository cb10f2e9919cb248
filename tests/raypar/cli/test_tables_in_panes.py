"""Tables of commands and of the REPL, as a terminal of any width shows them."""

from __future__ import annotations

import sys

import pytest

from raypar.actors.collective.ledger import LedgerEntry
from raypar.cli import main as cli
from raypar.reporting.report import Report
from raypar.reporting.report_table import Reports
from raypar.reporting.tables.totals import Totals
from tests.raypar.cli.test_panes import MEMORY, broken
from tests.support.panes import pane, shown

TABLES = {
    "gallery": "one microbatch at a time; the reference",
    "compare 1f1b zb-h1 pipedream interleaved": "messages a rank sends in a step, at most  16",
    "simulate interleaved --ranks 2 --microbatches 4 --gather step --weights-mib 100": "200.0",
    "recipes": "a run of minutes on two CPU cores",
    "plan moe-tiny --mesh.dp 4 --mesh.ep 2": "{0, 1, 2, 3}",
}


def test_tables_of_the_repl_fit_their_terminal(monkeypatch):
    made = Report(0, 2.53591, 0.12345, 1e-3, 256, 1551.4, 1500.0, 0.147, None, (2, 1), MEMORY, loss_scale=65536.0)
    sent = Totals({"pp=0 dp=0": {("a long axis" * 2, "reduce_scatter"): LedgerEntry(1_234_567, 1 << 40, 3.0)}})
    for table in (Reports([made] * 3), sent):
        whole = repr(table).split()
        for columns in (40, 60, 80):
            with pane(monkeypatch, columns) as printed:
                sys.stdout.write(f"{table!r}\n")
            assert not broken(printed(), columns) and set(whole) == set(printed().split())


@pytest.mark.parametrize("columns", [60, 80, 100, 120])
@pytest.mark.parametrize("words", TABLES)
def test_columns_of_a_table_fit_their_terminal(monkeypatch, words, columns):
    with pane(monkeypatch, columns) as printed:
        assert cli.run_command(words.split()) == 0
    with pane(monkeypatch, 1_000) as wide:
        assert cli.run_command(words.split()) == 0
    assert not broken(printed(), columns)
    lines, whole = shown(printed(), 1_000), shown(wide(), 1_000)
    assert {*" ".join(whole).split()} <= {*" ".join(lines).split()}, "no word is lost or broken"
    assert TABLES[words] in " ".join(" ".join(lines).split()) or TABLES[words] in "\n".join(lines)
    for line in whole[1:4] if words == "gallery" else ():
        name, text = line[:20].rstrip(), line.split("  ")[-1].strip()
        at = next(number for number, one in enumerate(lines) if one.startswith(f"{name}  "))
        column = lines[at].find(text[:5]) if columns > 60 else 4
        for word_line in lines[at + 1 :]:
            if word_line[:1] != " ":
                break
            assert len(word_line) - len(word_line.lstrip()) == column, "further lines are in the column of the first"
