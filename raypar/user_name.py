"""The name of the person who runs this process, for what others see of a run in a cluster."""

from __future__ import annotations

import getpass
import re

_LONGEST = 20  # characters
_OTHERS = re.compile(r"[^\w.]")


def user_name() -> str:
    """Return the name of this process's user, in characters that names in Ray may have; "" if it is not known."""
    try:
        return _OTHERS.sub("_", getpass.getuser())[:_LONGEST]
    except (KeyError, OSError):  # a container whose user has a number only
        return ""
