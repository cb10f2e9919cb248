"""The lowest versions that pyproject.toml allows, as constraints for pip: ``python -m tests.support.lowest``.

torch alone stays at the pin of constraints.txt: PyPI has its older versions with CUDA only, several gigabytes.
``python -m tests.support.lowest --torch`` lowers it too.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXTRAS = ("dev", "hf")  # what make test-lowest installs
_BOUND = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*\])?\s*>=\s*([0-9.]+)")


def lowest(project: dict[str, object], pins: str, *, lowers_torch: bool = False) -> list[str]:
    """Return a constraint for each package that a project needs directly, such as ``rich==13``.

    Args:
        project: The table ``project`` of pyproject.toml.
        pins: The text of constraints.txt.
        lowers_torch: Whether torch is lowered too.

    Raises:
        ValueError: If a dependency has no lower bound.
    """
    needs = [*project["dependencies"], *(need for extra in EXTRAS for need in project["optional-dependencies"][extra])]
    if without := [need for need in needs if not _BOUND.match(need)]:
        raise ValueError(f"no lower bound: {', '.join(without)}")
    found = dict(_BOUND.match(need).groups() for need in needs)
    if not lowers_torch:
        (found["torch"],) = re.findall(r"^torch==(\S+)$", pins, re.MULTILINE)
    return [f"{name}=={version}" for name, version in found.items()]


if __name__ == "__main__":
    lowers_torch = "--torch" in sys.argv[1:]
    if not lowers_torch:
        print("torch is not lowered: it stays at the version of constraints.txt", file=sys.stderr)
    read = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    print("\n".join(lowest(read, (ROOT / "constraints.txt").read_text(), lowers_torch=lowers_torch)))
