"""Facts of a node: interfaces, GPUs, /dev/shm, open files, and the file of Ray's token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def facts_collector() -> Callable[[], dict[str, Any]]:
    """Return a function that returns the facts of the machine on which it runs.

    It uses the standard library only and is nested, so that it is sent to a node as code: the node may lack raypar.
    """

    def collect() -> dict[str, Any]:
        import fcntl
        import importlib.metadata
        import os
        import resource
        import shutil
        import socket
        import stat
        import struct
        import subprocess
        import sys
        from contextlib import suppress
        from pathlib import Path

        interfaces = {}  # their addresses are asked for as Linux has it: elsewhere there are none
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as queried:
            for _, name in socket.if_nameindex():
                request = struct.pack("256s", name.encode()[:15])
                with suppress(OSError):  # without an address
                    answer = fcntl.ioctl(queried.fileno(), 0x8915, request)  # SIOCGIFADDR
                    speed = -1
                    with suppress(OSError, ValueError):  # virtual ones have none
                        speed = int(Path(f"/sys/class/net/{name}/speed").read_text())
                    interfaces[name] = {"address": socket.inet_ntoa(answer[20:24]), "mbits": speed}
        gpus = []
        if shutil.which("nvidia-smi"):
            with suppress(OSError, subprocess.TimeoutExpired):
                command = ["nvidia-smi", "-L"]
                listed = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout
                gpus = [line for line in listed.splitlines() if line.startswith("GPU ")]
        token_file = os.environ.get("RAY_AUTH_TOKEN_PATH") or str(Path("~/.ray/auth_token").expanduser())
        mode = -1
        with suppress(OSError):
            mode = stat.S_IMODE(Path(token_file).stat().st_mode)
        torch = ""
        with suppress(importlib.metadata.PackageNotFoundError):
            torch = importlib.metadata.version("torch")
        shm = {"total": 0, "free": 0}
        with suppress(OSError):
            found = os.statvfs("/dev/shm")
            shm = {"total": found.f_blocks * found.f_frsize, "free": found.f_bavail * found.f_frsize}
        return {
            "system": sys.platform,
            "interfaces": interfaces,
            "gpus": gpus,
            "torch": torch,
            "shm": shm,
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "token_file": token_file,
            "token_mode": mode,
            "auth_mode": os.environ.get("RAY_AUTH_MODE", "token").lower(),
        }

    return collect
