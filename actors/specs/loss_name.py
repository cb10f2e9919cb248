"""Recognise a loss by its name."""

from __future__ import annotations


def names_cross_entropy(loss: str) -> bool:
    """Return whether a name of a loss is that of a cross-entropy, as torch spells it for functions and for classes."""
    return "crossentropy" in loss.lower().replace("_", "")
