"""Installation into an environment of one's own, the lowest versions, and what each extra is for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

from tests.conftest import QUIET
from tests.support.lowest import lowest

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text()


def extras_of(project):
    """{extra: the comment in the line above it} of the text of pyproject.toml; "" where there is none."""
    table = re.search(r"^\[project\.optional-dependencies\]\n(.*?)^\[", project, re.MULTILINE | re.DOTALL)[1]
    return {name: words for words, name in re.findall(r"^(?:# (.*)\n)?([a-z0-9-]+) = \[", table, re.MULTILINE)}


def test_each_extra_says_what_it_is_for_in_pyproject_and_in_the_documentation():
    extras = extras_of(PROJECT)
    assert extras.keys() == tomllib.loads(PROJECT)["project"]["optional-dependencies"].keys()
    assert all(extras.values()), [name for name, words in extras.items() if not words]
    rows = re.findall(r"^\| `([^`]+)` \| (.*) \|$", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    assert dict(rows) == extras


def test_an_extra_without_words_is_seen():
    project = "[project.optional-dependencies]\n# for one\none = []\ntwo = [\n]\n[tool.ruff]\n"
    assert extras_of(project) == {"one": "for one", "two": ""}


def test_the_lowest_versions_are_those_of_pyproject():
    project = {
        "dependencies": ["ray[default]>=2.59,<3", "torch>=2.10"],
        "optional-dependencies": {"dev": ["pytest>=8.3"], "hf": ["tokenizers>=0.20"], "docs": ["mkdocs>=1"]},
    }
    pins = "torchvision==1\ntorch==2.13.0\nray==2.60\n"
    found = ["ray==2.59", "torch==2.13.0", "pytest==8.3", "tokenizers==0.20"]
    assert lowest(project, pins) == found
    assert lowest(project, pins, lowers_torch=True) == [found[0], "torch==2.10", *found[2:]]
    project["dependencies"].append("rich")
    with pytest.raises(ValueError, match="no lower bound: rich"):
        lowest(project, pins)


def made_environment(folder):
    """A new environment with raypar's dependencies and hatchling, from the one that runs the tests, but no raypar."""
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    others = [path for path in sys.path if Path(path).name == "site-packages"]
    (site / "others.pth").write_text("\n".join(others))  # what its own .pth files add, a checkout, is not followed
    return folder / "bin"


def installed(bin_folder, *what):
    pip = [bin_folder / "python", "-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*pip, "--ignore-installed", *what], check=True, cwd=bin_folder, env=environment(), timeout=110)


def environment():
    """Ours, without what makes Python find the checkout."""
    return {**os.environ, **QUIET, "PYTHONPATH": "", "PIP_CONSTRAINT": ""}


def wheel_of(folder):
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", folder, ROOT], check=True)
    return next(folder.glob("*.whl"))


def repository_of(folder):
    """A git repository with the files of the checkout."""
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True).stdout
    there = b"\0".join(name for name in files.split(b"\0") if name and os.path.lexists(ROOT / os.fsdecode(name)))
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", folder]
    subprocess.run(["git", "init", "-q", folder], check=True)
    subprocess.run(["tar", "-C", ROOT, "--null", "-T-", "-cf", folder / "all.tar"], input=there, check=True)
    subprocess.run(["tar", "-C", folder, "-xf", folder / "all.tar"], check=True)
    (folder / "all.tar").unlink()
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "all"], check=True)
    return f"git+file://{folder}"


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("form", ["path", "git", "wheel"])
def test_an_installed_raypar_trains_and_draws(form, tmp_path):
    where = {"path": lambda _: ROOT, "git": repository_of, "wheel": wheel_of}
    bin_folder = made_environment(tmp_path / "own environment")
    installed(bin_folder, where[form](tmp_path / form))

    def run(*command):
        done = subprocess.run(
            command, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    code = "import raypar, raypar.actors as a, raypar.schedules as s; print(*map(str, (raypar, a, s)), sep='\\n')"
    assert all(
        str(tmp_path / "own environment") in line for line in run(bin_folder / "python", "-c", code).splitlines()
    )
    assert "F0" in run(bin_folder / "raypar", "draw", "1f1b", "--ranks", "2", "--microbatches", "2")
    assert "loss" in run(bin_folder / "raypar", "train", "gpt-tiny", "--steps", "2")


def fake_python(path, version):
    """A program that says it is a Python of this version."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho {version}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (None, ""),
        ("3.11.7", ""),
        ("3.13.0", ".venv has Python 3.11.7: it is made anew with 3.13.0."),
        ("", "raypar needs Python 3.11 or newer, and nothing is not here"),
    ],
    ids=["none", "same", "another", "missing"],
)
@pytest.mark.parametrize("way", ["argument", "environment"])
def test_a_python_that_is_given_is_the_python_of_the_environment(given, says, way, tmp_path):
    folder = tmp_path / "a folder"
    fake_python(folder / ".venv/bin/python", "3.11.7")
    for name in (".venv/bin/pip", ".venv/.installed-dev", "pyproject.toml", "constraints.txt"):
        (folder / name).touch()
    os.utime(folder / "pyproject.toml", (0, 0))
    os.utime(folder / "constraints.txt", (0, 0))
    python = "nothing" if given == "" else str(fake_python(folder / "other python", given))
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHON"))}
    env |= {"PYTHON": python} if given is not None and way == "environment" else {}
    arguments = [f"PYTHON={python}"] if given is not None and way == "argument" else []
    command = ["make", *([] if given == "" else ["-n"]), "-f", ROOT / "Makefile", "lint", *arguments]
    made = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert made.returncode == (2 if given == "" else 0), made.stderr
    assert says in made.stdout + made.stderr
    assert ("made anew" in made.stdout) == ("made anew" in says)


def test_without_a_newer_python_nothing_is_run_on_one(tmp_path):
    newest = fake_python(tmp_path / "python", "3.99")
    done = subprocess.run(["bash", ROOT / "tests/newest.sh", newest], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("What needs no torch is not run on a newer Python: none starts here")


def test_an_environment_whose_python_is_gone_is_made_anew(tmp_path):
    """As after an upgrade of the system: what .venv links to is no longer there."""
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to(tmp_path / "gone")
    for name in (".venv/bin/pip", "pyproject.toml", "constraints.txt", ".venv/.installed"):
        (tmp_path / name).touch()
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHON"))}
    command = ["make", "-n", "-f", ROOT / "Makefile", "install"]
    made = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True)
    assert ".venv has a Python that is gone: it is made anew with 3." in made.stdout
    assert "-m venv --clear .venv" in made.stdout
