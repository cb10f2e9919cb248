"""The buffers of a stage's modules, such as running statistics, over a training step that may not be taken."""

from __future__ import annotations

from raypar.actors.autograd.recompute import Before, Buffers


class StepBuffers:
    """Gives buffers back what they had before a step that was not taken, or before forwards that come again.

    Args:
        buffers: The buffers.
    """

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._before = self._noted = Before({}, {}, {})  # as the step began, and as it ended in doubt

    def begin(self) -> None:
        """Begin a training step."""
        self._before = self._buffers.before()

    def settle(self, *, taken: bool) -> None:
        """End a training step: if it is not taken, buffers get the values that they had before it.

        Args:
            taken: Whether the weights were updated.
        """
        if taken:
            self._buffers.changed(self._before)
        else:
            self._buffers.put_back(self._before)

    def doubt(self) -> None:
        """End a training step whose update may turn out to be wrong, while forwards of the next one follow."""
        self._noted = self._buffers.before()

    def conclude(self, *, taken: bool, is_right: bool) -> None:
        """Settle a step that ended in doubt, and begin the next one.

        Args:
            taken: As in ``settle``.
            is_right: Whether the forwards that followed count; else they come again.
        """
        self._buffers.changed(self._before)
        if not is_right:
            self._buffers.put_back(self._noted if taken else self._before)
        self._before = self._noted if is_right else self._buffers.before()
