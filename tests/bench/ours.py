"""raypar itself, as README.md has it: launch the run, take steps."""

from __future__ import annotations

from collections import Counter

import raypar as rp


class RayparTrainer:
    """The driver of a job."""

    def __init__(self, run: rp.Run) -> None:
        self.job, self._peak = rp.launch(run), list[int]()

    def train(self, first: int, steps: int) -> list[float]:
        reports = self.job.train(steps)
        assert reports[0].step == first, "the job is at another step than the bench"
        marks = [report.peak_memory for report in reports]
        self._peak = [max(of_process) for of_process in zip(*marks, self._peak or marks[0], strict=True)]
        return [report.loss for report in reports]

    def peak(self) -> list[int]:
        return self._peak

    def waited(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        ledger = self.job.ledger()
        for table in ledger.values():
            for (axis, op), entry in table.items():
                found[f"{axis} {op}"] += entry.seconds / len(ledger)
        return dict(found)

    def close(self) -> None:
        self.job.close()
