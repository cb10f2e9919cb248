"""Schedules of the user's own: registered, named as code, or offered by an installed package."""

import importlib
import sys
import types
from pathlib import Path

import pytest

import raypar as rp
from raypar.schedules import CATALOG, Schedule, ScheduleError, build, check, lower, names, register
from raypar.schedules.action import Action, Op
from raypar.schedules.catalog import entry_of
from raypar.schedules.generators.entry import Entry, Sizes

WAVE = """\
def wave(num_ranks, num_microbatches):
    return [[f"{rank}{op}{mb}" for op in "FB" for mb in range(num_microbatches)] for rank in range(num_ranks)]
"""


pytestmark = pytest.mark.usefixtures("catalog_as_before")


@pytest.fixture
def wave(tmp_path):
    path = tmp_path / "my.py"
    path.write_text(WAVE)
    return path


def rows_of(num_ranks, num_microbatches):
    return [
        [Action(rank, op, mb) for op in (Op.F, Op.B) for mb in range(num_microbatches)] for rank in range(num_ranks)
    ]


def test_a_registered_function_is_built_by_its_name():
    assert rp.register_schedule is register
    returned = register("mine", summary="gpipe once more")(rows_of)
    assert returned is rows_of
    assert names()[-1] == "mine"
    assert CATALOG["mine"].summary == "gpipe once more"
    assert build("mine", 3, 4).name == "mine"
    assert build("mine", 3, 4).rows == build("gpipe", 3, 4).rows
    check(lower(build("mine", 3, 4)))


@pytest.mark.parametrize(
    "rows",
    [
        [["0F0", "0B0"], ["1F0", "1B0"]],
        ("0F0 0B0", "1F0 1B0"),
        [[(0, "F", 0), Action(0, "B", 0)], [Action(1, Op.F, 0), (1, Op.B, 0)]],
        Schedule.of("its own name", [[Action(r, Op.F, 0), Action(r, Op.B, 0)] for r in range(2)]),
    ],
    ids=["texts", "lines", "triples", "a Schedule"],
)
def test_plain_rows_of_any_kind_are_taken(rows):
    register("mine")(lambda num_ranks, num_microbatches: rows)
    schedule = build("mine", 2, 1)
    assert schedule.rows == build("gpipe", 2, 1).rows
    assert schedule.name == ("its own name" if isinstance(rows, Schedule) else "mine")
    check(lower(schedule))  # which would miss an op that is a text only


def test_a_function_may_yield_its_rows():
    @register("mine")
    def mine(num_ranks, num_microbatches):
        yield from rows_of(num_ranks, num_microbatches)

    assert build("mine", 2, 2).rows == build("gpipe", 2, 2).rows


def test_chunks_are_read_off_the_third_parameter():
    @register("mine")
    def mine(num_ranks, num_microbatches, num_chunks=2):
        return build("interleaved", num_ranks, num_microbatches, num_chunks)

    assert build("mine", 2, 4).num_stages == 4
    assert build("mine", 2, 4, 3).num_stages == 6
    register("four", default_chunks=4, sizes=Sizes(3, 5))(mine)
    assert build("four", 2, 4).num_stages == 8
    with pytest.raises(ScheduleError, match="four takes 3 or more stages a rank"):
        build("four", 2, 4, 2)
    register("two", default_chunks=2)(lambda p, m: mine(p, m))
    assert build("two", 2, 4).num_stages == 4
    with pytest.raises(ScheduleError, match=r"chunks=3: two takes at most 2 .* a third parameter num_chunks"):
        build("two", 2, 4, 3)


@pytest.mark.parametrize("name", ["", "a b", "a:b", "a/b", "x" * 101, "my.csv", "my.py", "näive"])
def test_a_name_that_can_not_be_one_is_refused(name):
    with pytest.raises(ScheduleError, match="a name has 1 to 100 of the characters"):
        register(name)(rows_of)
    assert name not in CATALOG


def test_all_faults_of_a_registration_are_said_at_once():
    with pytest.raises(ScheduleError) as raised:
        register("1f1b")(lambda: None)
    assert "it is taken by raypar.schedules.generators.one_f_one_b.one_f_one_b" in str(raised.value)
    assert "can't generate schedules (too many positional arguments)" in str(raised.value)
    with pytest.raises(ScheduleError, match="7 can't generate schedules"):
        register("seven")(7)
    with pytest.raises(ScheduleError, match="missing a required argument"):
        register("four")(lambda a, b, c, d: [])


def test_a_cell_that_is_run_again_replaces_its_function_and_another_function_does_not():
    cell = "@register('mine')\ndef mine(num_ranks, num_microbatches):\n    return {}"
    for returned in ("['0F0 0B0']", "['0F0 0I0 0W0']"):
        exec(cell.format(returned), {"register": register, "__name__": "__main__"})
    assert build("mine", 1, 1).num_actions == 3
    with pytest.raises(ScheduleError, match=r"it is taken by __main__\.mine: take another"):
        register("mine")(rows_of)
    assert build("mine", 1, 1).num_actions == 3


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, "None is no schedule: give one row of actions a rank"),
        ("0F0", "'0F0' is no schedule"),
        ([3], "row 0 is 3: it must be a sequence of actions"),
        ([["0F0", "0X0"], ["B"]], "row 0, action 1: '0X0' is not an action.*; row 1, action 0: 'B'"),
        ([[(0, "F")]], r"\(0, 'F'\) is not an action: write Action"),
        ([[(0, Op.F, -1)]], "'0F-1' is not an action"),
        ([[Action(0.5, "F", 1)]], "is not an action"),
        ([["0F1"], ["0F0"], ["0F2"]], "stage 0 is on rank 0 and on rank 1"),
        (["0F0 0F1"], r"mine.* returns 1 rank, not 2, 2 microbatches, not 3, 1 stage, not 2: return one row a rank"),
    ],
)
def test_what_is_no_schedule_is_said(returned, says):
    register("mine")(lambda num_ranks, num_microbatches: returned)
    with pytest.raises(ScheduleError, match=says) as raised:
        build("mine", 2, 3)
    assert "schedule 'mine'" in str(raised.value)


def test_a_function_that_raises_is_named_with_its_line_and_the_cause():
    @register("mine")
    def mine(num_ranks, num_microbatches):
        return [][num_ranks]

    line = mine.__code__.co_firstlineno + 2
    with pytest.raises(ScheduleError, match=rf"mine\(2, 3\) fails \(.*, line {line}\): IndexError: list") as raised:
        build("mine", 2, 3)
    assert isinstance(raised.value.__cause__, IndexError)


def test_a_function_that_ends_the_program_is_told():
    @register("mine")
    def mine(num_ranks, num_microbatches):
        raise SystemExit(3)

    with pytest.raises(ScheduleError, match=r"mine\(2, 3\) fails \(.*\): SystemExit: 3"):
        build("mine", 2, 3)


def test_a_function_of_a_file_is_run_as_it_stands(wave):
    word = f"{wave}:wave"
    assert build(word, 2, 3).rows == build("gpipe", 2, 3).rows
    assert build(word, 2, 3).name == word
    wave.write_text(WAVE.replace('"FB"', '"FIW"'))
    assert build(word, 2, 3).num_actions == 18
    assert [path.name for path in wave.parent.iterdir()] == ["my.py"]  # no cache beside it
    assert str(wave.parent) not in sys.path
    assert "my" not in sys.modules


def test_a_file_may_register_its_functions_and_be_run_again(wave):
    wave.write_text("import raypar as rp\n@rp.register_schedule('wave')\n" + WAVE)
    for _ in range(2):
        assert build(f"{wave}:wave", 2, 3).num_actions == 12
    assert build("wave", 2, 3).name == "wave"


def test_a_function_of_a_module_is_imported(wave, monkeypatch):
    monkeypatch.syspath_prepend(wave.parent)
    wave.rename(wave.parent / "my_waves_for_this_test.py")
    assert build("my_waves_for_this_test:wave", 2, 3).num_actions == 12
    del sys.modules["my_waves_for_this_test"]


@pytest.mark.parametrize(
    ("source", "word", "says"),
    [
        (WAVE, "my.py", "names no function: write path/to/file.py:function"),
        (WAVE, ":wave", "names no function"),
        (WAVE, "my.py:wave now", "names no function"),
        (WAVE, "my.py:weve", r"my.py has no function 'weve': did you mean 'wave'\?"),
        (WAVE, "my.py:zzz", "has no function 'zzz': it has wave"),
        ("x = 1", "my.py:x", "has no function 'x': define it there"),
        (WAVE, "gone.py:wave", r"gone.py can't be read \(No such file"),
        (WAVE, "my.py:wave.lower", "has no function 'wave.lower'"),
        ("x = (", "my.py:wave", r"my.py fails \(.*my.py, line 1\): SyntaxError: '\(' was never closed"),
        ("\n\nimport no_such_module", "my.py:wave", r"my.py, line 3\): ModuleNotFoundError: No module named"),
        ("\nraise SystemExit", "my.py:wave", r"my.py, line 2\): SystemExit"),
        ("\udce4", "my.py:wave", "is not a text of Python"),
        (
            "def wave(p, m):\n    return p / 0",
            "my.py:wave",
            r"wave\(2, 3\) fails \(.*my.py, line 2\): ZeroDivisionError",
        ),
        ("def wave(): ...", "my.py:wave", "wave can't generate schedules"),
        (
            WAVE,
            "no.such_module:wave",
            "there is no module 'no.such_module': install it, or name its file: no/such_module.py",
        ),
        (WAVE, "json:no_such", "json has no function 'no_such'"),
    ],
)
def test_code_that_is_not_there_or_fails_is_said(tmp_path, monkeypatch, source, word, says):
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_bytes(source.encode(errors="surrogateescape"))
    with pytest.raises(ScheduleError, match=says) as raised:
        build(word, 2, 3)
    assert f"schedule {word!r}" in str(raised.value)


def test_a_module_that_fails_is_told_with_its_line(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "broken_for_this_test.py").write_text("x = 1\nx.y\n")
    with pytest.raises(ScheduleError, match=r"broken_for_this_test.py, line 2\): AttributeError"):
        entry_of("broken_for_this_test:f")


def test_an_installed_package_is_asked_for_a_name_that_nobody_knows(monkeypatch):
    asked = []

    def fails():
        raise ImportError("no torch here")

    def points(group):
        asked.append(group)
        point = types.SimpleNamespace
        return [point(name="theirs", load=lambda: rows_of), point(name="worse", load=fails)]

    monkeypatch.setattr(importlib.import_module("importlib.metadata"), "entry_points", points)
    build("gpipe", 2, 3)
    assert asked == []
    assert build("theirs", 2, 3).num_actions == 12
    assert build("theirs", 2, 3).name == "theirs"
    assert asked == ["raypar.schedules"]
    with pytest.raises(ScheduleError, match="'worse' of an installed package fails: ImportError: no torch here"):
        build("worse", 2, 3)
    with pytest.raises(ScheduleError, match=r"did you mean 'theirs'\? known are naive, .*, theirs, worse"):
        build("their", 2, 3)


def test_a_generator_of_other_steps_is_told():
    def one_step(num_ranks, num_microbatches, num_steps):
        return build("pipedream", num_ranks, num_microbatches, steps=2)

    entry = Entry.of(one_step, is_stream=True)
    with pytest.raises(ScheduleError, match=r"one_step\(2, 4, 3\) returns 2 steps, not 3: .*each of 3 steps"):
        entry.build("mine", 2, 4, steps=3)
    assert entry.build("mine", 2, 4, steps=2).stream == 2
