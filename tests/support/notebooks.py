"""Notebooks in a kernel of their own: ``python -m tests.support.notebooks FILE...`` writes the outputs anew."""

from __future__ import annotations

import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbconvert import HTMLExporter

SECONDS = 120  # of a cell, at the most


def executed(path):
    """A notebook with the outputs of this execution. A cell that fails, and is not tagged for it, is an error."""
    notebook = nbformat.read(path, as_version=4)
    where = {"metadata": {"path": str(Path(path).parent)}}
    NotebookClient(
        notebook, timeout=SECONDS, resources=where, record_timing=False, store_widget_state=False, coalesce_streams=True
    ).execute()
    notebook.metadata.pop("language_info", None)  # the version of Python, which is not everyone's
    return notebook


def page_of(notebook, theme="light"):
    """A notebook as an HTML page that loads nothing from elsewhere, in the light or dark theme of JupyterLab."""
    page, _ = HTMLExporter(theme=theme, mathjax_url="", require_js_url="").from_notebook_node(notebook)
    return page


if __name__ == "__main__":
    for name in sys.argv[1:]:
        nbformat.write(executed(name), name)
