"""The reports of several steps: a list that shows itself as a table, a row for each step."""

from __future__ import annotations

from typing import SupportsIndex, overload

from raypar.reporting.report import Report
from raypar.schedules.drawing.cells import table_in_width
from raypar.schedules.drawing.notebook import box, notebook_table

_ENDS = 10  # rows at each end of a long table
_CUT = "..."


class Reports(list[Report]):
    """The reports of the steps of a training, in their order. A REPL and a notebook show a table.

    Of more than twenty steps it has the first ten and the last ten; the list has all of them.
    """

    @overload
    def __getitem__(self, index: SupportsIndex) -> Report: ...
    @overload
    def __getitem__(self, index: slice) -> Reports: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Report | Reports:
        """Return a report; of a slice, the reports, which are a table too."""
        return Reports(super().__getitem__(index)) if isinstance(index, slice) else super().__getitem__(index)

    def __repr__(self) -> str:
        if not self:
            return "[]"
        heads, rows = self._table()
        return "\n".join(table_in_width([heads, *rows]))

    def _repr_html_(self) -> str:
        heads, rows = self._table()
        return box(notebook_table(rows, heads))

    def _table(self) -> tuple[list[str], list[list[str]]]:
        """Return the names of the columns, and the rows that are shown."""
        heads = ["step", *(self[0].in_brief() if self else ())]
        rows = [[str(report.steps_taken), *report.in_brief().values()] for report in self._shown()]
        if len(rows) < len(self):
            rows.insert(_ENDS, [_CUT] * len(heads))
        return heads, rows

    def _shown(self) -> list[Report]:
        return [*self] if len(self) <= 2 * _ENDS else [*self[:_ENDS], *self[-_ENDS:]]
