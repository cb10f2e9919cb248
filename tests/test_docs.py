"""README.md and docs/: what they show is run, their links lead somewhere, and the reference has every public name.

Every Python block, every ``raypar`` command line, every TOML file and every transcript of a REPL is run, unless the
line right above its fence says why not: ``<!-- not run: reason -->``.
"""

from __future__ import annotations

import ast
import importlib
import os
import re
import runpy
import shlex
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import raypar as rp
from raypar.actors.data.text.text_sources import source_files
from raypar.config.conflicts.experts import NOT_YET
from raypar.config.run import check_run
from raypar.errors import ConfigError
from raypar.reporting.summary import plan_rows

pytestmark = pytest.mark.usefixtures("torch_for_cpus")
ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXT_OF_PAGES = 601, 11_065_582  # files and bytes
MOST_LINES = 220  # of README.md: one page
ONE_OF_THESE = ("bash", "console", "pycon", "python", "text", "toml")


class Fence(NamedTuple):
    """A fenced block of a page: the number of its first line, its language, its text, and why it is not run."""

    line: int
    language: str
    text: str
    not_run: str | None


def fences_of(page: str) -> list[Fence]:
    found, lines, number = [], page.splitlines(), 0
    while number < len(lines):
        if lines[number].startswith("```"):
            above = re.fullmatch(r"<!-- not run: (\S.*) -->", lines[number - 1]) if number else None
            end = lines.index("```", number + 1)
            text = "\n".join(lines[number + 1 : end])
            found.append(Fence(number + 1, lines[number][3:], text, above and above[1]))
            number = end
        number += 1
    return found


def commands_of(fence: Fence) -> list[list[str]]:
    """The words of the command lines of raypar in a block."""
    return [shlex.split(line, comments=True)[1:] for line in fence.text.splitlines() if line.startswith("raypar ")]


def turns_of(fence: Fence) -> list[tuple[str, str]]:
    """What is typed in a transcript of a REPL, and what it answers."""
    turns = [turn.partition("\n") for turn in re.split(r"^>>> ", fence.text, flags=re.MULTILINE)[1:]]
    return [(typed.partition("  #")[0].strip(), answer.rstrip()) for typed, _, answer in turns]


def runs(page: Path) -> list[Fence]:
    return [fence for fence in fences_of(page.read_text()) if fence.not_run is None]


def named(pages):
    long = {"docs/recovery.md"}  # kills actors again and again, as tests/raypar/job/recover does
    ids = [page.relative_to(ROOT).as_posix() for page in pages]
    marks = [pytest.mark.long if name in long else () for name in ids]
    return {"argvalues": [pytest.param(page, marks=own) for page, own in zip(pages, marks, strict=True)], "ids": ids}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty working folder, with the texts that pages speak of."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-texts").mkdir()
    (tmp_path / "my-texts/a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    return tmp_path


def run_command(words: list[str], capsys) -> None:
    from raypar.cli.main import run_command

    code = run_command(words)
    said = capsys.readouterr()
    assert code == 0, f"raypar {shlex.join(words)}\n{said.out}{said.err}"


def run_python(page: str, blocks: list[Fence], told: dict[str, object]) -> None:
    """The Python of a page, block after block, as one program."""
    for block in blocks:
        exec(compile("\n" * block.line + block.text, page, "exec"), told)


PYTHON = [page for page in PAGES if any(fence.language == "python" for fence in runs(page))]
COMMANDS = [page for page in PAGES if any(commands_of(fence) for fence in runs(page))]


@pytest.mark.sampled
@pytest.mark.parametrize("page", **named(COMMANDS))
def test_command_lines(page, kept_actors, folder, capsys):
    for fence in runs(page):
        for words in commands_of(fence):
            run_command(words, capsys)


@pytest.mark.sampled
@pytest.mark.parametrize("page", **named(PYTHON))
def test_python(page, kept_actors, folder, catalog_as_before):
    run_python(str(page), [fence for fence in runs(page) if fence.language == "python"], {"__name__": "a_page"})


@pytest.mark.parametrize("page", **named([page for page in PAGES if any(f.language == "toml" for f in runs(page))]))
def test_files_of_runs(page, folder, capsys):
    for fence in runs(page):
        if fence.language == "toml":
            (folder / "run.toml").write_text(fence.text)
            run_command(["train", "run.toml", "--dry-run"], capsys)


def is_text_of_pages():
    """Whether the default text, this Python's standard library, is the one of which the pages have figures."""
    files = source_files("path", "stdlib", ROOT, [])
    return (len(files), sum(file.size for file in files)) == TEXT_OF_PAGES


def without_fractions(answer):
    """An answer without the digits of its fractions."""
    return re.sub(r" *-?\d+\.\d+", " #", answer)


def test_transcripts(kept_actors):
    """The stepper answers as the pages have it; the last bits of a loss may be those of another machine.

    Where the text is another one, so are the figures, and the rest is compared.
    """
    shown = str if (same := is_text_of_pages()) else without_fractions
    with rp.launch(replace(rp.recipe("gpt-tiny"), schedule="gpipe", backward="whole")) as job:
        for page in PAGES:
            for fence in runs(page):
                if turns := turns_of(fence):
                    stepper = job.stepper()
                    for typed, answer in turns:
                        found = eval(typed, {"s": stepper, "job": job})
                        if isinstance(found, float):
                            assert found == pytest.approx(float(answer), rel=1e-4 if same else 1e-2)
                        else:
                            assert shown(repr(found).rstrip()) == shown(answer), f"{page.name}: {typed}"
                    job.reset(job.run)


def test_every_block_is_of_a_kind_that_is_run_or_of_text():
    for page in PAGES:
        for fence in fences_of(page.read_text()):
            assert fence.language in ONE_OF_THESE, f"{page}:{fence.line}: {fence.language}"


def test_the_targets_of_make_are_there():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for fence in fences_of(page.read_text()):
            named = set(re.findall(r"^make ([a-z-]+)", fence.text, re.MULTILINE))
            assert named <= targets, f"{page}:{fence.line}: {named - targets}"


def test_make_pictures_draws_the_picture_of_the_readme_as_it_is(tmp_path, capsys):
    drawn = re.findall(r"bin/raypar (draw .*) --out (docs/\S+)", (ROOT / "Makefile").read_text())
    assert [name for _, name in drawn] == ["docs/1f1b.svg"]
    for words, name in drawn:
        run_command([*words.split(), "--out", str(tmp_path / Path(name).name)], capsys)
        assert (tmp_path / Path(name).name).read_bytes() == (ROOT / name).read_bytes(), "run make pictures"
    assert {"overlay.svg", "report.png"} == set(re.findall(r"docs/(\w+\.\w+)", (ROOT / "Makefile").read_text())) - {
        "1f1b.svg"
    }


def test_what_is_wrong_with_a_page_is_seen(folder, capsys):
    page = "```python\n1 / 0\n```\n<!-- not run: too long -->\n```\nraypar train # all\n```\n\n```\nraypar drew\n```\n"
    broken, long, wrong = fences_of(page)
    assert [fence.not_run for fence in (broken, long, wrong)] == [None, "too long", None]
    assert commands_of(long) == [["train"]]
    with pytest.raises(ZeroDivisionError):
        run_python("page", [broken], {})
    with pytest.raises(AssertionError, match="raypar drew"):
        run_command(*commands_of(wrong), capsys)
    assert fences_of("<!-- not run: -->\n```python\n```")[0].not_run is None, "a reason is missing"
    assert turns_of(Fence(1, "", ">>> a  # why\n1\n2\n>>> b", None)) == [("a", "1\n2"), ("b", "")]


# --- links -----------------------------------------------------------------------------------------------------------


def anchors_of(page: str) -> set[str]:
    """Where a link into the page may lead: headings, as GitHub and mkdocs name them, and ``<a id="...">``."""
    plain = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.*)$", plain, re.MULTILINE)
    named = {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}
    return named | set(re.findall(r'<a id="([^"]+)">', plain))


def dead_links(path: Path, page: str):
    plain = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", plain):
        if re.match(r"https?://", link):
            continue
        name, _, anchor = link.partition("#")
        target = Path(os.path.normpath(path.parent / name)) if name else path
        if not target.exists():
            yield f"{path.name}: {link}: there is no {name}"
        elif anchor and anchor not in anchors_of(page if target == path else target.read_text()):
            yield f"{path.name}: {link}: there is no heading {anchor}"


def test_links_lead_somewhere():
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
    assert not (dead := [link for page in pages for link in dead_links(page, page.read_text())]), "\n".join(dead)


def test_a_dead_link_is_seen():
    page = "# A `b`, c\n[1](#a-b-c) [2](#d) [3](gone.md) [4](README.md) [5](https://x.org) [6](docs/runs.md#nowhere)"
    dead = list(dead_links(ROOT / "README.md", page))
    assert [link.split(": ")[1] for link in dead] == ["#d", "gone.md", "docs/runs.md#nowhere"]


# --- what has to be there --------------------------------------------------------------------------------------------


def test_the_readme_is_one_page():
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_LINES


def test_the_reference_has_every_public_name():
    pages = [page.read_text() for page in PAGES if page.parent.name == "reference"]
    listed = re.findall(r"^::: (\S+)$", "\n".join(pages), re.MULTILINE)
    assert len(set(listed)) == len(listed)
    found = [getattr(importlib.import_module(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in listed]
    schedules = importlib.import_module("raypar.schedules")
    public = [getattr(rp, name) for name in rp.__all__] + _given_by(schedules)
    missing = [value for value in public if not any(value is one for one in found)]
    assert not missing


def test_the_table_of_exceptions_has_all_that_a_user_can_catch():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    table = re.findall(r"^\| `([\w.]+Error)` \|", page, re.MULTILINE)
    paths = [re.sub(r"^rp\.", "raypar.", name).rpartition(".") for name in table]
    listed = {getattr(importlib.import_module(home), name) for home, _, name in paths}
    errors, schedules = importlib.import_module("raypar.errors"), importlib.import_module("raypar.schedules")
    own = [value for value in vars(errors).values() if getattr(value, "__module__", "") == errors.__name__]
    public = [getattr(rp, name) for name in rp.__all__] + _given_by(schedules)
    board = importlib.import_module("raypar.schedules.step_board")
    raised = {value for value in [*own, *public, *vars(board).values()] if _is_error(value)}
    assert not (missing := raised - listed), missing


def _given_by(package):
    """What a package gives under its own name: each import in its __init__.py of the form X as X."""
    lines = ast.parse(Path(package.__file__).read_text()).body
    named = [alias.asname for line in lines if isinstance(line, ast.ImportFrom) for alias in line.names]
    return [getattr(package, name) for name in named if name]


def _is_error(value):
    return isinstance(value, type) and issubclass(value, Exception) and value.__module__.startswith("raypar")


def test_pages_are_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    listed = re.findall(r"^ +- (\S+\.md)$", nav, re.MULTILINE)
    assert sorted(listed) == sorted(page.relative_to(ROOT / "docs").as_posix() for page in PAGES[1:])


def test_a_guide_begins_with_what_one_can_do_after_it():
    """The reference and the decisions have summaries of their own; the first page is a sentence and pictures."""
    guides = [page for page in PAGES[1:] if page.parent.name == "docs" and page.name != "index.md"]
    beginnings = {page.name: page.read_text().splitlines()[2] for page in guides}
    assert {name for name, line in beginnings.items() if not re.match("(After|On) this page you ", line)} == set()


def test_search_ranks_guides_before_the_reference_and_the_way_to_start_before_all():
    hooks = SimpleNamespace(**runpy.run_path(str(ROOT / "docs/site/hooks.py")))

    def boost(name):
        page = SimpleNamespace(meta={}, file=SimpleNamespace(src_uri=name))
        assert hooks.on_page_markdown("text", page=page, config=None, files=None) == "text"
        return page.meta["search"]["boost"]

    assert boost("start.md") > boost("schedules.md") > boost("reference/run.md")
    assert boost("schedules.md") > boost("decisions/tests.md")


def test_the_head_of_a_run_in_the_docs_is_what_a_dry_run_says():
    page = (
        (ROOT / "docs/runs.md").read_text().partition("`raypar train gpt-small --mesh.tp 2 --dry-run`:\n\n```text\n")[2]
    )
    shown = dict(re.findall(r"^([a-z,=0-9 ]+): +(.+)$", page.partition("```")[0], re.MULTILINE))
    run = rp.recipe("gpt-small", mesh=rp.Mesh(pp=2, tp=2), device="cpu")
    said = dict(plan_rows(run, check_run(run)["train"], origins={"pp": "recipe gpt-small"}))
    own = {"data", "memory in all"}  # of the machine: the Python there, and what is free
    assert {name: said[name] for name in shown.keys() - own} == {name: shown[name] for name in shown.keys() - own}
    assert len(shown) == 9


def test_the_plan_of_own_modules_in_the_docs_is_what_a_search_finds():
    page = (ROOT / "docs/planning.md").read_text().partition("## Your own modules\n")[2]
    code, said, *_ = fences_of(page)
    told: dict[str, object] = {"__name__": "a_page"}
    run_python("docs/planning.md", [code], told)
    assert str(told["planned"]) == said.text


def test_what_fits_and_what_is_refused_is_what_a_check_says():
    """Each run in the table is checked; the names in it stand for a user's own."""
    table = (ROOT / "docs/what_fits.md").read_text()
    rows = re.findall(r"^\|[^|]+\| (fits|refused): `(Run\([^`]*\))`", table, re.MULTILINE)
    assert {word for word, _ in rows} == {"fits", "refused"}
    assert len(rows) >= 12
    names = {"rp": rp, "Run": rp.Run, "fn": lambda: [torch.nn.Linear(2, 2)] * 2, "loss": torch.nn.functional.mse_loss}
    names["batch"] = lambda step, microbatch, dp: (torch.zeros(1, 2), torch.zeros(1, 2))
    for word, run in rows:
        try:
            check_run(eval(run, dict(names)))
        except ConfigError as error:
            assert word == "refused", run
            assert len(error.faults) == 1, "it is refused for what the row says, not for another mistake in it"
        else:
            assert word == "fits", run


def test_what_is_not_there_yet_is_refused_in_the_words_of_the_table_with_its_place():
    table = (ROOT / "docs/what_fits.md").read_text()
    rows = re.findall(r"^\| (.+) \| refused: `(Run\([^`]*\))`.* \| (?!not planned \|)(.+) \|$", table, re.MULTILINE)
    assert {what: where.strip("`") for what, _, where in rows} == dict(NOT_YET)
    for what, run, where in rows:
        (fault,) = rp.faults(eval(run, {"rp": rp, "Run": rp.Run}))
        assert f"raypar has no {what} yet ({where.strip('`')})" in fault


def test_the_readme_and_the_table_of_the_docs_name_the_same_gaps():
    table = (ROOT / "docs/what_fits.md").read_text()
    rows = re.findall(r"^\| (.+?) \| (?!fits)", table, re.MULTILINE)
    missing = {part for row in rows for part in row.split("; ")}
    readme = (ROOT / "README.md").read_text().partition("| does not fit yet")[2].partition("\n\n")[0]
    cells = [line.split("|")[2] for line in readme.splitlines()[2:]]
    named = [item.partition(" (")[0].strip() for cell in cells for item in cell.split(";")]
    assert len(named) == 4
    for name in named:
        assert any(part.startswith(name) for part in missing), name


def _two_linears():
    return [torch.nn.Linear(2, 4), torch.nn.Linear(4, 2)]


_PLAN = {"layers.0": "column", "layers.1": "row"}
_FEATURES = {
    "tensor parallelism": {"mesh": {"tp": 2}},
    "grids": {"mesh": {"tp": "2d:2x2"}},
    "sequence parallelism": {"mesh": {"tp": 2}, "sequence_parallel": True},
    "context parallelism": {"mesh": {"cp": 2}},
    "ZeRO": {"mesh": {"dp": 4}, "zero": 3},
    "hybrid sharding": {"mesh": {"dp": 4, "shard": 2}, "zero": 3},
    "tiles": {"tile": 2},
    "offload": {"offload": "parameters"},
    "parameter servers": {"mesh": {"dp": 4}, "data_parallel": "parameter_server"},
    "half precision": {"precision": rp.Precision("bf16")},
    "Muon": {"optim": rp.Muon(adamw=())},
    "experts": {"model": rp.GPT(layers=1, hidden=8, heads=4, seq=8, moe=rp.MoE(experts=2))},
    "experts on several actors": {
        "model": rp.GPT(layers=1, hidden=8, heads=4, seq=8, moe=rp.MoE(experts=2)),
        "mesh": {"dp": 4, "ep": 2},
    },
    "own modules": {
        "model": rp.Layers(_two_linears, loss=torch.nn.functional.mse_loss, plan=_PLAN),
        "data": rp.Batches(lambda step, microbatch, dp: (torch.zeros(2, 2), torch.zeros(2, 2))),
    },
}


def _is_refused(*features):
    """Whether a run with these features is refused; None if they set the same field to different values."""
    fields = {"model": rp.GPT(layers=1, hidden=8, heads=4, seq=8), "data": rp.Text(str(ROOT / "LICENSE"))}
    mesh = {}
    for index, feature in enumerate(features):
        before = {**features[0], **features[0].get("mesh", {})} if index else {}
        told = {**feature, **feature.get("mesh", {})}
        if any(before.get(name, value) != value for name, value in told.items() if name != "mesh"):
            return None
        fields |= feature
        mesh |= feature.get("mesh", {})
    if isinstance(fields["model"], rp.Layers) and "tp" not in mesh:
        fields["model"] = replace(fields["model"], plan={})
    try:
        check_run(rp.Run(**fields | {"mesh": rp.Mesh(**mesh)}))
    except ValueError:
        return True
    return False


def _combinations(table):
    """The refused combinations of the table: by row, the feature before "with" or "on" and those behind it."""
    for first in re.findall(r"^\| ([^|]+) \| refused", table, re.MULTILINE):
        one, _, others = re.sub(r" (with|on) (?!several)", "\t", first, count=1).partition("\t")
        yield [
            set(re.split(r", (?:or )?(?:on )?| or (?:on )?", part.strip(", "))) & set(_FEATURES)
            for part in (one, others)
        ]


def test_every_combination_that_is_refused_is_in_the_table():
    table = (ROOT / "docs/what_fits.md").read_text()
    told = {frozenset((a, b)) for ones, others in _combinations(table) for a in ones for b in others}
    assert not [name for name in _FEATURES if _is_refused(_FEATURES[name])]
    pairs = {frozenset(pair): _is_refused(*(_FEATURES[name] for name in pair)) for pair in combinations(_FEATURES, 2)}
    assert {pair for pair, refused in pairs.items() if refused} == told


def test_the_figures_of_the_readme_are_those_of_the_benchmarks():
    """A bench that was run again (``--docs``) changes docs/benchmarks.md: the README's table has to follow."""
    measured = (ROOT / "README.md").read_text().partition("\n## Measured\n")[2].partition("\n## ")[0]
    rows = [line for line in measured.splitlines() if line.startswith(("| dp", "| pp", "| tp"))]
    figures = {cell.strip() for row in rows for cell in row.split("|") if re.fullmatch(r" [\d,.]+ ", cell)}
    cells = {cell.strip() for cell in (ROOT / "docs/benchmarks.md").read_text().replace("\n", "|").split("|")}
    assert len(rows) == 6
    assert figures <= cells, figures - cells


def test_the_grid_of_the_schedules_is_what_is_drawn():
    from raypar.schedules import build, gather_weights
    from raypar.schedules.passes.token_slices import with_slices
    from raypar.schedules.passes.without_flush import without_flush

    drawn = [f.text for f in fences_of((ROOT / "docs/schedules.md").read_text()) if f.text.startswith("rank 0  ")]
    gathered = gather_weights(build("interleaved", 2, 4), "step", resident=1)
    stream = without_flush(build("zb-h2", 2, 3), 2)
    sliced = with_slices(build("1f1b", 3, 6), 2)
    assert drawn == [str(schedule).rstrip() for schedule in (build("1f1b", 4, 8), stream, sliced, gathered)]


def test_the_placements_of_gathers_are_those_on_paper():
    from raypar.cli.schedules.schedules import measure

    words = "interleaved --ranks 2 --microbatches 4 --gather step --unshard 0.5"
    words += " --units 8 --weights-mib 100 --activations-mib 10"
    text = (ROOT / "docs/schedules.md").read_text()
    assert f"`raypar simulate {words}`" in text
    assert measure(words.split()).partition("\n\n")[2] in text


def test_the_bubbles_of_split_backwards_are_those_on_paper():
    from raypar.schedules import Costs, build, lower, simulate, split_backward

    lines = (ROOT / "docs/schedules.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if "p=2 m=8" in line)
    head, _, whole, split = ([cell.strip() for cell in line.split("|")[2:-1]] for line in lines[start : start + 4])
    for sizes, *told in zip(head, whole, split, strict=True):
        name, ranks, microbatches = re.fullmatch(r"(\w+) p=(\d+) m=(\d+)", sizes).groups()
        schedule, costs = lower(build(name, int(ranks), int(microbatches))), Costs()
        bubbles = [simulate(each, costs).bubble for each in (schedule, split_backward(schedule, costs))]
        assert [f"{bubble:.1%}".replace("%", " %") for bubble in bubbles] == told, sizes
