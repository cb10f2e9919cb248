"""``raypar gallery``: all schedules side by side."""

from __future__ import annotations

from functools import partial

import pytest

from raypar.cli.schedules.gallery import gallery
from raypar.errors import ConfigError
from raypar.schedules import CATALOG, Costs, Entry, build, simulate


def rows_of(*words):
    head, *lines = gallery(words).splitlines()
    assert head.split() == ["makespan", "bubble", "held", "what", "it", "is"]
    where = head.index("makespan")
    return {line[:where].strip(): line[where:].split()[:3] for line in lines}


def test_every_training_schedule_is_there_with_its_simulation():
    rows = rows_of("--ranks", "4", "--microbatches", "8", "--link", "0.5")
    assert set(CATALOG) - {"forward"} == {name for name in rows if not name.endswith(", auto")}
    found = simulate(build("1f1b", 4, 8), Costs(b=2, link=0.5))
    assert rows["1f1b"] == [f"{found.makespan:g}", f"{found.bubble:.1%}", "4"]
    whole, split, v = (float(rows[name][0]) for name in ("1f1b", "1f1b, auto", "zb-v"))
    assert v < split < whole
    assert rows["v-min"][2] == "2", "half of what 1f1b holds; a stage of a V counts as half of a rank's"


def test_sizes_that_a_schedule_does_not_take_are_told_in_its_row(monkeypatch):
    def even(num_ranks, num_microbatches):
        raise ValueError(f"{num_microbatches} microbatches are not even: set microbatches to 6 or 8")

    mine = {**CATALOG, "of the user": Entry.of(even)}
    monkeypatch.setattr("raypar.cli.schedules.gallery.CATALOG", mine)
    monkeypatch.setattr("raypar.cli.schedules.gallery.build", partial(build, catalog=mine))
    told = gallery(["--ranks", "3", "--microbatches", "7"])
    (line,) = [line for line in told.splitlines() if line.startswith("of the user")]
    assert line.endswith("set microbatches to 6 or 8")


def test_a_page_has_all_pictures(tmp_path):
    path = tmp_path / "all.html"
    assert gallery(["--ranks", "2", "--microbatches", "4", "-o", str(path)]).endswith(f"are drawn in {path}")
    page = path.read_text()
    assert page.count("<svg") == page.count("<h2>") - 1 > 10
    assert all(f">{name}<" in page for name in CATALOG if name != "forward")


def test_all_mistakes_are_told():
    with pytest.raises(ConfigError) as caught:
        gallery(["--ranks", "0", "--f", "-1", "--out", "/no/where/x.html"])
    assert [fault.split(" is ")[0].split(" '")[0] for fault in caught.value.faults] == ["--f", "--ranks", "--out"]
    many = "64 ranks x 4096 microbatches are too many to draw: use 52 microbatches at most"
    with pytest.raises(ConfigError, match=many):
        gallery(["--ranks", "64", "--microbatches", "4096"])
    with pytest.raises(ConfigError, match="4000 ranks x 8 microbatches are too many to draw: use 416 ranks at most"):
        gallery(["--ranks", "4000"])
