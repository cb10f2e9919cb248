"""Executing a notebook in a kernel of its own: ``python -m tests.support.notebooks FILE...`` writes its outputs anew."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

SECONDS = 120  # of a cell, at the most


def executed(path):
    """A notebook with the outputs of this execution. A cell that fails, and is not tagged for it, is an error."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        resources={"metadata": {"path": str(Path(path).parent)}},
        record_timing=False,
        store_widget_state=False,
    ).execute()
    return notebook


if __name__ == "__main__":
    for name in sys.argv[1:]:
        nbformat.write(executed(name), name)
