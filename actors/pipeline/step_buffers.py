"""What the forwards of a stage change, such as running statistics, over a training step that may not be taken."""

from __future__ import annotations

from raypar.actors.autograd.forward_state import NOTHING_BEFORE, ForwardState


class StepBuffers:
    """Gives buffers, and frozen parameters that forwards change, back what they had before a step that was not taken.

    Or before forwards that come again.

    Args:
        state: The buffers and parameters.
    """

    def __init__(self, state: ForwardState) -> None:
        self._state = state
        self._before = self._noted = NOTHING_BEFORE  # as the step began, and as it ended before all agreed

    def begin(self) -> None:
        """Begin a training step."""
        self._before = self._state.before()

    def settle(self, *, taken: bool) -> None:
        """End a training step: if it is not taken, buffers get the values that they had before it.

        Args:
            taken: Whether the weights were updated.
        """
        if taken:
            self._state.changed(self._before)
        else:
            self._state.put_back(self._before)

    def doubt(self) -> None:
        """End a training step whose update may turn out to be wrong, while forwards of the next one follow."""
        self._state.changed(self._before)  # what this step was the first to change is saved, too
        self._noted = self._state.before()

    def conclude(self, *, taken: bool, is_right: bool) -> None:
        """Settle a step that ended in doubt, and begin the next one.

        Args:
            taken: As in ``settle``.
            is_right: Whether the forwards that followed count; else they come again.
        """
        self._state.changed(self._before)
        if not is_right:
            self._state.put_back(self._noted if taken else self._before)
        self._before = self._noted if is_right else self._state.before()
