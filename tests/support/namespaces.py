"""Commands in namespaces of their own, as containers have them, on this machine and on its network."""

from __future__ import annotations

import os
import shutil
import subprocess

# How two containers that share the host's network are apart: each has processes and a /proc of its own.
CONTAINER = ("--pid", "--fork", "--mount-proc", "--kill-child=KILL")
OTHER_USER = 65534  # nobody, on every Linux


def unshared(*namespaces: str) -> list[str]:
    """Return how a command begins that has namespaces of its own, such as "--net"."""
    return ["unshare", *([] if os.geteuid() == 0 else ["--user", "--map-current-user"]), *namespaces]


def missing(*namespaces: str) -> str:
    """Return why this machine can't make namespaces; an empty text if it can."""
    if shutil.which("unshare") is None:
        return "no unshare"
    done = subprocess.run([*unshared(*namespaces), "true"], capture_output=True, text=True, timeout=20)
    return "" if done.returncode == 0 else f"no namespaces: {done.stderr.strip()}"
