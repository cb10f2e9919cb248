"""Why a run can't leave its things in a folder, as far as that is known before it starts."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path

from raypar.fields import brief
from raypar.folder.names import LEDGER, METRICS, RUN, SCHEDULE, TIMELINE, absolute, home_of

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


def folder_faults(folder: str, resumed: Path | None) -> Iterator[str]:
    """All that speaks against a folder for a run that goes on from the checkpoint ``resumed``, or from none."""
    if not folder.strip():
        yield f"folder {folder!r} has no name: give it one, or leave it out"
        return
    try:
        yield from (f"folder {folder!r} {fault}" for fault in _faults(absolute(folder), resumed))
    except (OSError, RuntimeError, ValueError) as error:
        yield f"folder {folder!r} can't be used ({getattr(error, 'strerror', None) or error}): give another path"


def _faults(path: Path, resumed: Path | None) -> Iterator[str]:
    line = (*reversed(path.parents), path)
    new = list(dropwhile(os.path.lexists, line))
    for name in dict.fromkeys([*(step.name for step in new), path.name]):
        if not _NAME.fullmatch(name):
            yield f"has {brief(name)} in it: use up to 100 letters, digits, '.', '_' and '-', and no leading dot"
    above = new[0].parent if new else path
    if not above.is_dir():
        yield f"can't be made: {str(above)!r} is no folder: give another path"
    elif not os.access(above, os.W_OK | os.X_OK):
        yield f"can't be written: there is no permission for {str(above)!r}: give another path"
    if not new and not _is_home(path, resumed):
        taken = [name for name in (RUN, METRICS, SCHEDULE, TIMELINE, LEDGER) if os.path.lexists(path / name)]
        if taken:
            how = f"--resume {path} (in Python launch(run, resume=...))"
            yield f"holds a run already ({taken[0]}): resume it with {how}, or give another folder"


def _is_home(path: Path, resumed: Path | None) -> bool:
    """Whether the checkpoint to go on from lies in this run folder."""
    home = None if resumed is None else home_of(resumed)
    return home is not None and home.resolve() == path.resolve()
