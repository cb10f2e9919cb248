"""The pictures of the README and of docs/ that are made from files: they are what make pictures makes of them now."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from raypar.reporting.screen import STYLES
from tests.schedules.drawing.test_palette import contrast
from tests.support.pictures.badges import badges
from tests.support.pictures.benchmarks import benchmarks
from tests.support.pictures.diagrams import pictures
from tests.support.pictures.terminal import Screen, drawn, run_in_terminal

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(("made", "name"), [(badges, "badges"), (benchmarks, "benchmarks")])
def test_a_picture_is_made_of_the_files_as_they_are(made, name):
    assert (ROOT / f"docs/{name}.svg").read_text() == made(), "run make pictures"


def test_make_pictures_makes_every_picture():
    docs = ROOT / "docs"
    there = {path.relative_to(docs).as_posix() for kind in ("*.svg", "*.png", "pictures/*") for path in docs.glob(kind)}
    recipe = (ROOT / "Makefile").read_text().partition("\npictures: ")[2].partition("\n\n")[0]
    assert "-m tests.support.pictures " in recipe and "$(measured)" in recipe
    commands = recipe + re.search(r"^measured := (.*\n(?:\t.*\n)*)", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    made = {*re.findall(r"docs/([\w.-]+\.(?:svg|png))\b", commands), *(f"pictures/{name}" for name in pictures())}
    script = (ROOT / "tests/support/pictures/__main__.py").read_text()
    made |= set(re.findall(r'DOCS / "([\w.-]+)"\)', script))
    assert there == made


def test_the_readme_names_what_the_badges_show():
    title = ET.fromstring(badges())[0].text
    assert f"![{title}](docs/badges.svg)" in (ROOT / "README.md").read_text()


def test_the_pictures_load_nothing_from_a_network():
    for picture in (ROOT / "docs").rglob("*.svg"):
        text = picture.read_text()
        ET.fromstring(text)
        assert not re.findall(r"(?:href|src)=|url\((?!#)|@import", text), picture.name


def test_a_screen_has_what_a_terminal_would_show():
    screen = Screen()
    screen.write("first\r\n\x1b[?25lbar 1/2", 1.0)
    screen.write("\r\x1b[2Kbar 2/2\r\n", 2.0)
    screen.write("a\nb\x1b[1A\r\x1b[2Kc\n", 3.0)
    assert screen.lines[:4] == ["first", "bar 2/2", "c", "b"]
    assert screen.written[:2] == [1.0, 2.0]


def test_a_recording_is_of_what_a_program_wrote_in_its_order(tmp_path):
    program = "import time; print('\\x1b[31mone é\\x1b[0m', flush=True); time.sleep(0.2); print('two' * 50)"
    screen = run_in_terminal([sys.executable, "-c", program], str(tmp_path))
    picture = drawn("raypar <train>", screen)
    texts = "".join(ET.fromstring(picture).itertext())
    assert "$\xa0raypar\xa0<train>" in texts
    assert "one\xa0é" in texts
    assert len(re.findall("animation-delay", picture)) == 4, "a line of 150 letters has two rows"
    first, second = (
        float(re.search(rf"-line-{row}\)\"\] {{ animation-delay: ([\d.]+)s", picture)[1]) for row in (1, 2)
    )
    assert first < second <= first + 0.5
    with pytest.raises(RuntimeError, match="ended with 3"):
        run_in_terminal([sys.executable, "-c", "raise SystemExit(3)"], str(tmp_path))


def pale_texts(picture):
    """The colours of the letters of a recorded terminal that are too near to that of its background."""
    (ground,) = re.findall(r'<rect fill="(#[0-9a-f]{6})" stroke', picture)
    inks = re.findall(r"\.terminal-r\d+ \{ fill: (#[0-9a-f]{6})", picture)
    assert inks
    return [ink for ink in inks if contrast(ink, ground) < 4.5]


def test_letters_of_a_recording_are_not_pale():
    assert not pale_texts((ROOT / "docs/terminal.svg").read_text())
    numbers = [re.search(r"\d+", style)[0] for style in STYLES.values()]
    screen = Screen()
    screen.write("\r\n".join(f"\x1b[38;5;{number}mtext\x1b[0m" for number in numbers), 0.0)
    assert not pale_texts(drawn("raypar train", screen))
    screen.write("\x1b[38;5;240mpale\x1b[0m", 1.0)
    assert pale_texts(drawn("raypar train", screen)) == ["#585858"]
