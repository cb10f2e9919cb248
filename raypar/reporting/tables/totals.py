"""The table of what a job's actors have sent: calls, bytes and seconds of each axis and operation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from raypar.actors.collective.ledger import LedgerEntry
from raypar.errors import UnknownNameError
from raypar.schedules.drawing.cells import table_in_width
from raypar.schedules.drawing.notebook import box, notebook_table

_COUNTED = ("actor", "axis", "op", "calls", "bytes", "seconds")


def unknown_actor(actor: str, known: Iterable[str]) -> UnknownNameError:
    """Return the error for an actor that a table does not have."""
    return UnknownNameError(f"no actor is called {actor!r}: there are {', '.join(known)}")


class Totals(dict[str, dict[tuple[str, str], LedgerEntry]]):
    """Communication totals: by actor, then by (axis, op), calls, bytes and seconds; a table in REPLs and notebooks."""

    def __repr__(self) -> str:
        return "\n".join(table_in_width([_COUNTED, *self._rows]))

    def _repr_html_(self) -> str:
        return box(notebook_table(self._rows, _COUNTED))

    def __missing__(self, actor: str) -> dict[tuple[str, str], LedgerEntry]:
        raise unknown_actor(actor, self)

    @property
    def _rows(self) -> list[Sequence[str]]:
        return [
            (actor, axis, op, f"{entry.calls:,}", f"{entry.bytes:,}", f"{entry.seconds:.3f}")
            for actor, entries in self.items()
            for (axis, op), entry in entries.items()
        ]
