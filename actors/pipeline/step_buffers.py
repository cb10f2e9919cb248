"""Buffers that the forwards of a stage change, such as running statistics, restored after a step that is not taken."""

from __future__ import annotations

from raypar.actors.autograd.forward_state import NOTHING_BEFORE, ForwardState


class StepBuffers:
    """Restores buffers, and frozen parameters that forwards change, to their values before a step that is not taken.

    Or to those before forwards that are repeated.

    Args:
        state: The buffers and parameters.
    """

    def __init__(self, state: ForwardState) -> None:
        self._state = state
        self._before = self._noted = NOTHING_BEFORE  # at the step's begin, and at the end of a speculative step

    def begin(self) -> None:
        """Begin a training step."""
        self._before = self._state.before()

    def settle(self, *, taken: bool) -> None:
        """End a training step; if it is not taken, restore the buffers' values before it.

        Args:
            taken: Whether the weights were updated.
        """
        if taken:
            self._state.changed(self._before)
        else:
            self._state.put_back(self._before)

    def speculate(self) -> None:
        """End a training step whose update may turn out to be wrong, while forwards of the next step follow."""
        self._state.changed(self._before)  # buffers that this step was the first to change are saved, too
        self._noted = self._state.before()

    def conclude(self, *, taken: bool, is_right: bool) -> None:
        """Settle a speculative step, and begin the next one.

        Args:
            taken: As in ``settle``.
            is_right: Whether the forwards that followed are valid; else they are repeated.
        """
        self._state.changed(self._before)
        if not is_right:
            self._state.put_back(self._noted if taken else self._before)
        self._before = self._noted if is_right else self._state.before()
