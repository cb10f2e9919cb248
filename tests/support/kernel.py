"""What the kernel of this machine tells."""

from __future__ import annotations

import os

TELLS_EXITS = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (6, 15)  # of others' children
