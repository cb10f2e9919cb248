"""The processes below one, and those that name something, as Linux tells of them."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def command_line(pid):
    """The words of a process; "" if it has ended, or ends."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def lives(pid):
    """Whether a process is there, and has not ended without its parent's notice."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def every_process():
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def descendants(pid):
    """The living processes below one."""
    parents = {}
    for one in every_process():
        with suppress(OSError):
            parents[one] = int(Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[1])
    found, level = [], [pid]
    while level:
        level = [one for one, parent in parents.items() if parent in level]
        found += level
    return [one for one in found if lives(one)]


def naming(words):
    """The living processes whose command line has one of these words."""
    return [pid for pid in every_process() if any(word in command_line(pid) for word in words) and lives(pid)]
