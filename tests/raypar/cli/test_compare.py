"""``raypar compare``: chosen schedules side by side."""

from __future__ import annotations

import pytest

from raypar.cli.schedules.compare import compare
from raypar.errors import ConfigError
from raypar.schedules import Costs, build, lower, simulate, to_csv
from raypar.schedules.versions import staleness


def table_of(*words):
    """The cells of the table by schedule and figure, and the text below it."""
    table, _, below = compare(words).partition("\n\n")
    head, *lines = table.splitlines()
    starts = [head.index(word) for word in head.split()]
    columns = [slice(start, end) for start, end in zip(starts, [*starts[1:], None], strict=True)]
    cells = {line[: starts[0]].strip(): [line[column].strip() for column in columns] for line in lines}
    return {word: {name: row[i] for name, row in cells.items()} for i, word in enumerate(head.split())}, below


def test_each_figure_is_that_of_the_schedule():
    sizes = ["--ranks", "3", "--microbatches", "4", "--steps", "5", "--f", "2", "--b", "3", "--link", "0.5"]
    found, below = table_of("1f1b", "pipedream", "interleaved", *sizes)
    schedules = build("1f1b", 3, 4), build("pipedream", 3, 4, steps=5), build("interleaved", 3, 4)
    for schedule, share in zip(schedules, (1, 1, 0.5), strict=True):
        timeline = simulate(lower(schedule), Costs(f=2 * share, b=3 * share, link=0.5))
        assert found[schedule.name] == {
            "makespan of a step": f"{timeline.makespan / schedule.num_steps:g}",
            "bubble": f"{timeline.bubble:.1%}",
            "activations held, at most": f"{max(timeline.in_flight) * share:g}",
            "versions of weights kept, at most": "2" if schedule.stream else "1",
            "steps that a gradient is late, at most": "1" if schedule.stream else "0",
            "messages a rank sends in a step, at most": "16" if share < 1 else "8",
        }
    assert "pipedream, 5 steps\n    " + "\n    ".join(staleness(schedules[1]).lines()) in below
    assert "1F4 computes with version 0, 2F4 with version 1" in below, "the smallest trace"
    assert below.endswith("no schedule before it has its stages: its rows are not compared")


def test_the_first_place_of_each_rank_is_told_where_rows_differ(tmp_path):
    edited = tmp_path / "edited.csv"
    edited.write_text(to_csv(build("1f1b", 2, 3)).replace("0B0,0F2", "0F2,0B0"))
    found, below = table_of("1f1b", str(edited), "gpipe", "--ranks", "2", "--microbatches", "3")
    assert found["1f1b"]["activations held, at most"] == "2"
    assert found[str(edited)]["activations held, at most"] == "3"
    assert below == (
        f"1f1b and {edited}, where each rank first differs\n    rank 0, action 2: 0B0 and 0F2\n    rank 1: the same\n\n"
        "1f1b and gpipe, where each rank first differs\n"
        "    rank 0, action 2: 0B0 and 0F2\n    rank 1, action 1: 1B0 and 1F1"
    )
    edited.write_text(to_csv(lower(build("1f1b", 2, 3))))
    _, below = table_of("1f1b", str(edited), "--ranks", "2", "--microbatches", "3")
    assert below.endswith("    rank 0: the same\n    rank 1: the same"), (
        "where one has its communication, so has the other"
    )
    _, below = table_of("pipedream", "1f1b", "--ranks", "1", "--microbatches", "1", "--steps", "2")
    assert below.endswith("    rank 0, action 2: 0STEP0 and the end")


def test_stages_a_rank_are_for_those_that_have_a_choice():
    found, _ = table_of("1f1b", "interleaved", "--chunks", "3", "--ranks", "2", "--microbatches", "2")
    assert [one["messages a rank sends in a step, at most"] for one in found.values()] == ["2", "10"]


def test_a_page_has_all_pictures(tmp_path):
    path = tmp_path / "both.html"
    words = ["1f1b", "pipedream", "--ranks", "2", "--microbatches", "2", "--steps", "3", "-o", str(path)]
    assert compare(words) == f"2 schedules are compared in {path}"
    page = path.read_text()
    assert page.count("<svg") == 2
    assert "0F2 computes with version 0, 1F2 with version 1" in page
    assert "where each rank first differs" in page


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("1f1b", ["compare takes two"]),
        ("1f1f gone.csv --f -1", ["--f is -1.0", "there is no schedule '1f1f'", "schedule file 'gone.csv'"]),
        ("1f1f bad.csv 1f1b", ["there is no schedule '1f1f'", "schedule 'bad' breaks a rule"]),
        ("1f1b gpipe --steps 3", ["--steps 3: none"]),
        ("1f1b gpipe --chunks 3", ["--chunks 3: none"]),
        ("1f1b pipedream --steps 0", ["schedule 'pipedream' cannot be made: steps=0"]),
        ("gpipe 1f1b --ranks 30 --microbatches 600 -o x.html", ["gpipe has ", "1f1b has "]),
        ("1f1b bad.csv --ranks 3", ["schedule 'bad' has 1 ranks, not 3"]),
    ],
)
def test_the_mistakes_of_all_are_told(tmp_path, monkeypatch, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("0B0,0F0\n")
    with pytest.raises(ConfigError) as caught:
        compare(words.split())
    assert len(caught.value.faults) == len(told), caught.value.faults
    for text, start in zip(caught.value.faults, told, strict=True):
        assert text.startswith(start)


def test_other_sizes_are_shown_and_said_first(tmp_path):
    edited = tmp_path / "lazy.csv"
    edited.write_text(to_csv(build("1f1b", 2, 6)))
    said, table, *rest = compare(["1f1b", str(edited)]).split("\n\n")
    assert said.endswith("their figures are not of the same work: give --ranks 2 --microbatches 6")
    assert [line.split()[-6:] for line in table.splitlines()][1] == ["4", "x", "8", "2", "x", "6"]
    assert rest == []
    same = compare(["1f1b", str(edited), "--ranks", "2", "--microbatches", "6"])
    assert "ranks x microbatches" not in same and "where each rank first differs" in same


def test_run_folders_are_sent_to_the_report(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.toml").touch()
    with pytest.raises(ConfigError) as caught:
        compare(["a", "b"])
    assert caught.value.faults == ["'a' is a run folder, and no schedule: to compare runs, raypar report a b"]
