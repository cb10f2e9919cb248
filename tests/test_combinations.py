"""docs/reference/what_goes_with_what.md is what the rules say, and what ``rp.faults`` says of features together."""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import pytest

import raypar as rp
from raypar.cli.words.parsing import parse
from raypar.cli.words.run_args import RunArgs
from tests.support.combinations import FEATURES, OWN, command, merged, page, run_of, table

PAGE = Path(__file__).parents[1] / "docs/reference/what_goes_with_what.md"
DRAWS = 500


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 40)
    return rp.Text(str(tmp_path / "a.txt"), cache=str(tmp_path / "cache"))


def test_the_page_is_what_the_rules_say():
    assert PAGE.read_text() == page(), (
        "run python -m tests.support.combinations > docs/reference/what_goes_with_what.md"
    )


@pytest.mark.long
def test_two_features_or_three_are_refused_where_the_table_says_so(text):
    draw, (cells, _) = random.Random(14), table()
    wrong, refused, drawn = [], 0, 0
    while drawn < DRAWS:
        names = sorted(draw.sample(list(FEATURES), draw.choice((2, 3))), key=list(FEATURES).index)
        if (changes := merged(names)) is None:
            continue
        drawn += 1
        faults, of_pairs = rp.faults(run_of(changes, text)), {cells[pair] for pair in combinations(names, 2)}
        refused += bool(faults)
        if bool(faults) != (of_pairs != {"yes"}):
            wrong.append((names, of_pairs, faults))
    assert not wrong
    assert DRAWS // 10 < refused < DRAWS * 9 // 10


def test_each_feature_by_itself_is_a_run(text):
    assert not {name: faults for name in FEATURES if (faults := rp.faults(run_of(FEATURES[name], text)))}


@pytest.mark.parametrize("names", random.Random(7).sample([*combinations(FEATURES, 2)], 6))
def test_the_commands_of_the_page_say_the_runs_of_the_table(names, text):
    changes = merged([name for name in names if FEATURES[name] is not OWN])
    assert changes is not None
    words = [word for word in command(changes).split()[2:] if word != "--dry-run"]
    parsed = parse(RunArgs, words, "train", "", "gpt-tiny")
    run = run_of(changes, text)
    assert not parsed.wrong
    assert {**vars(parsed.args.run()), "data": text} == vars(run)
