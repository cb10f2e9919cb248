"""Errors that tell all that is wrong at once."""

from __future__ import annotations

from typing import Self


class FaultsError(Exception):
    """Base of errors that list faults, a sentence each with its fix; its kinds derive from a standard error besides."""

    def __init__(self, faults: list[str]) -> None:
        self.faults = faults
        super().__init__("\n".join(f"- {fault}" for fault in faults))

    def __reduce__(self) -> tuple[type[Self], tuple[list[str]]]:
        return type(self), (self.faults,)
