"""The rules of CONTRIBUTING.md as tests: rooms and imports, sizes, types, the wheel, what docs/architecture.md lists.

Every checker is a function of source text that returns faults, and is itself tried on sources that break the rule.
"""

import ast
import graphlib
import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from functools import cache, lru_cache
from itertools import chain
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("schedules", "actors", "raypar")
LINKS = {"raypar/actors": "../actors", "raypar/schedules": "../schedules"}
RAY_IN = {"actors": ("actors/collective/",), "raypar": ("raypar/cluster/", "raypar/reporting/trackers/")}
PRINTS = {"raypar/cli/main.py"}
TORCH_PRIVATE = "actors/autograd/torch_private.py"
RAY_PRIVATE = {"actors": "actors/collective/ray/ray_private.py", "raypar": "raypar/cluster/ray_private.py"}
PRIVATE_ATTRIBUTES = (  # of tensors, modules, ops and process groups; of our own objects only ``self`` may have one
    "_version _base _is_view _cdata _backward_hooks _backward_pre_hooks _forward_hooks _forward_pre_hooks "
    "_post_accumulate_grad_hooks _schema _allgather_base _reduce_scatter_base _Options _devices _threads _timeout"
)
UNPICKLES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "torch.load", "torch.save"}
MAX_FILE, MAX_FUNCTION, MAX_WITHOUT_DOCSTRING = 600, 60, 8
MAX_AT_ONCE = 3  # names that one line gives values to
MAX_STEP = 32  # files that a reader passes from job.step() to its report
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


LOOKED_AT = (ast.Import, ast.ImportFrom, ast.Assign, ast.Call, ast.Attribute, ast.FunctionDef, ast.ClassDef, ast.Module)


@lru_cache(maxsize=1)  # one file after the other goes through all checks
def parsed(source):
    """The tree of a source, and those of its nodes that checks look at."""
    tree = ast.parse(source)
    return tree, [node for node in nodes_of(tree) if isinstance(node, LOOKED_AT)]


def nodes_of(tree, never_run=True):
    """All nodes of a tree, in half the time of ``ast.walk``; without ``never_run``, none below ``if TYPE_CHECKING``."""
    nodes = [tree]
    for node in nodes:
        if not never_run and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            nodes += node.orelse
            continue
        for value in vars(node).values():
            if isinstance(value, ast.AST):
                nodes.append(value)
            elif isinstance(value, list):
                nodes += [one for one in value if isinstance(one, ast.AST)]
    return nodes


@cache
def faults_by_check():
    """{check: its faults in all files that it is for}."""
    checks = {import_faults: (), private_faults: ("actors", "raypar"), style_faults: ROOMS}
    found = {check: [] for check in checks}
    for path in python_files():
        source = (ROOT / path).read_text()
        for check, tops in checks.items():
            if not tops or path.parts[0] in tops:
                found[check] += check(path.as_posix(), source)
    return found


# --- imports ---------------------------------------------------------------------------------------------------------


def imported(path, nodes):
    """(module, line) of every import. ``from a import b`` gives ``a.b``; a relative one is counted from the file."""
    parts = list(Path(path).parent.parts)
    package = parts if parts[:1] == ["raypar"] else ["raypar", *parts]
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((f"{stem}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith(("import_module", "__import__")):
            yield from ((name.value, node.lineno) for name in node.args[:1] if isinstance(name, ast.Constant))


def dotted(node):
    """The name of an expression such as ``torch.nn.init``; "" if there is a call or an index in it."""
    if isinstance(node, ast.Name):
        return node.id
    base = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return base and f"{base}.{node.attr}"


def inside(module, *packages):
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def import_faults(path, source):
    """Imports that go the wrong way: raypar -> actors -> schedules, and ray only where the cluster is talked to."""
    room = path.split("/")[0]
    for module, line in imported(path, parsed(source)[1]):
        root = module.split(".")[0]
        says = None
        if root in ("actors", "schedules"):
            says = f"import it as raypar.{module}: as {root} it is a second copy"
        elif room == "schedules":
            if not inside(module, "raypar.schedules") and root not in sys.stdlib_module_names:
                says = "schedules/ imports the standard library and raypar.schedules only"
        elif room == "actors" and root == "raypar" and not inside(module, "raypar.actors", "raypar.schedules"):
            says = "actors/ imports from raypar.actors and raypar.schedules only"
        if says is None and root == "ray" and not path.startswith(RAY_IN.get(room, (f"{room}/",))):
            says = f"in {room}/ only {', '.join(RAY_IN[room])} may import ray"
        if says:
            yield f"{path}:{line}: {module}: {says}"


def test_imports_go_raypar_to_actors_to_schedules():
    assert {path.parts[0] for path in python_files(*ROOMS)} == set(ROOMS)
    assert not (faults := faults_by_check()[import_faults]), "\n".join(faults)


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
        ("actors/worker/actor.py", "import ray"),
        ("actors/a.py", "import raypar"),
        ("actors/a.py", "from raypar.config.run import Run"),
        ("actors/layers/a.py", "from ...config import Run"),
        ("actors/a.py", "from schedules import action"),
        ("raypar/cli/repl.py", "import ray"),
        ("raypar/job/job.py", "def f():\n    from ray.exceptions import RayError"),
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
        ("actors/collective/ray/ray_groups.py", "from ray.util import collective"),
        ("raypar/reporting/trackers/gauges.py", "from ray.util.metrics import Gauge"),
        ("actors/layers/a.py", "from ..mesh.mesh import Mesh\nfrom . import linear"),
        (
            "raypar/cluster/calls/calls.py",
            "import ray\nfrom raypar.actors.worker.worker import Worker\nfrom ..config.run import Run",
        ),
        ("tests/test_a.py", "import ray, torch\nfrom raypar import job"),
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


def test_a_public_module_is_there_before_anything_else_imports_it():
    code = "import raypar; print(raypar.chaos.kill('pp=1', at='1B3').kind)"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (run.returncode, run.stdout) == (0, "kill\n"), run.stderr


# --- private names of torch and Ray -----------------------------------------------------------------------------------


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def names_of(package, nodes):
    """{name in this file: its dotted name in the package}, of everything that the file imports from it."""
    names = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if inside(alias.name, package):
                    names[alias.asname or package] = alias.name if alias.asname else package
        elif isinstance(node, ast.ImportFrom) and not node.level and inside(node.module, package):
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def private_faults(path, source):
    """Lines with private names of torch or Ray outside of the one file (of Ray: one a room) where they may stand."""
    torch, ray = (TORCH_PRIVATE, PRIVATE_ATTRIBUTES.split()), (RAY_PRIVATE[path.split("/")[0]], [])
    nodes = parsed(source)[1]
    for package, (home, attributes) in {"torch": torch, "ray": ray}.items():
        if path != home:
            for line, name in sorted(private_names(package, attributes, path, nodes).items()):
                yield f"{path}:{line}: {name}: take it from {home}, behind a function that says why it is needed"


def private_names(package, attributes, path, nodes):
    """{line: private name of a package}: imports, what is behind imports, settings, attributes of its own objects."""
    names, found = names_of(package, nodes), {}
    for node in nodes:
        if isinstance(node, ast.Call) and dotted(node.func).partition(".")[0] in names:
            found |= {given.lineno: given.arg for given in node.keywords if is_private(given.arg or "")}
        if isinstance(node, ast.Attribute):
            owner, attribute = node.value, node.attr
        elif isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "setattr", "hasattr"):
            owner, attribute = node.args[0], ast.unparse(node.args[1]).strip("'")
        else:
            continue
        root, _, rest = dotted(owner).partition(".")
        behind = f"{names[root]}.{rest}.{attribute}" if root in names else ""
        if any(map(is_private, behind.split("."))) or (attribute in attributes and root not in ("self", "cls")):
            found[node.lineno] = f"{ast.unparse(owner)}.{attribute}"
    for module, line in imported(path, nodes):
        if inside(module, package) and any(map(is_private, module.split("."))):
            found[line] = module
    return found


def test_private_names_of_torch_and_of_ray_are_in_files_of_their_own():
    assert all((ROOT / home).is_file() for home in (TORCH_PRIVATE, *RAY_PRIVATE.values()))
    assert not (faults := faults_by_check()[private_faults]), "\n".join(faults)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch._C._get_mkldnn_enabled()",
        "import torch\ndef f(x):\n    torch._assert_async(x)",
        "import torch\nf = torch.ops.aten._unsafe_view.default",
        "import torch\nf = getattr(torch.ops.mkldnn, '_linear_pointwise', None)",
        "import torch._dynamo",
        "import torch.utils._pytree as pytree",
        "from torch import _assert_async",
        "from torch._C._distributed_c10d import Store",
        "from torch.nn.modules.module import _has_any_global_hook as has_hook",
        "from torch.autograd import forward_ad\nlevel = forward_ad._current_level",
        "import torch.nn.functional as F\nF._canonical_mask",
        "def f(tensor):\n    return tensor._version",
        "def f(layer):\n    return layer.weight.untyped_storage()._cdata",
        "def f(x):\n    return getattr(x, '_post_accumulate_grad_hooks', None)",
    ],
)
def test_a_private_name_of_torch_is_seen(source):
    (fault,) = private_faults("actors/layers/a.py", source)
    assert TORCH_PRIVATE in fault
    assert not list(private_faults(TORCH_PRIVATE, source))


@pytest.mark.parametrize(
    "source",
    [
        "from ray._private import services",
        "from ray._raylet import AuthenticationTokenLoader",
        "import ray\nsession = ray._private.worker._global_node",
        "import ray\nloader = getattr(ray._raylet, 'AuthenticationTokenLoader', None)",
        "import ray\nray.init(_node_ip_address='127.0.0.1')",
        "from ray.experimental import internal_kv\ninternal_kv._internal_kv_get(b'a')",
    ],
)
@pytest.mark.parametrize(("room", "home"), RAY_PRIVATE.items())
def test_a_private_name_of_ray_is_seen(source, room, home):
    (fault,) = private_faults(f"{room}/a.py", source)
    assert home in fault
    assert not list(private_faults(home, source))


def test_a_public_name_of_ray_is_not():
    source = "import ray\ndef f(h):\n  ray.init(address='auto')\n  return h.__ray_call__.remote(), ray.__version__"
    assert not list(private_faults("raypar/cluster/a.py", source))


def test_a_public_name_of_torch_is_not():
    source = (
        "import torch\nfrom torch import Tensor, nn\nfrom torch.distributed.distributed_c10d import Store\n"
        "class A(nn.Module):\n  def __init__(self, base):\n    super().__init__()\n    self._base = base\n"
        "def f(module, span, name):\n"
        "  getattr(torch, name), nn.Linear.__init__, torch.__version__\n"
        "  return module._parameters, span._replace(start=0), torch.ops.aten.mm.default, Tensor.is_meta.__get__"
    )
    assert not list(private_faults("actors/layers/a.py", source))


# --- which folder imports which --------------------------------------------------------------------------------------

# What the files of a folder may import from other folders; the name of a room alone is its loose files. What is added
# here is a new arrow in the drawing of the house: is there another way?
MAY_IMPORT = {
    "actors": "actors/specs schedules schedules/drawing",
    "actors/autograd": "actors",
    "actors/checkpoint": "actors actors/machine actors/models/tiles",
    "actors/collective": (
        "actors actors/autograd actors/collective/gloo actors/collective/gpu actors/collective/shm "
        "actors/machine schedules"
    ),
    "actors/collective/gloo": "actors actors/autograd actors/collective actors/collective/shm actors/machine",
    "actors/collective/gpu": "actors actors/autograd actors/collective",
    "actors/collective/ray": "actors actors/collective",
    "actors/collective/shm": "actors actors/collective actors/machine",
    "actors/context_parallel": (
        "actors actors/autograd actors/collective actors/layers actors/layers/attention actors/models actors/specs"
    ),
    "actors/data": "actors actors/data/examples actors/data/text actors/machine actors/models actors/specs",
    "actors/data/examples": (
        "actors actors/data actors/data/text actors/data/tokenizers actors/machine actors/specs schedules"
    ),
    "actors/data/text": "actors actors/data actors/data/tokenizers actors/machine actors/specs",
    "actors/data/tokenizers": "actors/machine",
    "actors/data_parallel": (
        "actors actors/autograd actors/checkpoint actors/collective actors/machine actors/models "
        "actors/models/init actors/models/tiles actors/optim actors/specs schedules"
    ),
    "actors/expert_parallel": "actors actors/autograd actors/collective actors/specs schedules",
    "actors/hugging_face": "actors actors/machine actors/specs schedules",
    "actors/inspect": "actors actors/checkpoint actors/machine actors/specs schedules",
    "actors/layers": "actors actors/autograd actors/specs",
    "actors/layers/attention": "actors actors/autograd actors/layers actors/specs",
    "actors/machine": "actors actors/autograd actors/specs schedules",
    "actors/mesh": "actors",
    "actors/models": (
        "actors actors/autograd actors/collective actors/expert_parallel actors/hugging_face actors/layers "
        "actors/layers/attention actors/models/init actors/models/own actors/specs schedules"
    ),
    "actors/models/init": "actors actors/autograd actors/expert_parallel",
    "actors/models/own": (
        "actors actors/autograd actors/collective actors/hugging_face actors/models actors/models/init actors/specs "
        "schedules"
    ),
    "actors/models/tiles": "actors actors/layers actors/models actors/specs",
    "actors/optim": (
        "actors actors/autograd actors/checkpoint actors/collective actors/data actors/machine actors/models "
        "actors/models/init actors/models/tiles actors/optim/muon actors/specs actors/tensor_parallel"
    ),
    "actors/optim/muon": "actors actors/collective actors/machine actors/specs actors/tensor_parallel",
    "actors/pipeline": (
        "actors actors/autograd actors/collective actors/data_parallel actors/expert_parallel actors/inspect "
        "actors/layers actors/machine actors/models actors/models/init actors/specs schedules"
    ),
    "actors/relayout": "actors actors/checkpoint actors/collective",
    "actors/specs": "actors actors/machine actors/mesh schedules schedules/drawing schedules/passes",
    "actors/tensor_parallel": (
        "actors actors/autograd actors/collective actors/layers actors/layers/attention actors/models actors/specs"
    ),
    "actors/tensor_parallel/grid": (
        "actors actors/autograd actors/collective actors/layers actors/layers/attention actors/models "
        "actors/tensor_parallel"
    ),
    "actors/worker": (
        "actors actors/checkpoint actors/collective actors/collective/gpu actors/collective/ray "
        "actors/data_parallel actors/expert_parallel actors/inspect actors/layers/attention actors/machine "
        "actors/mesh actors/models/tiles actors/optim actors/pipeline actors/relayout actors/specs "
        "actors/tensor_parallel actors/worker/build schedules schedules/passes"
    ),
    "actors/worker/build": (
        "actors actors/checkpoint actors/collective actors/context_parallel actors/data actors/data_parallel "
        "actors/expert_parallel actors/inspect actors/machine actors/mesh actors/models actors/models/tiles "
        "actors/optim actors/optim/muon actors/pipeline actors/specs actors/tensor_parallel "
        "actors/tensor_parallel/grid schedules schedules/passes"
    ),
    "raypar": "actors actors/machine schedules schedules/drawing",
    "raypar/calibration": (
        "actors/collective/ray actors/layers actors/layers/attention actors/machine actors/mesh actors/specs "
        "raypar raypar/cluster/lifecycle raypar/cluster/nodes raypar/cluster/placement raypar/config "
        "raypar/job raypar/planner raypar/planner/calibrated raypar/planner/memory raypar/planner/sizes "
        "schedules"
    ),
    "raypar/checkpoint": (
        "actors actors/checkpoint actors/hugging_face actors/machine actors/models actors/specs raypar "
        "raypar/config raypar/config/hugging_face schedules"
    ),
    "raypar/cli": (
        "actors actors/data/examples actors/data/tokenizers actors/specs raypar raypar/calibration "
        "raypar/checkpoint raypar/cli/train raypar/cli/words raypar/cluster raypar/config raypar/doctor "
        "raypar/job raypar/job/start raypar/planner raypar/planner/calibrated raypar/planner/hardware "
        "raypar/planner/sizes raypar/reporting raypar/reporting/html raypar/reporting/run_folder schedules "
        "schedules/drawing"
    ),
    "raypar/cli/plan": (
        "actors/machine actors/mesh actors/specs raypar raypar/cli/words raypar/cluster/lifecycle "
        "raypar/cluster/placement raypar/config raypar/job/start raypar/planner raypar/planner/calibrated "
        "raypar/planner/hardware raypar/planner/memory raypar/planner/search raypar/planner/sizes "
        "raypar/planner/timing raypar/reporting/tables schedules schedules/drawing"
    ),
    "raypar/cli/schedules": (
        "actors/specs raypar raypar/cli/words raypar/config raypar/planner/fleet raypar/reporting "
        "raypar/reporting/html schedules schedules/checking schedules/drawing schedules/passes "
        "schedules/simulation"
    ),
    "raypar/cli/text": (
        "actors/data/tokenizers actors/hugging_face actors/mesh actors/specs raypar raypar/cli/train "
        "raypar/cli/words raypar/cluster raypar/config/conflicts raypar/config/hugging_face raypar/job "
        "raypar/job/text raypar/planner raypar/reporting"
    ),
    "raypar/cli/train": (
        "actors actors/data actors/data/examples actors/data/text actors/machine actors/mesh actors/models "
        "actors/specs raypar raypar/checkpoint raypar/cli raypar/cli/words raypar/cluster/lifecycle "
        "raypar/config raypar/config/conflicts raypar/job raypar/job/recover raypar/job/start raypar/job/text "
        "raypar/planner raypar/planner/calibrated raypar/reporting raypar/reporting/run_folder "
        "raypar/reporting/tables schedules schedules/drawing schedules/reading"
    ),
    "raypar/cli/words": (
        "actors actors/machine actors/specs raypar raypar/config raypar/config/hugging_face raypar/reporting "
        "schedules schedules/drawing schedules/passes schedules/simulation"
    ),
    "raypar/cluster": "actors actors/machine raypar",
    "raypar/cluster/calls": (
        "actors actors/specs raypar raypar/cluster raypar/cluster/deaths raypar/cluster/nodes schedules"
    ),
    "raypar/cluster/deaths": "actors/machine actors/specs raypar raypar/cluster raypar/cluster/nodes",
    "raypar/cluster/lifecycle": (
        "actors actors/machine actors/mesh actors/specs raypar raypar/cluster raypar/cluster/nodes "
        "raypar/cluster/placement schedules"
    ),
    "raypar/cluster/nodes": "actors raypar raypar/cluster raypar/cluster/placement",
    "raypar/cluster/placement": "actors/mesh actors/specs raypar raypar/cluster schedules",
    "raypar/config": (
        "actors actors/data actors/data/examples actors/data/text actors/hugging_face actors/machine "
        "actors/mesh actors/models actors/models/own actors/specs raypar raypar/config/conflicts "
        "raypar/config/hugging_face raypar/planner raypar/planner/hardware raypar/planner/operators "
        "raypar/planner/sizes raypar/planner/timing schedules schedules/checking schedules/generators "
        "schedules/passes schedules/reading schedules/simulation"
    ),
    "raypar/config/conflicts": (
        "actors actors/autograd actors/context_parallel actors/data actors/data/examples actors/data/text "
        "actors/data_parallel actors/hugging_face actors/machine actors/mesh actors/models actors/models/init "
        "actors/models/own actors/models/tiles actors/optim actors/specs actors/worker/build raypar "
        "raypar/config raypar/config/trial schedules"
    ),
    "raypar/config/hugging_face": (
        "actors actors/hugging_face actors/machine actors/models/own actors/specs raypar raypar/config schedules"
    ),
    "raypar/config/trial": (
        "actors actors/collective actors/data actors/models actors/models/init actors/models/own actors/specs "
        "actors/worker/build schedules"
    ),
    "raypar/doctor": (
        "actors/collective/ray actors/machine raypar raypar/cluster raypar/cluster/lifecycle "
        "raypar/cluster/nodes raypar/cluster/placement schedules"
    ),
    "raypar/job": (
        "actors actors/machine actors/specs actors/worker raypar raypar/checkpoint raypar/cluster "
        "raypar/cluster/lifecycle raypar/cluster/nodes raypar/cluster/placement raypar/config "
        "raypar/config/conflicts raypar/job/layout raypar/job/look raypar/job/recover raypar/job/start "
        "raypar/job/stepping raypar/job/steps raypar/job/text raypar/planner raypar/planner/memory "
        "raypar/planner/sizes raypar/reporting schedules schedules/drawing"
    ),
    "raypar/job/layout": (
        "actors/data actors/machine actors/mesh actors/models actors/specs raypar raypar/config "
        "raypar/config/conflicts raypar/job/start raypar/planner raypar/reporting schedules"
    ),
    "raypar/job/look": (
        "actors actors/collective actors/mesh actors/models actors/models/tiles actors/specs raypar "
        "raypar/cluster/calls raypar/config raypar/job/start raypar/job/steps raypar/planner raypar/reporting "
        "raypar/reporting/tables schedules schedules/drawing"
    ),
    "raypar/job/recover": (
        "actors actors/checkpoint actors/machine actors/mesh actors/relayout actors/specs raypar "
        "raypar/checkpoint raypar/cluster raypar/cluster/calls raypar/cluster/lifecycle raypar/cluster/nodes "
        "raypar/config raypar/job/layout raypar/job/start raypar/planner raypar/planner/hardware "
        "raypar/planner/memory raypar/planner/sizes schedules"
    ),
    "raypar/job/start": (
        "actors actors/checkpoint actors/data actors/data/examples actors/data/text actors/data/tokenizers "
        "actors/data_parallel actors/hugging_face actors/machine actors/mesh actors/models actors/optim actors/specs "
        "actors/worker/build raypar raypar/checkpoint raypar/cluster raypar/cluster/calls "
        "raypar/cluster/deaths raypar/cluster/lifecycle raypar/cluster/nodes raypar/config "
        "raypar/config/conflicts raypar/config/trial raypar/job/layout raypar/job/recover raypar/job/steps "
        "raypar/planner raypar/reporting schedules"
    ),
    "raypar/job/stepping": (
        "actors actors/checkpoint actors/collective actors/data_parallel actors/inspect actors/machine actors/mesh "
        "actors/models actors/pipeline actors/specs raypar raypar/cluster raypar/config raypar/job/start "
        "raypar/reporting schedules schedules/drawing"
    ),
    "raypar/job/steps": (
        "actors actors/data actors/data/tokenizers actors/mesh actors/models actors/specs actors/worker/build "
        "raypar raypar/cluster raypar/cluster/calls raypar/job/recover raypar/job/start raypar/job/stepping "
        "raypar/reporting raypar/reporting/html schedules schedules/drawing schedules/passes"
    ),
    "raypar/job/text": (
        "actors/data/tokenizers actors/machine actors/specs raypar raypar/config raypar/config/conflicts "
        "raypar/job/start raypar/job/steps raypar/planner/memory schedules"
    ),
    "raypar/parity": (
        "actors actors/autograd actors/collective actors/data actors/expert_parallel actors/inspect actors/machine "
        "actors/mesh actors/models actors/optim actors/optim/muon actors/specs raypar raypar/config raypar/job "
        "raypar/job/start schedules"
    ),
    "raypar/planner": (
        "actors/machine actors/mesh actors/models actors/specs raypar raypar/planner/calibrated "
        "raypar/planner/formulas raypar/planner/hardware raypar/planner/memory raypar/planner/search "
        "raypar/planner/sizes raypar/planner/timing schedules schedules/passes schedules/simulation"
    ),
    "raypar/planner/calibrated": (
        "actors actors/machine actors/mesh actors/models actors/specs raypar raypar/planner "
        "raypar/planner/memory raypar/planner/sizes schedules schedules/simulation"
    ),
    "raypar/planner/fleet": "actors actors/machine raypar raypar/planner/formulas schedules schedules/simulation",
    "raypar/planner/formulas": "",
    "raypar/planner/hardware": "schedules",
    "raypar/planner/memory": (
        "actors actors/machine actors/mesh actors/models actors/models/tiles actors/specs raypar/planner/sizes "
        "schedules schedules/simulation"
    ),
    "raypar/planner/operators": (
        "actors actors/autograd actors/collective actors/models actors/models/own raypar/planner/hardware "
        "raypar/planner/timing schedules"
    ),
    "raypar/planner/search": (
        "actors/mesh actors/specs raypar/planner/formulas raypar/planner/hardware raypar/planner/memory "
        "raypar/planner/sizes raypar/planner/timing schedules"
    ),
    "raypar/planner/sizes": (
        "actors actors/data_parallel actors/mesh actors/models actors/models/tiles actors/optim actors/specs schedules"
    ),
    "raypar/planner/timing": (
        "actors/mesh actors/models actors/specs raypar/planner/formulas raypar/planner/hardware "
        "raypar/planner/memory raypar/planner/sizes schedules schedules/passes schedules/simulation"
    ),
    "raypar/reporting": (
        "actors actors/collective actors/data/examples actors/data/text actors/inspect actors/machine actors/mesh "
        "actors/models actors/optim actors/specs raypar raypar/config raypar/planner "
        "raypar/planner/calibrated raypar/planner/hardware raypar/planner/memory raypar/planner/sizes "
        "raypar/reporting/run_folder raypar/reporting/tables raypar/reporting/trackers schedules "
        "schedules/drawing schedules/passes schedules/simulation"
    ),
    "raypar/reporting/html": (
        "actors/mesh actors/models actors/specs raypar raypar/config raypar/planner raypar/reporting "
        "raypar/reporting/run_folder schedules schedules/drawing"
    ),
    "raypar/reporting/run_folder": (
        "actors actors/collective actors/machine actors/specs raypar raypar/checkpoint raypar/config "
        "raypar/config/conflicts schedules schedules/checking schedules/passes schedules/reading"
    ),
    "raypar/reporting/tables": (
        "actors actors/collective actors/mesh actors/models actors/specs raypar raypar/config raypar/planner "
        "raypar/planner/memory raypar/planner/sizes schedules schedules/drawing"
    ),
    "raypar/reporting/trackers": "actors/specs raypar raypar/config",
    "schedules": (
        "schedules/checking schedules/drawing schedules/generators schedules/passes schedules/reading "
        "schedules/simulation"
    ),
    "schedules/checking": "schedules schedules/drawing schedules/passes schedules/simulation",
    "schedules/drawing": "schedules schedules/reading schedules/simulation",
    "schedules/generators": "schedules schedules/simulation",
    "schedules/passes": "schedules schedules/simulation",
    "schedules/reading": "schedules schedules/generators schedules/passes",
    "schedules/simulation": "schedules",
}
TOLD_NOTHING = (
    "spare tail tape fan desk looks strays copies notes portion excerpts place part extent entrance carriers served "
    "resident past patience guarded performed paper ahead inside plain purity nearby"
)


def module_of(path):
    parts = Path(path).with_suffix("").parts
    parts = parts if parts[0] == "raypar" else ("raypar", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_between(sources):
    """{file: {files that it imports}}, also inside of functions, of those in ``sources``."""
    files, found = {module_of(path): path for path in sources}, {}
    for path, source in sources.items():
        found[path] = set()
        for module, _ in imported(path, nodes_of(ast.parse(source), never_run=False)):
            while module and module not in files:
                module = module.rpartition(".")[0]
            if module not in ("", "raypar") and files[module] != path:
                found[path].add(files[module])
    return found


def folder_of(path):
    """The folder of a file; ``python -m raypar`` is the command line's."""
    return "raypar/cli" if path == "raypar/__main__.py" else Path(path).parent.as_posix()


@cache
def imports_of_rooms():
    return imports_between({path.as_posix(): (ROOT / path).read_text() for path in python_files(*ROOMS)})


def arrow_faults(imports, may_import):
    """Imports from folder to folder that the table does not have."""
    for path, others in imports.items():
        allowed = {folder_of(path), *may_import.get(folder_of(path), "").split()}
        for other in sorted(others):
            if folder_of(other) not in allowed:
                yield f"{path} imports {other}: MAY_IMPORT has no {folder_of(path)} -> {folder_of(other)}"


def circles(imports):
    """A circle of files that import one another, if there is one."""
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        yield " <- ".join(error.args[1])


def name_faults(files):
    """Files whose names told a reader nothing."""
    for path in files:
        if path.parts[0] in ROOMS and path.stem in TOLD_NOTHING.split():
            yield f"{path.as_posix()}: name it after its subject, in the word of the literature"


def test_folders_import_what_the_table_allows():
    assert not (faults := list(arrow_faults(imports_of_rooms(), MAY_IMPORT))), "\n".join(faults)


def test_the_table_names_folders_that_are_there():
    there = {folder_of(path) for path in python_files(*ROOMS)}
    named = {name for folder, others in MAY_IMPORT.items() for name in (folder, *others.split())}
    assert named <= there, named - there


def test_no_files_import_one_another_in_a_circle():
    assert not (found := list(circles(imports_of_rooms()))), "\n".join(found)


def test_files_are_named_after_subjects():
    assert not (faults := list(name_faults(project_files()))), "\n".join(faults)


def public_names(sources):
    """{name: files that define a class or function of this name at their top level, for others}."""
    found = {}
    for path, source in sources.items():
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                found.setdefault(node.name, set()).add(path)
    return found


def repeated(sources):
    """Public names that are defined in several files: one word has one meaning."""
    for name, files in sorted(public_names(sources).items()):
        if len(files) > 1 and name != "__getattr__":
            yield f"{name} is defined in {' and '.join(sorted(files))}"


def test_a_public_name_has_one_meaning():
    sources = {path.as_posix(): (ROOT / path).read_text() for path in python_files(*ROOMS)}
    assert not (faults := list(repeated(sources))), "\n".join(faults)


def test_a_name_with_two_meanings_is_seen():
    one, other = "class Held: ...\ndef _f(): ...", "def Held(): ...\ndef _f(): ..."
    assert list(repeated({"a.py": one, "b.py": other})) == ["Held is defined in a.py and b.py"]
    assert not list(repeated({"a.py": one, "b.py": "x = 1"}))


def test_an_arrow_that_is_not_in_the_table_is_seen():
    sources = {
        "actors/mesh/mesh.py": "from raypar.actors.rng import derive",
        "actors/worker/worker.py": "def f():\n    from raypar.actors.mesh.mesh import Mesh",
        "actors/rng.py": "import hashlib",
    }
    table = {"actors/worker": "actors/mesh", "actors/mesh": "actors"}
    imports = imports_between(sources)
    assert not list(arrow_faults(imports, table))
    (fault,) = arrow_faults(imports, table | {"actors/mesh": "actors/worker"})
    assert fault == "actors/mesh/mesh.py imports actors/rng.py: MAY_IMPORT has no actors/mesh -> actors"
    assert len(list(arrow_faults(imports, {}))) == 2
    never_run = {**sources, "actors/rng.py": "if TYPE_CHECKING:\n    from raypar.actors.mesh.mesh import Mesh"}
    assert not list(arrow_faults(imports_between(never_run), table))


def test_a_circle_is_seen():
    here, there = "actors/mesh/mesh.py", "actors/mesh/world.py"
    sources = {here: "import raypar.actors.mesh.world", there: "def f():\n    from .mesh import Mesh"}
    (circle,) = circles(imports_between(sources))
    assert circle.count(here) + circle.count(there) == 3
    never_run = {**sources, there: "if TYPE_CHECKING:\n    from .mesh import Mesh"}
    assert not list(circles(imports_between(never_run)))


def test_a_name_that_tells_nothing_is_seen():
    assert list(name_faults([Path("actors/layers/spare.py")]))
    assert not list(name_faults([Path("actors/layers/linear.py"), Path("tests/support/plain.py")]))


# --- size, types, docstrings, leftovers ------------------------------------------------------------------------------


def functions(tree, public=True, nested=False):
    """(function, whether it is public) for every function; inside a function or a private class nothing is public."""
    blocks = (getattr(tree, name, ()) for name in ("body", "orelse", "finalbody", "handlers", "cases"))
    for node in chain.from_iterable(blocks):
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


def bare_doctests(docstring):
    """The lines of a docstring that begin a doctest outside its Examples section: the site shows them as quotes."""
    section = 0  # the indentation from which on lines are examples; 0 before the section
    for line in docstring.splitlines():
        indent = len(line) - len(line.lstrip())
        if line.strip() and indent < section:
            section = 0
        if line.strip() == "Examples:":
            section = indent + 1
        elif line.lstrip().startswith(">>>") and not section:
            yield line.strip()


def most_at_once(assignment):
    """How many names an assignment gives the values of a tuple that is written out: 0 for any other assignment."""
    targets = [len(one.elts) for one in assignment.targets if isinstance(one, ast.Tuple)]
    return max(targets, default=0) if isinstance(assignment.value, ast.Tuple) else 0


def calls_of(nodes, name):
    """Those of some nodes that call a function of this name."""
    return [node for node in nodes if isinstance(node, ast.Call) and dotted(node.func) == name]


def style_faults(path, source):
    """Too long, not typed, not explained, or using what this project does not use."""
    lines, (tree, nodes) = source.splitlines(), parsed(source)
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
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            for example in bare_doctests(ast.get_docstring(node) or ""):
                yield f"{path}: {example}: doctests are indented below a line Examples:"
    for module, line in imported(path, nodes):
        if inside(module, *UNPICKLES):
            yield f"{path}:{line}: {module}: nothing is pickled here; safetensors, JSON or TOML"
    for node in nodes:
        if isinstance(node, ast.Attribute) and dotted(node) in UNPICKLES:
            yield f"{path}:{node.lineno}: {dotted(node)}: nothing is pickled here; safetensors, JSON or TOML"
        if isinstance(node, ast.Assign) and most_at_once(node) > MAX_AT_ONCE:
            yield f"{path}:{node.lineno}: more than {MAX_AT_ONCE} assignments in one: give each a line"
        if isinstance(node, ast.Call) and dotted(node.func).endswith("guard") and calls_of(node.args[:1], "partial"):
            yield f"{path}:{node.lineno}: guard(partial(...)): call in a context, or give what is called a name"
        if isinstance(node, ast.Call) and dotted(node.func) == "print" and path not in PRINTS:
            yield f"{path}:{node.lineno}: print outside the command line"


def test_files_are_short_typed_and_explained():
    assert not (faults := faults_by_check()[style_faults]), "\n".join(faults)


def body(lines):
    return "\n".join(["    x = 1"] * lines)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1\n" * 601, "601 lines"),
        (f"def _f() -> None:\n{body(60)}", "61 lines"),
        (f"class A:\n  def f(self) -> None:\n{body(8)}", "no docstring"),
        ("def f(a) -> int: ...", "annotate"),
        ("def f(*a, b: int) -> int: ...", "annotate"),
        ("async def f(a: int): ...", "annotate"),
        ("def f() -> None:\n    def g(a): ...", "annotate"),
        ("print(1)", "print"),
        ("a, b, c, d = 1, 2, 3, 4", "give each a line"),
        ("a = b, c, self.d, e[0] = 1, 2, 3, 4", "give each a line"),
        ("self._life.guard(partial(call, 1))", "guard(partial(...))"),
        ("def _f() -> None:\n    _guard(partial(call, partial(other, 1)))", "guard(partial(...))"),
        ("from pickle import loads", "pickle"),
        ("import torch\ntorch.load('x')", "torch.load"),
        ('def _f() -> None:\n    """Do.\n\n    >>> _f()\n    """', "below a line Examples:"),
        ('"""Do.\n\nExamples:\n    >>> 1\n    1\n\nMore:\n>>> 2\n2\n"""', ">>> 2: doctests are indented"),
    ],
)
def test_a_broken_style_rule_is_seen(source, says):
    faults = list(style_faults("raypar/a.py", source))
    assert len(faults) == 1, faults
    assert says in faults[0]


def test_good_style_is_not():
    nested = "def _f() -> None:\n  def g() -> None:\n" + body(9)
    private = "class _A:\n  def f(self, a: int) -> None:\n" + body(9)
    few = "a, b, c = 1, 2, 3\na, b, c, d = call()\nguard(call, partial(other))\n"
    for good in (few, "x = 1\n" * 600, "def _f(*a: int) -> None:\n" + body(59), nested, private):
        assert not list(style_faults("raypar/a.py", good)), good
    assert not list(style_faults("raypar/cli/main.py", "print(1)"))


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


@pytest.mark.long
def test_the_wheel_can_be_imported(built, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--no-deps", "--no-index", "--target", tmp_path / "site"]
    subprocess.run([*pip, built[0]], check=True)
    code = "import raypar, raypar.actors as a, raypar.schedules as s; print(raypar.__file__, a.__file__, s.__file__)"
    env = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    want = [tmp_path / "site" / "raypar" / room / "__init__.py" for room in ("", "actors", "schedules")]
    assert run.stdout.split() == [str(path) for path in want]


# --- what docs/architecture.md lists ---------------------------------------------------------------------------------


def listed_between(page, name):
    """The lines between ``<!-- name -->`` and ``<!-- /name -->`` of a page."""
    block = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", page, re.DOTALL)
    assert block, f"docs/architecture.md has no lines between <!-- {name} --> and <!-- /{name} -->"
    return block[1].splitlines()


def rows_of(page):
    """{path: what is in it} of the table of folders; the path of a folder ends with a slash."""
    rows = [re.fullmatch(r"\| `([^`]+)` \|(.*)\|", line) for line in listed_between(page, "folders")]
    twice = [path for path, count in Counter(row[1] for row in rows if row).items() if count > 1]
    assert not twice, f"docs/architecture.md lists twice: {', '.join(twice)}"
    return {row[1]: row[2].strip() for row in rows if row}


def folder_faults(listed, files):
    """What the table leaves out, makes up, or does not explain: folders of the rooms, and files loose in a room."""
    code = [path for path in files if path.suffix == ".py" and path.parts[0] in ROOMS]
    folders = {f"{path.parent.as_posix()}/" for path in code if len(path.parts) > 2}
    loose = {path.as_posix() for path in code if len(path.parts) == 2 and path.name != "__init__.py"}
    yield from (f"missing: {path}" for path in sorted((folders | loose) - set(listed)))
    yield from (f"not on the disk: {path}" for path in sorted(set(listed) - folders - loose))
    yield from (f"no words: {path}" for path, words in listed.items() if not words)


def step_faults(page, files):
    """A step that passes too many files, or some that are not there."""
    lines = listed_between(page, "step")
    passed = [found[1] for line in lines if (found := re.match(r"\d+\. `([^`]+)`: \S", line))]
    there = {path.as_posix() for path in files}
    yield from (f"no file and what it does: {line}" for line in lines if not re.match(r"\d+\. `[^`]+`: \S", line))
    yield from (f"not on the disk: {path}" for path in passed if path not in there)
    if not 0 < len(passed) <= MAX_STEP:
        yield f"a step passes {len(passed)} files: tell it in {MAX_STEP} at most"


def architecture():
    return (ROOT / "docs/architecture.md").read_text()


def test_the_folders_of_the_architecture_are_those_of_the_disk():
    assert not (faults := list(folder_faults(rows_of(architecture()), project_files()))), "\n".join(faults)


def test_the_walk_of_a_step_passes_files_that_are_there():
    assert not (faults := list(step_faults(architecture(), project_files()))), "\n".join(faults)


def test_a_wrong_table_of_folders_is_seen():
    page = (
        "<!-- folders -->\n| path | is |\n|---|---|\n| `actors/mesh/` | axes |\n| `raypar/gone/` | |\n<!-- /folders -->"
    )
    assert rows_of(page) == {"actors/mesh/": "axes", "raypar/gone/": ""}
    files = [Path(p) for p in ("actors/mesh/mesh.py", "actors/__init__.py", "actors/rng.py", "raypar/job/job.py")]
    faults = list(folder_faults(rows_of(page), files))
    assert faults == [
        "missing: actors/rng.py",
        "missing: raypar/job/",
        "not on the disk: raypar/gone/",
        "no words: raypar/gone/",
    ]
    with pytest.raises(AssertionError, match="folders"):
        rows_of("# Architecture")
    with pytest.raises(AssertionError, match="lists twice: actors/mesh/"):
        rows_of(page.replace("| `raypar/gone/` | |", "| `actors/mesh/` | again |"))


def test_a_wrong_walk_of_a_step_is_seen():
    files = [Path("raypar/job/job.py")]
    page = "<!-- step -->\n{}<!-- /step -->"
    assert not list(step_faults(page.format("1. `raypar/job/job.py`: takes it.\n"), files))
    faults = list(step_faults(page.format("1. `raypar/gone.py`: takes it.\n2. job.py\n"), files))
    assert faults == ["no file and what it does: 2. job.py", "not on the disk: raypar/gone.py"]
    many = "".join(f"{number}. `raypar/job/job.py`: takes it.\n" for number in range(1, MAX_STEP + 2))
    assert list(step_faults(page.format(many), files)) == [
        f"a step passes {MAX_STEP + 1} files: tell it in {MAX_STEP} at most"
    ]
    assert list(step_faults(page.format(""), files))
