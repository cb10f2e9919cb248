"""Failed communications, and their descriptions."""

from __future__ import annotations

from raypar.actors.errors import first_line


def plain_reason(error: Exception, seconds: float) -> str:
    """Summarise in one line why a communication failed.

    The backends' own messages carry file names and stack frames.

    Args:
        error: The exception that the backend raised.
        seconds: The deadline of the failed wait, for the message.
    """
    text = first_line(error)
    text = text.rsplit("] ", 1)[-1] if text.startswith("[") else text
    lowered = text.lower()
    if "caused pair closure" in lowered:  # how Gloo fails a group's other waits when one of them expires
        return "the group was aborted"
    if "timed out" in lowered or "timeout" in lowered or isinstance(error, TimeoutError):
        return f"nothing came within {seconds:g} s"
    if any(word in lowered for word in ("closed", "reset by peer", "broken pipe", "read error", "write error")):
        return "the connection was closed at the other end (the peer died or gave up)"
    return text


class GroupError(RuntimeError):
    """A failed communication.

    The group is closed afterwards. Its members must join a new generation of it or give up.

    Args:
        group: Name of the group.
        op: Name of the op.
        peer: Rank of the other side; None if all members took part.
        reason: Why the op failed.
    """

    def __init__(self, group: str, op: str, peer: int | None, reason: str) -> None:
        super().__init__(group, op, peer, reason)
        self.group, self.op = group, op
        self.peer, self.reason = peer, reason

    def __str__(self) -> str:
        whom = "" if self.peer is None else f" with rank {self.peer}"
        return f"group {self.group}: {self.op}{whom} failed: {self.reason}"
