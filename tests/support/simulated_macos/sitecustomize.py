"""macOS, as far as raypar's own code can see it. Ray, torch and the standard library go on seeing Linux.

Python imports this file at the start of every process that has its folder on PYTHONPATH, and so of Ray's workers. A
module of raypar that imports ``os`` gets a copy that lacks what macOS lacks; the variable LINUX_ONLY has the names, as
JSON. Files below /proc, /sys and /dev/shm are not there for it. Gloo waits as with its transport "uv": a wait that is
late closes no connection, and one for a process that has died goes on.
"""

from __future__ import annotations

import builtins
import ctypes
import errno
import json
import os
import pathlib
import resource
import socket
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from types import ModuleType, SimpleNamespace

HIDDEN = ("/proc", "/sys", "/dev/shm")
GLIBC = ("mallopt", "malloc_trim", "renameat2", "sync_file_range")
POPULATES = (22, 23)  # advices of madvise that Linux alone knows
COLLECTIVES = ("allreduce", "allgather", "alltoall_base", "barrier", "broadcast", "gather", "reduce", "scatter")
OPS = {*COLLECTIVES, "send", "recv"}
GLOO = "raypar.actors.collective.gloo.group"
IMPORT = builtins.__import__


def is_hidden(path):
    """Whether a path is one that macOS does not have."""
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    return isinstance(text, str) and any(text == top or text.startswith(f"{top}/") for top in HIDDEN)


def absent(path):
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


class Without(ModuleType):
    """A module without some of its names, and with others in place of its own."""

    def __init__(self, real, missing, **others):
        super().__init__(real.__name__)
        self.__dict__.update(others, _real=real, _missing=frozenset(missing))

    def __getattr__(self, name):
        if name in self._missing:
            raise AttributeError(f"module {self._real.__name__!r} has no attribute {name!r}", name=name, obj=self)
        return getattr(self._real, name)

    def __setattr__(self, name, value):
        setattr(self._real, name, value)


def refusing(function):
    """A function of a path to which files of Linux are absent."""

    def called(path, *args, **kwargs):
        if is_hidden(path):
            raise absent(path)
        return function(path, *args, **kwargs)

    return called


class Library(ctypes.CDLL):
    """A library of C that lacks what glibc alone has."""

    def __getattr__(self, name):
        if name in GLIBC:
            raise AttributeError(name)
        if name != "madvise":
            return super().__getattr__(name)
        real = super().__getattr__(name)

        def madvise(start, size, advice):
            if advice.value in POPULATES:
                ctypes.set_errno(errno.EINVAL)
                return -1
            return real(start, size, advice)

        return madvise


class Socket(socket.socket):
    """A socket; local ones have streams and datagrams alone."""

    def __init__(self, family=-1, type=-1, *args, **kwargs):
        if type == socket.SOCK_SEQPACKET:
            raise OSError(errno.EPROTONOSUPPORT, "Protocol not supported")
        super().__init__(family, type, *args, **kwargs)


def usage(who):
    """The maximum of resident memory is in bytes."""
    return SimpleNamespace(ru_maxrss=resource.getrusage(who).ru_maxrss << 10)


def ioctl(*_):
    raise OSError(errno.ENOTTY, os.strerror(errno.ENOTTY))  # numbers of requests are other ones


def modules():
    """What raypar's modules get for some of the standard library."""
    lacks = json.loads(os.environ["LINUX_ONLY"])
    opens = ("open", "stat", "lstat", "statvfs", "listdir", "scandir", "access", "readlink")
    others = {
        "os": {name: refusing(getattr(os, name)) for name in opens},
        "sys": {"platform": "darwin"},
        "ctypes": {"CDLL": Library},
        "socket": {"socket": Socket},
        "resource": {"getrusage": usage},
        "fcntl": {"ioctl": ioctl},
    }
    names = sorted(lacks.keys() | others.keys())
    return {name: Without(IMPORT(name), lacks.get(name, ()), **others.get(name, {})) for name in names}


class UvWork:
    """An operation of Gloo's uv transport, played by one of tcp that another thread waits for."""

    def __init__(self, work):
        self._is_complete = threading.Event()
        threading.Thread(target=self._complete, args=(work,), daemon=True).start()

    def _complete(self, work):
        try:
            work.wait(timedelta(days=1))
        except RuntimeError:
            return  # a connection is closed: uv tells nobody
        self._is_complete.set()

    def wait(self, timeout):
        if not self._is_complete.wait(timeout.total_seconds()):
            milliseconds = round(1e3 * timeout.total_seconds())
            raise RuntimeError(f"[uv/unbound_buffer.cc] Timed out waiting {milliseconds}ms for operation to complete")


class UvGroup:
    """A ProcessGroupGloo with that transport, over one with tcp (``over`` says which class makes it)."""

    make = None

    @classmethod
    def over(cls, real):
        """The class whose groups are over those of torch's class."""
        return type("UvGroup", (cls,), {"make": real, "create_device": real.create_device, "_Options": real._Options})

    def __init__(self, *args):
        self._real = self.make(*args)

    def close(self, peer):
        """Close the connections of tcp, for which the threads of works wait."""
        import torch

        with suppress(RuntimeError):
            self._real.recv([torch.zeros(1)], peer, 1).wait(timedelta(milliseconds=1))

    def __getattr__(self, name):
        real = getattr(self._real, name)
        return (lambda *args, **kwargs: UvWork(real(*args, **kwargs))) if name in OPS else real


def install():
    """Let all modules of raypar that are imported from now on see macOS."""
    replaced = modules()

    def imported(name, globals=None, locals=None, fromlist=(), level=0):
        found = IMPORT(name, globals, locals, fromlist, level)
        gloo = sys.modules.get(GLOO)
        if gloo is not None and hasattr(gloo, "GlooGroup") and not isinstance(gloo.dist, Without):
            gloo.dist = Without(gloo.dist, (), ProcessGroupGloo=UvGroup.over(gloo.dist.ProcessGroupGloo))
        asks = (globals or {}).get("__name__") or ""
        if level or asks.partition(".")[0] != "raypar":
            return found
        return replaced.get(name if fromlist else name.partition(".")[0], found)

    builtins.__import__ = imported
    for name in ("stat", "lstat", "open", "read_text", "read_bytes", "iterdir", "exists", "is_file", "is_dir"):
        setattr(pathlib.Path, name, guarded(name, getattr(pathlib.Path, name)))


def guarded(name, method):
    """A method of Path to which files of Linux are absent if raypar calls it."""

    def called(self, *args, **kwargs):
        if is_hidden(self) and asked_by_raypar():
            if name.startswith(("exists", "is_")):
                return False
            raise absent(self)
        return method(self, *args, **kwargs)

    return called


def asked_by_raypar():
    """Whether the code that has called a method of Path, perhaps through others of pathlib, is raypar's."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("pathlib", __name__):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "raypar"


if "LINUX_ONLY" in os.environ:
    install()
