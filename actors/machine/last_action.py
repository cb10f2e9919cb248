"""The last action that an actor has begun, in a memory file, which others can read after the actor has died."""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import suppress

from raypar.actors.machine.system_features import has_feature
from raypar.schedules.action import Action

_NOTE = struct.Struct("<q56s")  # the step, counted from 1, or 0 before the first; and the action's spelling


class LastAction:
    """Records every action that an actor begins. It costs a copy of 64 bytes."""

    def __init__(self) -> None:
        self._note: mmap.mmap | bytearray = bytearray(_NOTE.size)
        self._spelled: dict[Action, bytes] = {}
        self._fd = -1

    def begin(self, step: int, action: Action) -> None:
        """Record that an action of a step, counted from 0, begins."""
        spelled = self._spelled.get(action)
        if spelled is None:
            spelled = self._spelled[action] = str(action).encode()
        _NOTE.pack_into(self._note, 0, step + 1, spelled)

    def forget(self) -> None:
        """Forget the last action, because another run begins."""
        _NOTE.pack_into(self._note, 0, 0, b"")

    def share(self) -> int:
        """Make the record readable for other processes.

        Returns:
            The descriptor of its memory file; -1 if the system has none, as all systems except Linux.
        """
        if self._fd < 0 and has_feature("memory_files"):
            self._fd = os.memfd_create("raypar-last-action")
            os.pwrite(self._fd, self._note, 0)
            self._note = mmap.mmap(self._fd, _NOTE.size)
        return self._fd


def last_action_in(fd: int) -> str:
    """Return the last action in an opened file, such as "1B3 of step 4"; "" if there is none."""
    with suppress(OSError, struct.error, UnicodeDecodeError):
        step, spelled = _NOTE.unpack(os.pread(fd, _NOTE.size, 0))
        return f"{spelled.rstrip(bytes(1)).decode()} of step {step}" if step else ""
    return ""
