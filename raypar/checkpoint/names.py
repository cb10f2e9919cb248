"""How the folders of checkpoints are named."""

from __future__ import annotations

import re
from pathlib import Path
from uuid import uuid4

_STEP = re.compile(r"step-([0-9]{8,15})")
_ASIDE = re.compile(r"\.step-[0-9]{8,15}\.[0-9a-f]{32}")


def name_of(step: int) -> str:
    """The folder of the checkpoint after so many steps."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """The step that a folder is named after; None if it is not named as a checkpoint."""
    found = _STEP.fullmatch(name)
    return int(found[1]) if found and name == name_of(int(found[1])) else None


def aside_of(step: int) -> str:
    """A new hidden name, for a checkpoint that is not one yet or not one any more."""
    return f".{name_of(step)}.{uuid4().hex}"


def is_aside(name: str) -> bool:
    return _ASIDE.fullmatch(name) is not None


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of every checkpoint in a folder, sound or not, the newest first. Raises OSError."""
    steps = ((step_of(path.name), path) for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(((step, path) for step, path in steps if step is not None), reverse=True)
