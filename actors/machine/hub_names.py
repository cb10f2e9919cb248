"""Names of models at huggingface.co, where a path of a folder is expected."""

from __future__ import annotations

import re

from raypar.actors.machine.files import expanded

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")  # as huggingface.co names a model


def download_hint(folder: str) -> str:
    """Say how the model is downloaded whose name at huggingface.co a user gives as a folder; "" if it is no such name.

    Args:
        folder: What the user gives.
    """
    if expanded(folder).exists() or not _HUB_NAME.fullmatch(folder):
        return ""
    name = folder.partition("/")[2]
    return (
        f"; if {folder} is a model of huggingface.co, hf download {folder} --local-dir {name} fetches it: give {name}"
    )
