"""Calls without Ray: what stands for an object ref of a call."""

from __future__ import annotations

from concurrent.futures import Future


class Ref(Future):
    """An object ref whose answer is set by the test, or by a thread that works on it."""

    def future(self):
        return self


def answered(value):
    """A call that has returned a value, or has failed with it."""
    ref = Ref()
    (ref.set_exception if isinstance(value, Exception) else ref.set_result)(value)
    return ref
