"""A private name that is gone is refused when raypar is imported, in one sentence with the versions that work."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from raypar.actors.private_names import KNOWN_VERSIONS, module_with

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
HIDDEN = {
    "torch": ("del torch._C._are_functorch_transforms_active", "raypar.actors.autograd.torch_private"),
    "ray": ("del ray.experimental.internal_kv._internal_kv_exists", "raypar.actors.collective.ray.ray_private"),
}
MISSING = {
    "torch": "torch._C._are_functorch_transforms_active",
    "ray": "ray.experimental.internal_kv._internal_kv_exists",
}


def test_names_that_are_there_give_the_module():
    assert module_with("json", ("dumps", "decoder.JSONDecoder")) is sys.modules["json"]


@pytest.mark.parametrize("package", HIDDEN)
def test_a_private_name_that_is_gone_is_refused_in_one_sentence(package):
    hide, module = HIDDEN[package]
    code = f"import importlib\nimport {package}\n"
    if package == "ray":
        code += "import ray.experimental.internal_kv\n"
    code += f"{hide}\nimportlib.import_module({module!r})\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: {package} ") and f"has no {MISSING[package]}, which raypar needs" in last
    assert last.endswith(f"pip install '{package}{KNOWN_VERSIONS[package]}', the versions that are known to work")


def test_a_module_that_is_gone_is_refused_too():
    with pytest.raises(ImportError, match=r"^ray 2\S* has no ray\.no_such_module, which raypar needs: pip install "):
        module_with("ray.no_such_module", ("anything",))


def test_several_names_are_in_one_sentence():
    with pytest.raises(ImportError, match=r"has no torch\.one and no torch\.nn\.two, which raypar needs"):
        module_with("torch", ("one", "nn.two", "nn.Module"))


def test_the_versions_are_those_that_the_package_asks_for():
    needed = tomllib.loads(PROJECT.read_text())["project"]["dependencies"]
    found = {package: next(one for one in needed if one.startswith(package)) for package in KNOWN_VERSIONS}
    assert {package: one.removeprefix(package).removeprefix("[default]") for package, one in found.items()} == (
        KNOWN_VERSIONS
    )
