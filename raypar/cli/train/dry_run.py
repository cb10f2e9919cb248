"""A dry run writes nothing: tokens that the user's cache does not have are converted into a folder that is removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from raypar.actors.data.text.text_files import is_converted
from raypar.actors.machine.files import expanded
from raypar.actors.specs.data import Text
from raypar.actors.specs.run import Run
from raypar.config.fields import field_faults, right_fields


@contextmanager
def sparing_cache(run: Run) -> Iterator[Run]:
    """Give a run that leaves the cache folder of its text as it is, if the user has named one.

    A folder that can't be written stays the run's, so that its check says so.

    Args:
        run: The run.
    """
    text = run.data
    if (
        not isinstance(text, Text)
        or not right_fields([*field_faults(run)])("data")
        or text.cache is None
        or not _is_writable(text.cache)
        or is_converted(text)
    ):
        yield run
        return
    with TemporaryDirectory(prefix="raypar-") as folder:
        yield replace(run, data=replace(text, cache=folder))


def _is_writable(folder: str) -> bool:
    """Return whether a folder could be made and written to."""
    try:
        path = expanded(folder).absolute()
        above = next(one for one in (path, *path.parents) if os.path.lexists(one))
    except (OSError, RuntimeError, ValueError):
        return False
    return Path(above).is_dir() and os.access(above, os.W_OK | os.X_OK)
