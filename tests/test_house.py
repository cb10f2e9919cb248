"""The rules of CONTRIBUTING.md as tests: rooms and imports, sizes, types, the wheel, the README's tree.

Every checker is a function of source text that returns faults, and is itself tried on sources that break the rule.
"""

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("schedules", "actors", "raypar")
LINKS = {"raypar/actors": "../actors", "raypar/schedules": "../schedules"}
RAY_IN_ACTORS = {"actors/groups.py"}
RAY_IN_HEAD = {"raypar/cluster.py", "raypar/calls.py"}
PRINTS = {"raypar/cli.py"}
UNPICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "torch.load", "torch.save"}
MAX_FILE, MAX_FUNCTION, MAX_WITHOUT_DOCSTRING = 300, 60, 8
LEFT_BY_TOOLS = re.compile(r"__pycache__|\..*|build|dist|runs|.*\.egg-info")


def project_files():
    """The project's files, relative to ROOT: what git has or would add; without git, what no tool has left behind."""
    if (ROOT / ".git").exists():
        git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(git, cwd=ROOT, capture_output=True, text=True)
        if listed.returncode == 0:
            return sorted({Path(name) for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()})
    return walked_files()


def walked_files():
    found = []
    for folder, folders, files in os.walk(ROOT):
        folders[:] = [name for name in folders if not LEFT_BY_TOOLS.fullmatch(name)]
        found += [(Path(folder) / name).relative_to(ROOT) for name in files]
    return sorted(found)


def python_files(*tops):
    return [path for path in project_files() if path.suffix == ".py" and (not tops or path.parts[0] in tops)]


def faults_of(check, *tops):
    return [fault for path in python_files(*tops) for fault in check(path.as_posix(), (ROOT / path).read_text())]


# --- imports ---------------------------------------------------------------------------------------------------------


def imported(path, tree):
    """(module, line) of every import. ``from a import b`` gives ``a.b``; a relative one is counted from the file."""
    parts = list(Path(path).parent.parts)
    package = parts if parts[:1] == ["raypar"] else ["raypar", *parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{stem}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from ((name.value, node.lineno) for name in node.args[:1] if isinstance(name, ast.Constant))


def inside(module, *packages):
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def import_faults(path, source):
    """Imports that go the wrong way: raypar -> actors -> schedules, and ray only where the cluster is talked to."""
    room = path.split("/")[0]
    for module, line in imported(path, ast.parse(source)):
        root = module.split(".")[0]
        says = None
        if root in ("actors", "schedules"):
            says = f"import it as raypar.{module}: as {root} it is a second copy"
        elif room == "schedules":
            if not inside(module, "raypar.schedules") and root not in sys.stdlib_module_names:
                says = "schedules/ imports the standard library and raypar.schedules only"
        elif room == "actors":
            if root == "raypar" and not inside(module, "raypar.actors", "raypar.schedules"):
                says = "actors/ imports from raypar.actors and raypar.schedules only"
            elif root == "ray" and path not in RAY_IN_ACTORS:
                says = f"in actors/ only {', '.join(RAY_IN_ACTORS)} may import ray"
        elif room == "raypar" and root == "ray" and path not in RAY_IN_HEAD:
            says = f"in raypar/ only {', '.join(sorted(RAY_IN_HEAD))} may import ray"
        if says:
            yield f"{path}:{line}: {module}: {says}"


def test_imports_go_raypar_to_actors_to_schedules():
    assert {path.parts[0] for path in python_files(*ROOMS)} == set(ROOMS)
    assert not (faults := faults_of(import_faults)), "\n".join(faults)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("schedules/a.py", "import torch"),
        ("schedules/a.py", "def f():\n    from numpy import array"),
        ("schedules/a.py", "from raypar.actors import mesh"),
        ("schedules/a.py", "from raypar import schedules, actors"),
        ("schedules/a.py", "from .. import driver"),
        ("schedules/a.py", "import importlib\nimportlib.import_module('ray')"),
        ("actors/a.py", "import ray"),
        ("actors/layers/a.py", "if TYPE_CHECKING:\n    from ray.util import collective"),
        ("actors/a.py", "import raypar"),
        ("actors/a.py", "from raypar.config.run import Run"),
        ("actors/layers/a.py", "from ...config import Run"),
        ("actors/a.py", "from schedules import action"),
        ("raypar/repl.py", "import ray"),
        ("tests/test_a.py", "import actors.mesh"),
    ],
)
def test_a_wrong_import_is_seen(path, source):
    assert list(import_faults(path, source))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("schedules/a.py", "import graphlib\nfrom . import action\nfrom raypar.schedules.action import Op"),
        ("actors/a.py", "import torch\nfrom raypar import schedules\nfrom .specs import GPT\nimport rayon"),
        ("actors/groups.py", "from ray.util import collective"),
        ("actors/layers/a.py", "from ..mesh import Mesh\nfrom . import ops"),
        ("raypar/calls.py", "import ray\nfrom raypar.actors.worker.worker import Worker\nfrom .config import Run"),
        ("tests/test_a.py", "import ray, torch\nfrom raypar import driver"),
    ],
)
def test_a_right_import_is_not(path, source):
    assert not list(import_faults(path, source))


def test_the_rooms_are_tied_in_by_relative_links():
    for link, target in LINKS.items():
        assert (ROOT / link).is_symlink(), f"{link} is not a link: git config core.symlinks true, then check out again"
        assert os.readlink(ROOT / link) == target  # noqa: PTH115  (readlink's Path would hide a trailing slash)
        assert (ROOT / link / "__init__.py").is_file()


@pytest.mark.parametrize("module", ["raypar", "raypar.schedules"])
def test_importing_starts_nothing_heavy(module):
    code = f"import sys, {module}; print(*sorted({{'torch', 'ray', 'numpy'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [], f"import {module} brings them in"


# --- size, types, docstrings, leftovers ------------------------------------------------------------------------------


def functions(tree, public=True, nested=False):
    """(function, whether it is public) for every function; inside a function or a private class nothing is public."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node, public and not nested and not node.name.startswith("_")
            yield from functions(node, public, nested=True)
        else:
            private_class = isinstance(node, ast.ClassDef) and node.name.startswith("_")
            yield from functions(node, public and not private_class, nested)


def is_annotated(function):
    spec = function.args
    arguments = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
    named = [argument for argument in arguments if argument and argument.arg not in ("self", "cls")]
    return all(a.annotation for a in named) and (function.returns is not None or function.name == "__init__")


def style_faults(path, source):
    """Too long, not typed, not explained, or using what this project does not use."""
    lines, tree = source.splitlines(), ast.parse(source)
    if len(lines) > MAX_FILE:
        yield f"{path}: {len(lines)} lines, more than {MAX_FILE}: does it have two subjects?"
    for function, public in functions(tree):
        at, size = f"{path}:{function.lineno}: {function.name}", function.end_lineno - function.lineno + 1
        if size > MAX_FUNCTION:
            yield f"{at}: {size} lines, more than {MAX_FUNCTION}"
        if not is_annotated(function):
            yield f"{at}: annotate every argument and the return value"
        if public and size > MAX_WITHOUT_DOCSTRING and not ast.get_docstring(function):
            yield f"{at}: public, {size} lines, no docstring"
    for module, line in imported(path, tree):
        if inside(module, *UNPICKLES):
            yield f"{path}:{line}: {module}: nothing is pickled here; safetensors, JSON or TOML"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in UNPICKLES:
            yield f"{path}:{node.lineno}: {ast.unparse(node)}: nothing is pickled here; safetensors, JSON or TOML"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print" and path not in PRINTS:
            yield f"{path}:{node.lineno}: print outside the command line"


def test_files_are_short_typed_and_explained():
    assert not (faults := faults_of(style_faults, *ROOMS)), "\n".join(faults)


def body(lines):
    return "\n".join(["    x = 1"] * lines)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1\n" * 301, "301 lines"),
        (f"def _f() -> None:\n{body(60)}", "61 lines"),
        (f"class A:\n  def f(self) -> None:\n{body(8)}", "no docstring"),
        ("def f(a) -> int: ...", "annotate"),
        ("def f(*a, b: int) -> int: ...", "annotate"),
        ("async def f(a: int): ...", "annotate"),
        ("def f() -> None:\n    def g(a): ...", "annotate"),
        ("print(1)", "print"),
        ("from pickle import loads", "pickle"),
        ("import torch\ntorch.load('x')", "torch.load"),
    ],
)
def test_a_broken_style_rule_is_seen(source, says):
    faults = list(style_faults("raypar/a.py", source))
    assert len(faults) == 1, faults
    assert says in faults[0]


def test_good_style_is_not():
    nested = "def _f() -> None:\n  def g() -> None:\n" + body(9)
    private = "class _A:\n  def f(self, a: int) -> None:\n" + body(9)
    for good in ("x = 1\n" * 300, "def _f(*a: int) -> None:\n" + body(59), nested, private):
        assert not list(style_faults("raypar/a.py", good)), good
    assert not list(style_faults("raypar/cli.py", "print(1)"))


# --- the wheel -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(the wheel of the checkout, the wheel of its sdist)."""
    folder = tmp_path_factory.mktemp("built")
    for kind, out in ((["--wheel"], "checkout"), ([], "sdist")):
        command = [sys.executable, "-m", "build", *kind, "--no-isolation", "--outdir", folder / out, ROOT]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return [next((folder / out).glob("*.whl")) for out in ("checkout", "sdist")]


def contents(wheel):
    with zipfile.ZipFile(wheel) as z:
        return {name: z.read(name) for name in z.namelist()}


def test_the_wheel_holds_raypar_and_nothing_else(built):
    held = contents(built[0])
    package = {name: data for name, data in held.items() if ".dist-info/" not in name}
    rooms = [path for path in project_files() if path.parts[0] in ROOMS]
    wanted = {(path if path.parts[0] == "raypar" else "raypar" / path).as_posix(): path for path in rooms}
    assert set(package) == set(wanted)
    assert "raypar/py.typed" in package
    assert all(package[name] == (ROOT / path).read_bytes() for name, path in wanted.items())
    assert any(name.endswith("licenses/LICENSE") for name in held)


def test_the_sdist_builds_the_same_wheel(built):
    assert contents(built[0]) == contents(built[1])


def test_the_wheel_can_be_imported(built, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--target", tmp_path / "site"]
    subprocess.run([*pip, built[0]], check=True)
    code = "import raypar, raypar.actors as a, raypar.schedules as s; print(raypar.__file__, a.__file__, s.__file__)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    want = [tmp_path / "site" / "raypar" / room / "__init__.py" for room in ("", "actors", "schedules")]
    assert run.stdout.split() == [str(path) for path in want]


# --- the README's tree -----------------------------------------------------------------------------------------------


def listed_in(readme):
    """{path: comment} of the tree in a README; a folder's path ends with a slash.

    The tree is a fenced block between ``<!-- tree -->`` and ``<!-- /tree -->``. A line is a path, two spaces or more,
    and a comment. Below a folder, which is written with a slash, paths may be indented and then are relative to it;
    the characters that ``tree`` draws count as spaces; blank lines and a lone ``.`` do not count::

        schedules/        pure data, the paper
          action.py       one action, as torch spells it
        actors/layers/ops.py   the same tree may also have whole paths
    """
    block = re.search(r"<!-- tree -->\s*```\w*\n(.*?)```\s*<!-- /tree -->", readme, re.DOTALL)
    assert block, "README.md has no fenced block between <!-- tree --> and <!-- /tree -->"
    found, above = {}, []
    for line in block[1].splitlines():
        plain = re.sub("[│├└─|`]", " ", line).expandtabs()
        path, _, comment = plain.strip().partition("  ")
        if path in ("", "."):
            continue
        indent = len(plain) - len(plain.lstrip())
        while above and above[-1][0] >= indent:
            above.pop()
        path = (above[-1][1] if above else "") + path.removeprefix("./")
        found[path] = comment.strip()
        if path.endswith("/"):
            above.append((indent, path))
    return found


def tree_faults(listed, files):
    """What a tree leaves out, makes up, or does not explain. Dot-files and ``__init__.py`` may be left out."""
    folders = {f"{parent.as_posix()}/" for path in files for parent in path.parents[:-1]}
    there = {path.as_posix() for path in files} | folders
    top = {path.parts[0] + ("/" if len(path.parts) > 1 else "") for path in files}
    code = {p.as_posix() for p in files if p.suffix == ".py" and p.parts[0] in (*ROOMS, "examples")}
    wanted = {p for p in top | code if not p.startswith(".") and not p.endswith("__init__.py")}
    yield from (f"missing: {path}" for path in sorted(wanted - set(listed)))
    yield from (f"not on the disk: {path}" for path in sorted(set(listed) - there))
    yield from (f"no comment: {path}" for path, comment in listed.items() if not comment)


def test_the_tree_of_the_readme_is_the_disk():
    listed = listed_in((ROOT / "README.md").read_text())
    assert not (faults := list(tree_faults(listed, project_files()))), "\n".join(faults)


def test_a_wrong_tree_is_seen():
    tree = ".\n├── actors/     the hands\n│   └── mesh.py  axes\nraypar/gone.py  x\n"
    listed = listed_in(f"<!-- tree -->\n```text\n{tree}```\n<!-- /tree -->")
    assert listed == {"actors/": "the hands", "actors/mesh.py": "axes", "raypar/gone.py": "x"}
    files = [Path(p) for p in ("actors/mesh.py", "actors/__init__.py", "actors/new.py", "Makefile", ".gitignore")]
    faults = list(tree_faults(listed, files))
    assert faults == ["missing: Makefile", "missing: actors/new.py", "not on the disk: raypar/gone.py"]
    assert list(tree_faults({"Makefile": ""}, [Path("Makefile")])) == ["no comment: Makefile"]
    with pytest.raises(AssertionError, match="README"):
        listed_in("# raypar")
